"""Clients of a router with workers that know which worker they have, and go on with their streams at another one."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import grpc.aio

from baton.endpoint import split_endpoint
from baton.errors import BatonError
from cli.supervisor import ROUTER_NAME
from tests.support.attaching import Reader
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Client,
    RunningCluster,
    http_endpoint,
    make_request,
    mock_tokens,
    wait_for,
)
from tests.support.sse import Stream

SILENT_S_MAX: Final = 2.0
"""A client that has heard nothing for this long takes its router for gone, and comes back."""
CALLS_MAX: Final = 60
"""Of one client for one answer."""


def workers(cluster: RunningCluster) -> list[int]:
    """Their process ids."""
    children = Path(f"/proc/{cluster.cluster.pids[ROUTER_NAME]}/task")
    pids = [int(pid) for thread in children.iterdir() for pid in (thread / "children").read_text().split()]
    return [pid for pid in pids if b"router.worker " in _text(Path(f"/proc/{pid}/cmdline"))]


def lives(pid: int) -> bool:
    return b"State:\tZ" not in (found := _text(Path(f"/proc/{pid}/status"))) and bool(found)


def in_session_of(pid: int) -> list[int]:
    """All living processes of the session that this one has begun."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and lives(int(folder.name)):
            with suppress(OSError):
                found += [int(folder.name)] if os.getsid(int(folder.name)) == pid else []
    return found


def _text(path: Path) -> bytes:
    """Empty where the process is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def connections(cluster: RunningCluster, endpoint: str) -> dict[int, set[int]]:
    """The clients' ports of the connections to a public port that each worker has."""
    port = split_endpoint(endpoint)[1]
    clients = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        own, peer, inode = (line.split()[i] for i in (1, 2, 9))
        if int(own.split(":")[1], 16) == port and inode != "0":
            clients[f"socket:[{inode}]"] = int(peer.split(":")[1], 16)
    found: dict[int, set[int]] = {}
    for pid in workers(cluster):
        names = set()
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    names.add(str(entry.readlink()))
        found[pid] = {client for name, client in clients.items() if name in names}
    return found


def owner(cluster: RunningCluster, endpoint: str, client_port: int) -> int | None:
    """The worker that has the connection from this port; None: nobody yet."""
    return next((pid for pid, ports in connections(cluster, endpoint).items() if client_port in ports), None)


class OwnClient(Client):
    """With a connection of its own."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        channel = grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])
        self._channel, self.stub = channel, type(self.stub)(channel)


class HttpStream(Stream):
    """One answer over HTTP, on as many connections as it takes. Blocks: for a thread of its own."""

    def __init__(self, cluster: RunningCluster, prompt: list[int], tokens: int) -> None:
        super().__init__()
        self._endpoint = http_endpoint(cluster)
        self._body = json.dumps(
            {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "resumable": True,
             "return_token_ids": True}
        ).encode()  # fmt: skip
        self.calls = 0
        self.leave = False
        """Close the connection behind the next event, and come back."""

    @property
    def has(self) -> int:
        return len(self.ids[0])

    def run(self) -> None:
        while not self.done:
            self.calls += 1
            assert self.calls <= CALLS_MAX, (self.has, self.error)
            with suppress(OSError, http.client.HTTPException):
                self._call()

    def _call(self) -> None:
        with closing(http.client.HTTPConnection(self._endpoint, timeout=SILENT_S_MAX)) as connection:
            connection.request("POST", "/v1/completions", self._body, self.headers() if self.last_id else {})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            self.read(self._lines(response))
            assert self.error is None, self.error

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        while line := response.readline():
            yield line
            if self.leave and line == b"\n" and self.has:
                self.leave = False
                return


class GrpcStream(Reader):
    """One answer over gRPC, the same way."""

    def __init__(self, cluster: RunningCluster, prompt: list[int], tokens: int) -> None:
        super().__init__(make_request(prompt, max_tokens=tokens))
        self._endpoint = cluster.cluster.router
        self.calls = 0
        self.leave = False

    @property
    def has(self) -> int:
        return len(self.ids)

    async def run(self) -> None:
        while self.finished is None:
            self.calls += 1
            assert self.calls <= CALLS_MAX, self.has
            client = OwnClient(self._endpoint)
            try:
                await client.connect()
                if self.token:
                    self.attach(client)
                else:
                    self.generate(client)
                while self.finished is None and not (self.leave and self.has):
                    async with asyncio.timeout(SILENT_S_MAX):
                        await self.read(self.has + 1)
                self.leave = False
            except (BatonError, TimeoutError):
                pass
            finally:
                await client.close()


class Streams:
    """Several of both kinds at once."""

    def __init__(self, cluster: RunningCluster, prompts: list[list[int]], tokens: int) -> None:
        self._cluster = cluster
        self._prompts = prompts
        self._tokens = tokens
        self.http = [HttpStream(cluster, prompt, tokens) for prompt in prompts]
        self.grpc = [GrpcStream(cluster, prompt, tokens) for prompt in prompts]
        self._threads = ThreadPoolExecutor(len(prompts))
        self._tasks: list[asyncio.Future[Any]] = []

    @property
    def all(self) -> list[HttpStream | GrpcStream]:
        return [*self.http, *self.grpc]

    async def start(self) -> None:
        """Until each has a token."""
        loop = asyncio.get_running_loop()
        self._tasks += [loop.run_in_executor(self._threads, stream.run) for stream in self.http]
        self._tasks += [asyncio.create_task(stream.run()) for stream in self.grpc]
        await self.go_on()

    async def go_on(self) -> None:
        """Until each has had another token; none is over."""
        had = [stream.has for stream in self.all]

        async def more() -> bool:
            failed = [task for task in self._tasks if task.done()]
            for task in failed:
                task.result()
            assert not failed, "it is over already"
            return all(stream.has > before for stream, before in zip(self.all, had, strict=True))

        await wait_for(more, "more tokens of each", story=self._cluster.story, timeout_s=CALL_S_MAX)

    async def end(self) -> None:
        """Each has all its tokens, once."""
        await asyncio.gather(*self._tasks)
        self._threads.shutdown()
        for prompt, over_http, over_grpc in zip(self._prompts, self.http, self.grpc, strict=True):
            expected = mock_tokens(prompt, self._tokens)
            assert over_http.ids[0] == expected
            assert over_http.ends[0] == ["length"]
            assert len(over_http.heads) == 1, over_http.heads
            assert over_grpc.ids == expected

    async def give_up(self) -> None:
        """Nobody is there any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()

    async def forget(self) -> None:
        """They have been read: nodes may free what they keep of them."""
        for stream in self.grpc:
            await stream.forget(self._cluster.client)
        await asyncio.to_thread(self._delete)

    def _delete(self) -> None:
        for stream in self.http:
            ((name, *_),) = stream.heads
            with closing(http.client.HTTPConnection(http_endpoint(self._cluster), timeout=CALL_S_MAX)) as connection:
                connection.request("DELETE", f"/v1/requests/{name}", headers=stream.headers())
                assert connection.getresponse().status == 204


def count(cluster: RunningCluster) -> Counter[int]:
    """Connections of each worker, at both doors."""
    found: Counter[int] = Counter()
    for endpoint in (http_endpoint(cluster), cluster.cluster.router):
        for pid, ports in connections(cluster, endpoint).items():
            found[pid] += len(ports)
    return found
