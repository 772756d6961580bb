"""Every kind of directory goes through the same scenes: the embedded one over gRPC, and a Redis server."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from batonpb import directory_pb2

from baton.clock import Clock
from baton.directory import DirectoryLimits
from baton.directory_client import Directory, EmbeddedDirectory
from baton.directory_redis import RedisDirectory, RedisDirectoryConfig
from baton.directory_service import DirectoryConfig, DirectoryService
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from tests.conformance.directory_suite import LONG_MS, DirectorySuite, Place
from tests.support.redis_harness import RedisServer, redis_server

CALL_MS_MAX = 10_000


class EmbeddedPlace(Place):
    def __init__(self, limits: DirectoryLimits) -> None:
        self._config = DirectoryConfig(limits=limits, expire_interval_ms=10)
        self._channels = Channels(limits=ChannelLimits())
        self._port = 0
        self._service: DirectoryService | None = None
        self._server: RpcServer | None = None

    def client(self) -> Directory:
        return EmbeddedDirectory(f"127.0.0.1:{self._port}", channels=self._channels, call_ms_max=CALL_MS_MAX)

    async def start(self) -> None:
        self._service = DirectoryService(config=self._config, clock=Clock())
        self._server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
        self._service.start(self._server)
        self._port = await self._server.start(f"127.0.0.1:{self._port}")

    async def stop(self) -> None:
        assert self._service is not None
        assert self._server is not None
        await self._service.close()
        await self._server.stop(0)

    async def put(self, message: directory_pb2.NodeRecord) -> None:
        assert self._service is not None
        await self._service.Push(directory_pb2.PushRequest(record=message, ttl_ms=LONG_MS), None)

    async def close(self) -> None:
        await self._channels.close()
        await self.stop()


class TestEmbeddedDirectory(DirectorySuite):
    def open_place(self, limits: DirectoryLimits) -> AbstractAsyncContextManager[Place]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Place]:
            place = EmbeddedPlace(limits)
            await place.start()
            try:
                yield place
            finally:
                await place.close()

        return opened()


class RedisPlace(Place):
    def __init__(self, server: RedisServer, limits: DirectoryLimits) -> None:
        self._server = server
        self._config = RedisDirectoryConfig(call_ms_max=CALL_MS_MAX, watch_interval_ms=10, limits=limits)
        self._clients: list[RedisDirectory] = []

    def client(self) -> Directory:
        client = RedisDirectory(self._server.address, clock=Clock(), config=self._config)
        self._clients.append(client)
        return client

    async def start(self) -> None:
        self._server.start()

    async def stop(self) -> None:
        self._server.kill()

    async def put(self, message: directory_pb2.NodeRecord) -> None:
        client = RedisDirectory(self._server.address, clock=Clock(), config=self._config)
        self._clients.append(client)
        await client.push_message(message, ttl_ms=LONG_MS)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@pytest.fixture(scope="class")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class TestRedisDirectory(DirectorySuite):
    @pytest.fixture(autouse=True)
    def _fresh(self, server: RedisServer) -> None:
        server.kill()
        server.start()
        self.server = server

    def open_place(self, limits: DirectoryLimits) -> AbstractAsyncContextManager[Place]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Place]:
            place = RedisPlace(self.server, limits)
            try:
                yield place
            finally:
                await place.close()

        return opened()
