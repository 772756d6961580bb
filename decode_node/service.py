"""The decode node's gRPC services: messages in, messages out, everything else in `DecodeNode` and `Receiver`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from batonpb import decode_pb2, decode_pb2_grpc, transfer_pb2

from baton.drain import node_draining
from baton.errors import Reason, bad_field
from baton.ids import Incarnation, ReserveNumber
from baton.runtime import NodeRuntime
from baton.wire import check_header, key_from_proto
from decode_node.job import check_resumable
from decode_node.node import DecodeNode
from node.service import TransferService, commit_reply
from node.transfers import Transfers


class ReceiverService(TransferService):
    """baton.v1.Transfer of a node that requests are handed over to."""

    def __init__(self, node: DecodeNode, transfers: Transfers, runtime: NodeRuntime) -> None:
        super().__init__(transfers, runtime)
        self._node = node

    async def Reserve(self, request: transfer_pb2.ReserveRequest, context: Any) -> transfer_pb2.ReserveReply:
        if request.HasField("fetch_blocks"):
            return await super().Reserve(request, context)
        pair = self._pair(request.header)
        if not request.key.request:
            raise bad_field("key.request", "A Reserve needs a request id.")
        if not request.prompt:
            raise bad_field("prompt", "A Reserve needs the prompt's token ids.", reason=Reason.EMPTY_PROMPT)
        if request.HasField("resumable"):
            check_resumable(request.resumable)
        if not self._lifecycle.takes_requests and not self._receiver.grants.has_answered(
            pair, ReserveNumber(request.number)
        ):
            raise node_draining(self._own)
        return self._node.reserve(request, pair)

    async def Commit(self, request: transfer_pb2.CommitRequest, context: Any) -> transfer_pb2.CommitReply:
        if request.HasField("blocks_filled"):
            return await super().Commit(request, context)
        committed = await self._node.commit(request, self._pair(request.header))
        return commit_reply(committed)


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """baton.v1.Decode, for routers."""

    def __init__(self, node: DecodeNode, own: Incarnation) -> None:
        self._node = node
        self._own = own

    async def Subscribe(
        self, requests: AsyncIterator[decode_pb2.SubscribeRequest], context: Any
    ) -> AsyncIterator[decode_pb2.TokenBatch]:
        messages = aiter(requests)
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "open":
            raise bad_field("open", "The first message of Subscribe must be `open`.")
        router = check_header(first.open.header, own=self._own)
        # So that the router knows that it is connected before there is a token.
        await context.send_initial_metadata(())
        lost, cursors = [], {}
        for cursor in first.open.cursors:
            key, epoch = key_from_proto(cursor.key), cursor.key.epoch
            if self._node.is_router_of(key, router, epoch):
                cursors[key] = cursor.next_index
            else:  # the router was away meanwhile, and would wait for ever
                lost.append((key, epoch, self._node.is_taken_over(key, epoch)))
        # Nothing is waited for in between: what another router takes over from now on, this one is told by the stream.
        batches = self._node.streams.subscribe(
            router, cursors, self._words(router, messages), lost=lost, packed=first.open.packed
        )
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    async def _words(self, router: Incarnation, requests: AsyncIterator[decode_pb2.SubscribeRequest]) -> None:
        async for request in requests:
            for key in request.done.keys:
                self._node.done(router, key_from_proto(key), key.epoch)
            for left in request.leave.requests:
                self._node.leave(router, key_from_proto(left.key), left.key.epoch, ended=left.ended)

    async def Cancel(self, request: decode_pb2.CancelRequest, context: Any) -> decode_pb2.CancelReply:
        sender, key = check_header(request.header, own=self._own), key_from_proto(request.key)
        epoch = request.key.epoch
        if not self._node.ends_by(key, sender, epoch):
            return decode_pb2.CancelReply(known=True)
        notify_router = not self._node.is_router_of(key, sender, epoch)
        return decode_pb2.CancelReply(known=self._node.cancel(key, request.reason, notify_router=notify_router))

    async def Resolve(self, request: decode_pb2.ResolveRequest, context: Any) -> decode_pb2.ResolveReply:
        check_header(request.header, own=self._own)
        key = key_from_proto(request.key)
        if self._node.is_taken_over(key, request.key.epoch):
            return decode_pb2.ResolveReply(taken_over=True)
        return decode_pb2.ResolveReply(committed=self._node.resolve(key))

    async def TakeOver(self, request: decode_pb2.TakeOverRequest, context: Any) -> decode_pb2.TakeOverReply:
        return self._node.take_over(request, check_header(request.header, own=self._own))
