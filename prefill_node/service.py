"""The prefill node's gRPC services: messages in, messages out, everything else in `PrefillNode` and `WriterPeer`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from batonpb import prefill_pb2, prefill_pb2_grpc

from baton.drain import node_draining
from baton.ids import Incarnation
from baton.tracing import forward_metadata
from baton.wire import check_header
from prefill_node.node import PrefillNode


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """baton.v1.Prefill, for routers."""

    def __init__(
        self, node: PrefillNode, own: Incarnation, takes_requests: Callable[[], bool], rng: random.Random
    ) -> None:
        self._rng = rng
        self._node = node
        self._own = own
        self._takes_requests = takes_requests

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        check_header(request.header, own=self._own)
        if not self._takes_requests():
            raise node_draining(self._own)
        # What the router waits for from here on is its turn, not the node.
        await context.send_initial_metadata(())
        deadline_s = asyncio.get_running_loop().time() + context.time_remaining()
        metadata = forward_metadata(context.invocation_metadata(), self._rng)
        events = self._node.prefill(request, deadline_s=deadline_s, metadata=metadata)
        async with aclosing(events):
            async for event in events:
                yield event
