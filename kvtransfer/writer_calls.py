"""What a writer asks of one receiver process: a method for each call, with its deadline. None is repeated here."""

from __future__ import annotations

from dataclasses import dataclass

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from baton.errors import BatonError, Reason, bad_field
from baton.ids import GrantId, Pair, RequestKey
from baton.rpc_client import Channels, rpc_errors
from kvtransfer.checksums import RecordChecksums
from kvtransfer.handoff import Handoff, Metadata
from kvtransfer.protocol.receiver import Refusal
from kvtransfer.protocol.writer import SendCommit, SendRelease, SendReserve


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A receiver process, from the directory."""

    name: str
    endpoint: str
    pair: Pair


class ReceiverCalls:
    """Calls to the process at `address`. All of them raise BatonError; INCARNATION_MISMATCH: it is another one now."""

    def __init__(self, *, address: PeerAddress, channels: Channels, reserve_ms_max: int, call_ms_max: int) -> None:
        self._address = address
        self._channels = channels
        self._reserve_s_max = reserve_ms_max / 1000
        self._call_s_max = call_ms_max / 1000
        self._transfer = transfer_pb2_grpc.TransferStub(channels.get(address.endpoint))

    async def connect(self, request: transfer_pb2.ConnectRequest) -> transfer_pb2.ConnectReply:
        with rpc_errors(self._address.endpoint):
            reply: transfer_pb2.ConnectReply = await self._transfer.Connect(request, timeout=self._call_s_max)
        return reply

    async def reserve(
        self, request: transfer_pb2.ReserveRequest, instruction: SendReserve, metadata: Metadata
    ) -> transfer_pb2.ReserveReply:
        """Fills in the request's numbers and header."""
        request.number, request.lowest_live = instruction.number, instruction.lowest_live
        request.header.CopyFrom(self._header())
        with rpc_errors(self._address.endpoint):
            reply: transfer_pb2.ReserveReply = await self._transfer.Reserve(
                request, timeout=self._reserve_s_max, metadata=metadata
            )
        return reply

    async def renew(self, grant: GrantId, *, timeout_s: float) -> transfer_pb2.RenewReply:
        request = transfer_pb2.RenewRequest(header=self._header(), grant=grant)
        with rpc_errors(self._address.endpoint):
            reply: transfer_pb2.RenewReply = await self._transfer.Renew(request, timeout=timeout_s)
        return reply

    async def commit(self, handoff: Handoff, instruction: SendCommit, checksums: RecordChecksums | None) -> bool:
        """Whether the receiver has committed; False: the grant was revoked. DATA_CORRUPT: it is over for that."""
        request = transfer_pb2.CommitRequest(
            header=self._header(),
            grant=instruction.grant,
            writes=instruction.writes,
            bytes_written=instruction.bytes_written,
            first_token=handoff.first_token,
            first_logprobs=handoff.first_logprobs,
        )
        if checksums is not None:
            request.checksum_layers.extend(checksums.layers_R.tolist())
            request.checksum_blocks.extend(checksums.blocks_R.tolist())
            request.checksums.extend(checksums.crcs_R.tolist())
        with rpc_errors(self._address.endpoint):
            reply: transfer_pb2.CommitReply = await self._transfer.Commit(
                request, timeout=self._call_s_max, metadata=handoff.metadata
            )
        return reply.committed

    async def release(self, instruction: SendRelease) -> None:
        request = transfer_pb2.ReleaseRequest(
            header=self._header(),
            number=instruction.number,
            lowest_live=instruction.lowest_live,
            writes_in_doubt=instruction.in_doubt,
        )
        with rpc_errors(self._address.endpoint):
            await self._transfer.Release(request, timeout=self._call_s_max)

    async def cancel(self, key: RequestKey, why: str) -> None:
        """Whatever became of its Commit, the receiver does not run this attempt."""
        request = decode_pb2.CancelRequest(header=self._header(), reason=why)
        request.key.request, request.key.attempt = key.request, key.attempt
        with rpc_errors(self._address.endpoint):
            stub = decode_pb2_grpc.DecodeStub(self._channels.get(self._address.endpoint))
            await stub.Cancel(request, timeout=self._call_s_max)

    def _header(self) -> common_pb2.Header:
        return common_pb2.Header(sender=self._address.pair.writer, receiver=self._address.pair.receiver)


_GRANT_REFUSALS = frozenset(refusal.value for refusal in Refusal)


def refusal_error(reply: transfer_pb2.ReserveReply, name: str) -> BatonError:
    """What an answer to Reserve that is no grant means to whoever asked."""
    if reply.WhichOneof("answer") == "busy":
        return BatonError(
            Reason.DECODE_FULL,
            f"{name} has no room: {reply.busy.reason}.",
            retry_after_ms=reply.busy.retry_after_ms,
        )
    if reply.reject.reason in _GRANT_REFUSALS:
        return BatonError(Reason.INCOMPATIBLE_NODE, f"{name} refused: {reply.reject.reason}.")
    return bad_field("prompt", f"{name} refused: {reply.reject.reason}.", reason=Reason.PROMPT_TOO_LONG)
