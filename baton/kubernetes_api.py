"""The one call that a node makes to the Kubernetes API: a patch of the annotations of its own pod.

Own code over h11 (HTTP/1.1 without I/O, which uvicorn brings along) in place of the official client: that one is some
tens of megabytes, and blocks. On the event loop, so that a call ends at once when it is cancelled and leaves no thread.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import h11

from baton.endpoint import join_endpoint

TOKEN_FILE: Final = "token"
CA_FILE: Final = "ca.crt"
NAMESPACE_FILE: Final = "namespace"
"""Of a mounted service account, see https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/."""
CONTENT_TYPE: Final = "application/strategic-merge-patch+json"
FIELD_MANAGER: Final = "baton"
ERROR_BODY_BYTES_MAX: Final = 16 * 1024
"""Of the answer to a refused call; that of a successful one is not read."""
RECEIVE_BYTES: Final = 16 * 1024
PROBLEM_CHARS_MAX: Final = 200
_AGAIN_LATER: Final = frozenset({401, 408, 409, 429})
"""Refusals that may pass: 401 while the token is being renewed. All of 5xx too."""


class KubernetesError(Exception):
    """The API server was not reached, or has refused. `may_pass`: another try later may succeed."""

    def __init__(self, problem: str, *, may_pass: bool) -> None:
        super().__init__(problem[:PROBLEM_CHARS_MAX])
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAddress:
    """One pod, the API server that knows it, and the folder of the service account to speak as."""

    api: str
    """https://host[:port]"""
    credentials: Path
    pod: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Credentials:
    token: str
    namespace: str
    tls: ssl.SSLContext


async def patch_annotations(address: PodAddress, annotations: Mapping[str, str | None]) -> None:
    """Set annotations of the pod; None takes one away, and leaves it away. Sets no time limit.

    The files of the service account are read anew each time: the kubelet renews the token. Raises KubernetesError.
    """
    parts = urlsplit(address.api)
    assert parts.scheme == "https" and parts.hostname, address.api
    host, port = parts.hostname, parts.port or 443
    try:
        # Mounted files, but files: not for the event loop.
        credentials = await asyncio.to_thread(_read, address.credentials)
    except (OSError, ValueError) as error:
        problem = f"the service account in {address.credentials} is not usable: {error}"
        raise KubernetesError(problem, may_pass=True) from error
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=credentials.tls)
    except (OSError, ValueError) as error:  # ValueError: the name is none for DNS; ssl.SSLError is an OSError
        raise KubernetesError(f"{address.api} cannot be called: {error}", may_pass=True) from error
    try:
        request = _request(join_endpoint(host, port), address, credentials, annotations)
        status, body = await _call(reader, writer, request)
    except (OSError, h11.ProtocolError) as error:
        raise KubernetesError(f"{address.api} broke the call off: {error}", may_pass=True) from error
    finally:
        # Not closed: there would be a farewell of TLS to wait for.
        writer.transport.abort()
    if not 200 <= status < 300:
        problem = f"{address.api} answered {status}: {_problem(body)}"
        raise KubernetesError(problem, may_pass=status in _AGAIN_LATER or status >= 500)


def _read(folder: Path) -> _Credentials:
    return _Credentials(
        token=(folder / TOKEN_FILE).read_text().strip(),
        namespace=(folder / NAMESPACE_FILE).read_text().strip(),
        tls=ssl.create_default_context(cafile=folder / CA_FILE),
    )


def _request(
    host: str, address: PodAddress, credentials: _Credentials, annotations: Mapping[str, str | None]
) -> list[h11.Event]:
    body = json.dumps({"metadata": {"annotations": dict(annotations)}}).encode()
    path = f"/api/v1/namespaces/{quote(credentials.namespace, safe='')}/pods/{quote(address.pod, safe='')}"
    headers = {
        "Host": host,
        "Authorization": f"Bearer {credentials.token}",
        "Content-Type": CONTENT_TYPE,
        "Content-Length": str(len(body)),
        "Accept": "application/json",
        "Connection": "close",
    }
    target = f"{path}?fieldManager={FIELD_MANAGER}"
    return [
        h11.Request(method="PATCH", target=target, headers=list(headers.items())),
        h11.Data(data=body),
        h11.EndOfMessage(),
    ]


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, events: list[h11.Event]
) -> tuple[int, bytes]:
    """Status, and the body of a refusal. Raises OSError, or h11.ProtocolError for an answer that is no HTTP, or a token
    that cannot be sent."""
    connection = h11.Connection(h11.CLIENT)
    writer.write(b"".join(connection.send(event) or b"" for event in events))
    await writer.drain()
    status, body = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(RECEIVE_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
            if status < 300:
                return status, b""
        elif isinstance(event, h11.Data):
            body += event.data
        if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed) or len(body) > ERROR_BODY_BYTES_MAX:
            return status, body


def _problem(body: bytes) -> str:
    """What a refusal says: the message of a Status object, or the text as it is."""
    try:
        told = json.loads(body)
    except ValueError:
        return body.decode(errors="replace") or "nothing more"
    return str(told.get("message", told)) if isinstance(told, dict) else str(told)
