"""A connection on which nothing passes any more, and which does not end."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from batonpb import node_pb2, node_pb2_grpc

from baton.errors import BatonError, Reason
from baton.liveness import LivenessConfig
from baton.rpc import ChannelLimits, Channels, rpc_errors
from tests.faults.proxy import Proxy
from tests.support.cluster_harness import error_of
from tests.support.rpc_harness import run, serving

CALL_S_MAX = 60.0


def test_a_call_to_a_peer_that_is_cut_off_ends_by_keepalive() -> None:
    """The peer has the call when the network between goes dark: the call ends as unreachable, long before its deadline
    and before gRPC's own minute for a ping."""

    async def scene() -> None:
        taken, never = asyncio.Event(), asyncio.Event()

        async def hold(_request: object, _context: object) -> None:
            taken.set()
            await never.wait()

        async with serving(node=hold) as served:
            proxy = Proxy(("127.0.0.1", 0), ("127.0.0.1", served.port), pids=lambda: {"caller": os.getpid()})
            await proxy.start()
            channels = Channels(limits=ChannelLimits(liveness=LivenessConfig(heartbeat_ms=200, answer_ms_max=500)))

            async def ask() -> Any:
                stub = node_pb2_grpc.NodeStub(channels.get(f"127.0.0.1:{proxy.port}"))
                with rpc_errors("node-0"):
                    return await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=CALL_S_MAX)

            try:
                asking = asyncio.create_task(error_of(ask()))
                await taken.wait()
                proxy.darken("caller")
                error = await asking
                assert isinstance(error, BatonError)
                assert error.reason is Reason.PEER_UNREACHABLE, error
            finally:
                await channels.close()
                await proxy.close()

    run(scene())
