"""Whom `baton bench` sends requests to: a router over gRPC, or any server that speaks OpenAI's API over HTTP."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import h11
from batonpb import inference_pb2

from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, Reason
from baton.rpc_client import Channels
from cli.client import InferenceClient, no_router, unreached

RECEIVE_BYTES: Final = 64 * 1024
CONNECT_S_MAX: Final = 5.0
LINE_BYTES_MAX: Final = 1 << 20
BODY_BYTES_MAX: Final = 64 * 1024
"""Of the answer to a refused call."""
PROBLEM_CHARS_MAX: Final = 300
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class Message(NamedTuple):
    """Some tokens have come."""

    tokens: int
    timed: bool
    """They came now. False: a server told at the end only how many there were."""


Messages = AsyncGenerator[Message, None]


class TargetError(Exception):
    """A request has failed. `kind` is what failures are counted by."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Target(Protocol):
    name: str

    async def check(self) -> None:
        """Raises BatonError where nobody listens."""
        ...

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        """Make one request ready, so that sending it takes no time. The generator, called once, raises TargetError;
        closing it gives the request up."""
        ...


class RouterTarget:
    """A router, over gRPC. Does not own `channels`."""

    def __init__(self, router: str, *, channels: Channels, timeout_s: float, temperature: float) -> None:
        """Raises BatonError BAD_ENDPOINT."""
        self.name = f"router at {router}"
        self._client = InferenceClient(router, channels=channels, timeout_s=timeout_s)
        self._temperature = temperature
        self._router = router

    async def check(self) -> None:
        try:
            await _connect_once(*split_endpoint(self._router))
        except OSError as error:
            raise no_router(unreached(self._router), self._router) from error

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        sampling = inference_pb2.Sampling(temperature=self._temperature, max_tokens=output_tokens, ignore_eos=True)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), sampling=sampling)
        return lambda: self._messages(request)

    async def _messages(self, request: inference_pb2.GenerateRequest) -> Messages:
        try:
            async with aclosing(self._client.events(request)) as events:
                async for event in events:
                    if event.HasField("tokens"):
                        yield Message(len(event.tokens.ids), timed=True)
        except BatonError as error:
            raise TargetError(error.reason.value, error.message) from error


class OpenAiTarget:
    """`POST {url}/v1/completions` as a stream, each request on a connection of its own.

    Servers that do not tell the number of tokens with each chunk (`continuous_usage_stats`) tell it at the end; until
    then a chunk counts as one token.
    """

    def __init__(self, url: str, *, model: str | None, timeout_s: float, temperature: float) -> None:
        """Raises ValueError where `url` is none."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port out of range, half a pair of brackets
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
            raise ValueError(f"--url: '{url}' is no address of a server; write it as http://127.0.0.1:8000")
        self.name = url
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._model = model
        self._timeout_s = timeout_s
        self._temperature = temperature

    async def check(self) -> None:
        try:
            await _connect_once(self._host, self._port)
        except OSError as error:
            text = f"Nobody answers at {self.name}: {_why(error)}. Name another place with --url."
            raise BatonError(Reason.PEER_UNREACHABLE, text) from error

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        body: dict[str, Any] = {
            "prompt": ids,
            "max_tokens": output_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._model is not None:
            body["model"] = self._model
        raw = json.dumps(body).encode()
        headers = {
            "Host": join_endpoint(self._host, self._port),
            "Content-Type": "application/json",
            "Content-Length": str(len(raw)),
            "Accept": "text/event-stream",
            "Connection": "close",
        }
        head = h11.Request(method="POST", target=self._path, headers=list(headers.items()))
        return lambda: self._messages([head, h11.Data(data=raw), h11.EndOfMessage()])

    async def _messages(self, request: list[h11.Event]) -> Messages:
        told = 0
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    message = _message(chunk, told)
                    if message is not None:
                        told += message.tokens
                        yield message
        except TimeoutError:
            text = f"{self.name} did not end its answer within {self._timeout_s:g} s."
            raise TargetError(Reason.DEADLINE.value, text) from None
        except (OSError, h11.ProtocolError, asyncio.LimitOverrunError) as error:
            raise TargetError(Reason.PEER_UNREACHABLE.value, f"{self.name}: {_why(error)}.") from error

    async def _chunks(self, request: list[h11.Event]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of one stream of events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            connection = h11.Connection(h11.CLIENT)
            writer.write(b"".join(connection.send(event) or b"" for event in request))
            rest = b""
            async with aclosing(self._body(connection, reader)) as parts:
                async for part in parts:
                    *lines, rest = (rest + part).split(b"\n")
                    if len(rest) > LINE_BYTES_MAX:
                        raise TargetError("BAD_ANSWER", f"{self.name} sent a line of over {LINE_BYTES_MAX} bytes.")
                    for line in lines:
                        data = line.strip().removeprefix(_DATA).strip() if line.startswith(_DATA) else b""
                        if data == _DONE:
                            return
                        if data:
                            yield self._object(data)
            raise TargetError("CUT_OFF", f"{self.name} ended an answer in its middle.")
        finally:
            writer.transport.abort()

    async def _body(self, connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
        status, refusal = 200, b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(RECEIVE_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == 200:
                    yield bytes(event.data)
                elif len(refusal) < BODY_BYTES_MAX:
                    refusal += event.data
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
        if status != 200:
            raise TargetError(f"HTTP_{status}", f"{self.name} answered {status}: {_problem(refusal)}")

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TargetError("BAD_ANSWER", f"{self.name} sent no JSON object: {data[:80]!r}")
        if found.get("error"):
            raise TargetError("STREAM_ERROR", f"{self.name}: {_problem(data)}")
        return found


async def _connect_once(host: str, port: int) -> None:
    """Raises OSError, TimeoutError among them."""
    async with asyncio.timeout(CONNECT_S_MAX):
        _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()


def _why(error: Exception) -> str:
    """Of a connection that did not come about, or broke."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it has closed the connection"
    if isinstance(error, TimeoutError):
        return "no connection came about in time"
    return str(getattr(error, "strerror", None) or error)


def _message(chunk: dict[str, Any], told: int) -> Message | None:
    """What a chunk adds to the tokens told so far."""
    usage, choices = chunk.get("usage"), chunk.get("choices") or []
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(total, int):
        return Message(total - told, timed=bool(choices)) if total > told else None
    # A last chunk says why the answer ended, and has no token.
    return Message(1, timed=True) if choices and not choices[0].get("finish_reason") else None


def _problem(body: bytes) -> str:
    try:
        found = json.loads(body)
        text = str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return (" ".join(text.split()) or "nothing more")[:PROBLEM_CHARS_MAX]
