"""A double of the Kubernetes API server, for the one call that a node makes: TLS, a token, and answers by script.

with kube_api(tmp_path) as api:
    api.answers.extend([(503, b"later"), api.OK])
    ... api.url, api.credentials, api.calls ...
"""

from __future__ import annotations

import http.server
import json
import shutil
import ssl
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

NAMESPACE: Final = "baton"
TOKEN: Final = "a.bearer-token"
WAIT_S_MAX: Final = 60.0
SILENCE: Final = -1
"""As a status: no answer at all, until the double ends."""

Answer = tuple[int, bytes]
OK: Final[Answer] = (200, b'{"kind": "Pod"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What came in."""

    method: str
    path: str
    content_type: str
    token: str
    body: Any


class KubeApi:
    """One server. Answers `answers` in turn, then OK; or by `decide`, where that is set."""

    def __init__(self, folder: Path) -> None:
        self.credentials = folder / "serviceaccount"
        self.credentials.mkdir()
        key = folder / "key.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=API double",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(self.credentials / "ca.crt")],
            check=True, capture_output=True,
        )  # fmt: skip
        (self.credentials / "token").write_text(TOKEN + "\n")
        (self.credentials / "namespace").write_text(NAMESPACE)
        self.answers: deque[Answer] = deque()
        self.decide: Callable[[Call], Answer] | None = None
        self.calls: list[Call] = []
        self._came = threading.Condition()
        self._over = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.credentials / "ca.crt", key)
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="kube-api-double")

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_port}"

    def wait_for_calls(self, count: int) -> list[Call]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.calls) >= count, WAIT_S_MAX), self.calls
            return list(self.calls)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, call: Call) -> Answer:
        with self._came:
            self.calls.append(call)
            self._came.notify_all()
            if self.decide is not None:
                return self.decide(call)
            return self.answers.popleft() if self.answers else OK

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = WAIT_S_MAX  # of a caller that has connected and says nothing

            def handle(self) -> None:
                # A caller that does not trust us, or that goes away, is no error of the double's.
                try:
                    super().handle()
                except (ssl.SSLError, ConnectionError):
                    self.close_connection = True

            def finish(self) -> None:
                try:
                    super().finish()
                except (ssl.SSLError, ConnectionError):
                    self.close_connection = True

            def do_PATCH(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, text = api._answer(
                    Call(
                        method=self.command,
                        path=self.path,
                        content_type=self.headers["Content-Type"],
                        token=self.headers["Authorization"],
                        body=json.loads(body),
                    )
                )
                if status == SILENCE:
                    api._over.wait(WAIT_S_MAX)
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Quiet."""

        return Handler


def status_body(message: str, code: int) -> bytes:
    """A refusal as the API server words it."""
    return json.dumps(
        {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    ).encode()


@contextmanager
def kube_api(folder: Path) -> Iterator[KubeApi]:
    """Skips the test where there is no openssl to make a certificate with."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian, Ubuntu: apt-get install openssl)")
    api = KubeApi(folder)
    api.start()
    try:
        yield api
    finally:
        api.stop()
