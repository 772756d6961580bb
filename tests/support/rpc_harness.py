"""A gRPC server on the loopback whose handlers do what a test says, and the channels to it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final

from batonpb import (
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer, rpc_errors

HANG_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
Behavior = Callable[..., Any]
SERVICES: Final = {
    "node": (node_pb2, "Node", node_pb2_grpc.add_NodeServicer_to_server),
    "prefill": (prefill_pb2, "Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server),
    "decode": (decode_pb2, "Decode", decode_pb2_grpc.add_DecodeServicer_to_server),
    "inference": (inference_pb2, "Inference", inference_pb2_grpc.add_InferenceServicer_to_server),
}
"""Where it is described, its name, and the generated add function. All methods get the test's behavior."""


class Served:
    """A server and the channels to it; handlers raise, wait or answer as the test says."""

    def __init__(self, server: RpcServer, port: int, channels: Channels) -> None:
        self.server, self.port, self.channels = server, port, channels
        channel = channels.get(f"127.0.0.1:{port}")
        self.node = node_pb2_grpc.NodeStub(channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(channel)
        self.decode = decode_pb2_grpc.DecodeStub(channel)
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def get_status(self, timeout: float | None = HANG_S) -> node_pb2.NodeStatus:
        with rpc_errors("node-0"):
            reply: node_pb2.NodeStatus = await self.node.GetStatus(node_pb2.GetStatusRequest(), timeout=timeout)
        return reply

    async def check(self, service: str) -> int:
        reply = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


async def answer(_request: object, _context: object) -> node_pb2.NodeStatus:
    return node_pb2.NodeStatus(requests=7)


def make_server(limits: RpcLimits | None = None, **behaviors: Behavior) -> RpcServer:
    server = RpcServer(limits=limits or RpcLimits(), rng=random.Random(1))
    for name, behavior in behaviors.items():
        module, service, register = SERVICES[name]
        described = module.DESCRIPTOR.services_by_name[service]
        methods = [method.name for method in described.methods]
        server.add(described.full_name, register, SimpleNamespace(**dict.fromkeys(methods, behavior)))
    return server


@asynccontextmanager
async def serving(limits: RpcLimits | None = None, **behaviors: Behavior) -> AsyncIterator[Served]:
    server = make_server(limits, **behaviors)
    channels = Channels(limits=ChannelLimits())
    try:
        port = await server.start("127.0.0.1:0")
        yield Served(server, port, channels)
    finally:
        await channels.close()
        await server.stop(0)


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S):
            await test

    asyncio.run(limited())
