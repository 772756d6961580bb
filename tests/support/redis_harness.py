"""A real Redis server for tests: on a free port, without a file on disk, gone at the end of the block.

with redis_server() as redis:
    ... redis.url, redis.kill(), redis.start() ...
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from baton.endpoint import RedisAddress
from tests.support.ports import free_ports

STARTS_MAX: Final = 5
"""Somebody else may take the free port between our looking and the server's."""


class RedisServer:
    """One server; `start` after `kill` begins empty, on the same port."""

    def __init__(self, folder: Path, options: Sequence[str], *, tls: bool) -> None:
        self.port = free_ports(1)[0]
        self._folder = folder
        self._options = options
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> RedisAddress:
        return RedisAddress(host="127.0.0.1", port=self.port)

    @property
    def url(self) -> str:
        return str(self.address)

    def start(self) -> None:
        """Return when it accepts connections."""
        assert self._process is None, "it runs"
        for _ in range(STARTS_MAX):
            process = subprocess.Popen(self._command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            output = b""
            for line in process.stdout:
                output += line
                if b"Ready to accept connections" in line:
                    self._process = process
                    return
            process.stdout.close()
            process.wait()
            if b"in use" not in output:
                break
        raise AssertionError(f"redis-server did not start:\n{output.decode(errors='replace')}")

    def kill(self) -> None:
        """As a crash would. All data is lost. Does nothing to a server that was killed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()
            process.wait()

    def pause(self) -> None:
        """It keeps its connections and says nothing, until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _command(self) -> list[str]:
        fixed = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        port = ["--tls-port", str(self.port), "--port", "0"] if self._tls else ["--port", str(self.port)]
        return ["redis-server", *port, *fixed, *self._options]


@contextmanager
def redis_server(*options: str, tls: bool = False) -> Iterator[RedisServer]:
    """Skips the test where Redis is not installed. `options` go to the server's command line."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian, Ubuntu: apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="baton-redis-") as folder:
        server = RedisServer(Path(folder), options, tls=tls)
        try:
            server.start()
            yield server
        finally:
            server.kill()
