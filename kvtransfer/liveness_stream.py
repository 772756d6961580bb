"""The liveness stream of a pair: one long call from writer to receiver, open while both live and reach each other.

Each end watches the other by it. A peer that is believed lost may come back, so nothing is freed: the receiver starts a
fence, which ends with its own evidence; the writer gives its handoffs up, which drain as usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from batonpb import transfer_pb2, transfer_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Pair
from baton.liveness import LivenessConfig, Reach
from baton.log import get_log
from baton.rpc_client import rpc_errors

log = get_log("liveness")


class LivenessStreams:
    """The receiver's end: which writers have their stream open. Lives on one event loop.

    `lost` is called for a pair whose stream has ended and was not opened again within `reconnect_ms_max`.
    """

    def __init__(self, *, lost: Callable[[Pair], None], liveness: LivenessConfig) -> None:
        self._lost = lost
        self._wait_s = liveness.reconnect_ms_max / 1000
        self._calls: dict[Pair, int] = {}
        self._timers: dict[Pair, asyncio.TimerHandle] = {}
        self._closing = asyncio.Event()

    async def serve(self, pair: Pair) -> AsyncGenerator[transfer_pb2.LivenessReply, None]:
        """The handler of one stream. Ends with `close`, or by being cancelled when the connection does."""
        self._calls[pair] = self._calls.get(pair, 0) + 1
        timer = self._timers.pop(pair, None)
        if timer is not None:
            timer.cancel()
        try:
            yield transfer_pb2.LivenessReply()
            await self._closing.wait()
        finally:
            self._calls[pair] -= 1
            if self._calls[pair] == 0:
                del self._calls[pair]
                if not self._closing.is_set():
                    loop = asyncio.get_running_loop()
                    self._timers[pair] = loop.call_later(self._wait_s, self._overdue, pair)

    def close(self) -> None:
        """End all streams: this node is stopping. Idempotent."""
        self._closing.set()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _overdue(self, pair: Pair) -> None:
        del self._timers[pair]
        self._lost(pair)


class LivenessStream:
    """The writer's end, for one receiver process: made on a running loop, ended by `close`.

    `lost` is called each time the receiver is believed lost, `gone` when another process is at its address.
    """

    def __init__(
        self,
        *,
        name: str,
        endpoint: str,
        stub: transfer_pb2_grpc.TransferStub,
        request: transfer_pb2.LivenessRequest,
        lost: Callable[[], None],
        gone: Callable[[], None],
        liveness: LivenessConfig,
        clock: Clock,
    ) -> None:
        self.out_of_reach = False
        """Believed lost, and not reached again since."""
        self._name = name
        self._stub = stub
        self._request = request
        self._lost = lost
        self._gone = gone
        self._reach = Reach(endpoint, liveness, clock)
        self._clock = clock
        self._pause_s = liveness.reconnect_ms_max / 1000
        self._stays_s = liveness.barren_ms_max / 1000
        self._task = asyncio.create_task(self._run(), name=f"liveness-{name}")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                if await self._replaced():
                    self._gone()
                    return
                lost = await self._reach.lost()
                why = self._reach.why
            except Exception as error:
                log.error("watching a receiver failed", peer=self._name, exc_info=error)
                lost, why = True, "watching it failed"
            if lost:
                if not self.out_of_reach:
                    self.out_of_reach = True
                    log.warning("receiver lost", peer=self._name, why=why)
                    # By the loop, which logs what this raises: the watch goes on whatever becomes of it.
                    asyncio.get_running_loop().call_soon(self._lost)
                await self._clock.sleep_s(max(self._pause_s, self._reach.doubt_pause_s))

    async def _replaced(self) -> bool:
        """One call, to its end. True: another process is at the receiver's address.

        The receiver's one answer says no more than that it has taken the call: what counts is whether that stays.
        """
        staying: asyncio.TimerHandle | None = None
        try:
            with rpc_errors(self._name):
                call = self._stub.Liveness(self._request)
                await self._reach.connected(call)
                if self._reach.doubted:
                    staying = asyncio.get_running_loop().call_later(self._stays_s, self._stayed)
                async for _ in call:
                    if not self._reach.doubted:
                        self._reached()
        except BatonError as error:
            return error.reason is Reason.INCARNATION_MISMATCH
        finally:
            if staying is not None:
                staying.cancel()
        return False

    def _stayed(self) -> None:
        """The call that a doubted receiver has taken is still there."""
        self._reach.heard()
        self._reached()

    def _reached(self) -> None:
        if self.out_of_reach:
            self.out_of_reach = False
            log.info("receiver reached again", peer=self._name)
