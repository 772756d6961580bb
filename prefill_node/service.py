"""The prefill node's gRPC service: messages in, messages out, everything else in `PrefillNode`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from batonpb import prefill_pb2, prefill_pb2_grpc

from baton.drain import node_draining
from baton.runtime import NodeRuntime
from baton.tracing import forward_metadata
from baton.wire import check_header
from prefill_node.node import PrefillNode


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """baton.v1.Prefill, for routers."""

    def __init__(self, node: PrefillNode, runtime: NodeRuntime) -> None:
        self._node = node
        self._runtime = runtime

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        own = self._runtime.incarnation
        check_header(request.header, own=own)
        if not self._runtime.lifecycle.takes_requests:
            raise node_draining(own)
        # What the router waits for from here on is its turn, not the node.
        await context.send_initial_metadata(())
        deadline_s = asyncio.get_running_loop().time() + context.time_remaining()
        metadata = forward_metadata(context.invocation_metadata(), self._runtime.rng)
        events = self._node.prefill(request, deadline_s=deadline_s, metadata=metadata)
        async with aclosing(events):
            async for event in events:
                yield event
