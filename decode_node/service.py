"""The decode node's gRPC services: messages in, messages out, everything else in `DecodeNode` and `Receiver`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from baton.drain import node_draining
from baton.errors import BatonError, Reason, bad_field
from baton.ids import GrantId, Incarnation, Pair, ReserveNumber
from baton.runtime import NodeRuntime
from baton.wire import check_header, key_from_proto, model_from_proto
from decode_node.job import check_resumable
from decode_node.node import DecodeNode
from kvtransfer.link import (
    check_compatible,
    choose,
    host_difference,
    host_parts,
    rejected_transports,
)
from kvtransfer.receiver import LivenessStreams


class ReceiverService(transfer_pb2_grpc.TransferServicer):
    """The receiver's half of baton.v1.Transfer."""

    def __init__(self, node: DecodeNode, liveness_streams: LivenessStreams, runtime: NodeRuntime) -> None:
        self._node = node
        self._receiver = node.receiver
        self._liveness_streams = liveness_streams
        self._lifecycle = runtime.lifecycle
        self._own = runtime.incarnation
        self._host_parts = host_parts()

    async def Connect(self, request: transfer_pb2.ConnectRequest, context: Any) -> transfer_pb2.ConnectReply:
        pair = self._pair(request.header)
        check_compatible(own=self._node.pool.model, peer=model_from_proto(request.model), peer_name=request.writer_name)
        own = self._receiver.ports.transports
        apart = host_difference(request.host_parts, self._host_parts)
        transport = choose(request.transports, own, same_host=not apart)
        if transport is None:
            raise BatonError(
                Reason.INCOMPATIBLE_NODE,
                f"{request.writer_name} offers the transports {', '.join(request.transports) or 'none'}, this node "
                f"{', '.join(t.value for t in own)}; none of them works between the two (shm and cuda_ipc need the "
                "same machine, user and namespaces). Add tcp to the transports of both, where their regions allow it.",
            )
        endpoint = self._receiver.connect(
            pair, request.writer_endpoint, transport, name=request.writer_name, host=request.host_name
        )
        return transfer_pb2.ConnectReply(
            receiver=self._own,
            transport=endpoint.transport.value,
            address=endpoint.address,
            secret=endpoint.secret,
            epoch=endpoint.epoch,
            num_blocks=self._node.ledger.num_blocks,
            rejected_transports=rejected_transports(
                transport,
                request.transports,
                own,
                withdrawn=self._receiver.ports.withdrawn,
                apart=apart,
            ),
        )

    async def Liveness(
        self, request: transfer_pb2.LivenessRequest, context: Any
    ) -> AsyncIterator[transfer_pb2.LivenessReply]:
        async with aclosing(self._liveness_streams.serve(self._pair(request.header))) as replies:
            async for reply in replies:
                yield reply

    async def Reserve(self, request: transfer_pb2.ReserveRequest, context: Any) -> transfer_pb2.ReserveReply:
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

    async def Renew(self, request: transfer_pb2.RenewRequest, context: Any) -> transfer_pb2.RenewReply:
        renewed = self._receiver.renew(self._pair(request.header), GrantId(request.grant))
        return transfer_pb2.RenewReply(renewed=renewed, lease_ms=self._receiver.config.lease_ms)

    async def Commit(self, request: transfer_pb2.CommitRequest, context: Any) -> transfer_pb2.CommitReply:
        committed = await self._node.commit(request, self._pair(request.header))
        return transfer_pb2.CommitReply(committed=committed, reason="" if committed else "the grant is revoked")

    async def Release(self, request: transfer_pb2.ReleaseRequest, context: Any) -> transfer_pb2.ReleaseReply:
        pair = self._pair(request.header)
        number, lowest_live = ReserveNumber(request.number), ReserveNumber(request.lowest_live)
        await self._receiver.release(pair, number, lowest_live, in_doubt=request.writes_in_doubt)
        return transfer_pb2.ReleaseReply()

    def _pair(self, header: common_pb2.Header) -> Pair:
        return Pair(receiver=self._own, writer=check_header(header, own=self._own))


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
