"""Asking a writer to let go of a grant. Its answer is its word, as a let-go is; no answer is none."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio
from batonpb import common_pb2, transfer_pb2, transfer_pb2_grpc

from baton.errors import BatonError
from baton.ids import Pair, ReserveNumber
from baton.repeats import RepeatLog
from baton.rpc_client import Channels, rpc_errors
from baton.tasks import Tasks
from kvtransfer.protocol.receiver import SendRevoke, WriterReleased


class RevokeCalls:
    """At most one call at a time for each grant. Control thread only."""

    def __init__(
        self,
        *,
        channels: Channels,
        tasks: Tasks,
        repeats: RepeatLog,
        revoke_ms: int,
        endpoint_of: Callable[[Pair], str],
        told: Callable[[Pair], str],
        let_go: Callable[[WriterReleased], None],
    ) -> None:
        """`endpoint_of` is where the writer is asked, `told` its name for people; `let_go` gets its word."""
        self._channels = channels
        self._tasks = tasks
        self._repeats = repeats
        self._revoke_ms = revoke_ms
        self._endpoint_of = endpoint_of
        self._told = told
        self._let_go = let_go
        self._under_way: set[tuple[Pair, ReserveNumber]] = set()

    def send(self, instruction: SendRevoke) -> None:
        which = (instruction.pair, instruction.number)
        if which in self._under_way:
            return  # that one ends within revoke_ms, and the timer comes again
        self._under_way.add(which)
        self._tasks.spawn(self._revoke(*which))

    async def _revoke(self, pair: Pair, number: ReserveNumber) -> None:
        endpoint = self._endpoint_of(pair)
        try:
            stub = transfer_pb2_grpc.TransferStub(self._channels.get(endpoint))
            header = common_pb2.Header(sender=pair.receiver, receiver=pair.writer)
            request = transfer_pb2.RevokeRequest(header=header, number=number)
            with rpc_errors(endpoint):
                reply = await stub.Revoke(request, timeout=self._revoke_ms / 1000)
        except BatonError as error:
            self._repeats.warning("revoke unanswered", peer=self._told(pair), number=number, error=error.message)
            return
        except grpc.aio.UsageError:
            return  # the channel was closed under us: this node is stopping
        finally:
            self._under_way.discard((pair, number))
        self._repeats.over(self._told(pair), "it has answered")
        self._let_go(
            WriterReleased(pair=pair, number=number, lowest_live=ReserveNumber(0), in_doubt=reply.writes_in_doubt)
        )
