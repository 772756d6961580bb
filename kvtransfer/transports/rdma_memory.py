"""A node's region, registered with an RDMA device for as long as there is one, and again when one has come back; and
whether a node offers rdma: where it was not forbidden and a device works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.transport import TransportName
from kvtransfer.transports.rdma_device import RDMA_LIMITS, RdmaDevice, RdmaLimits, RdmaRegion, open_device
from kvtransfer.transports.rdma_ports import choose_port, find_ports, why_lost
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.settings import RdmaConfig

log = get_log("rdma")

Lost = Callable[[str], None]


class Hold:
    """Keeps the device open until `release`: whoever has one may have queue pairs on it. Control thread only."""

    def __init__(self, device: RdmaDevice, released: Callable[[Hold], None]) -> None:
        self.device = device
        self._released = released
        self._on_lost: Lost | None = None
        self._reason: str | None = None
        self.left_behind = False

    def on_lost(self, callback: Lost) -> None:
        """Call this with the reason when the device is lost; at once if it has been."""
        self._on_lost = callback
        if self._reason is not None:
            callback(self._reason)

    def lost(self, reason: str) -> None:
        self._reason = reason
        if self._on_lost is not None:
            self._on_lost(reason)

    def release(self) -> None:
        """No queue pair is left. Once."""
        self._released(self)

    def leave_behind(self) -> None:
        """In the place of `release`, where a queue pair cannot be destroyed: the device stays open and the region
        registered, so pinned, until the process ends."""
        self.left_behind = True


class RdmaMemory:
    """Registered once as a whole. Links and ports `acquire` the device and release their hold at their end.

    Control thread only. A device that is taken away, or whose port goes down, is lost: whoever holds it is called, lets
    go of its queue pairs and releases its hold; then the device is closed. From then on a look is taken every
    `device_check_ms` whether a port works again, and the region is registered there, on a thread: it may take seconds.
    """

    def __init__(
        self,
        *,
        region: RdmaRegion,
        config: RdmaConfig,
        loop: asyncio.AbstractEventLoop,
        remote_writes: bool,
        limits: RdmaLimits = RDMA_LIMITS,
    ) -> None:
        """Opens a device at once. `region`'s memory is the caller's and outlives this. Raises RdmaUnavailable."""
        self._region = region
        self._config, self._limits = config, limits
        self._loop = loop
        self._remote_writes = remote_writes
        self._held: RdmaDevice | None = open_device(region, config, remote_writes=remote_writes, limits=limits)
        self._lost = False
        self._holds: list[Hold] = []
        self._returned: list[Callable[[], None]] = []
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self.devices_lost = 0
        self.flushes = 0
        """Times that a device's memory had to be flushed behind the writes of others."""
        self._timer = loop.call_later(limits.device_check_ms / 1000, self._look)

    @property
    def device(self) -> RdmaDevice | None:
        """None: there is none now."""
        return None if self._lost else self._held

    def flush(self) -> None:
        """What others are known to have written is seen by whatever is launched after this: before it is used, and
        before what it lies in is used for anything else. Microseconds, where anything has to be done.

        Raises DeviceError: it may be seen late, or be on its way still.
        """
        self.flushes += self._region.flush()

    def describe(self) -> str:
        """For people: the device, and how the region is registered with it."""
        device = self.device
        if device is None:
            return "no device now"
        return f"{device.port.device}:{device.port.number}, {device.registration.told}"

    def when_returned(self, callback: Callable[[], None]) -> None:
        """Call this each time that a device has been opened again."""
        self._returned.append(callback)

    def acquire(self) -> Hold:
        """Raises RdmaUnavailable: there is no device now."""
        device = self.device
        if device is None:
            raise RdmaUnavailable("the RDMA device is gone, or its port is down; it is used again when it is back")
        hold = Hold(device, self._release)
        self._holds.append(hold)
        return hold

    def lose(self, reason: str) -> None:
        """The device is of no use any more. Idempotent."""
        if self._lost or self._held is None:
            return
        self._lost = True
        self.devices_lost += 1
        log.warning("RDMA device lost", device=self._held.port.device, reason=reason)
        for hold in list(self._holds):
            hold.lost(reason)
        self._close_if_free()

    async def close(self) -> None:
        """Once everyone has released it, or left it behind: then the device is not closed. Idempotent."""
        self._closed = True
        self._timer.cancel()
        if self._opening is not None:
            await asyncio.wait([self._opening])
        assert all(hold.left_behind for hold in self._holds), "links or ports still use the device"
        if self._holds:
            log.error("RDMA device stays open: a queue pair cannot be destroyed", holds=len(self._holds))
        elif self._held is not None:
            self._held.close()
            self._held = None

    def _release(self, hold: Hold) -> None:
        self._holds.remove(hold)
        self._close_if_free()

    def _close_if_free(self) -> None:
        if self._lost and not self._holds and self._held is not None:
            self._held.close()
            self._held = None

    def _look(self) -> None:
        if self._closed:
            return
        device = self.device
        if device is not None:
            if reason := why_lost(device.port):
                self.lose(reason)
        elif self._held is None and self._opening is None and choose_port(find_ports(), self._config.device):
            self._opening = self._loop.create_task(self._open_again())
        self._timer = self._loop.call_later(self._limits.device_check_ms / 1000, self._look)

    async def _open_again(self) -> None:
        try:
            opened = await asyncio.to_thread(
                open_device, self._region, self._config, remote_writes=self._remote_writes, limits=self._limits
            )
        except RdmaUnavailable as error:
            log.warning("RDMA device cannot be used", reason=str(error))
            return
        finally:
            self._opening = None
        self._held, self._lost = opened, False
        log.info("RDMA device is back", device=opened.port.device)
        if not self._closed:
            for returned in self._returned:
                returned()


@dataclass(frozen=True, slots=True, kw_only=True)
class LentRegistration:
    """One registration for both halves of a node, made and closed by whoever lends it. None: rdma is not offered.

    Open to remote writes for the receiving half; of the writing half's queue pairs none takes any.
    """

    memory: RdmaMemory | None


def register_if_usable(
    transports: Sequence[TransportName],
    region: RdmaRegion,
    config: RdmaConfig,
    loop: asyncio.AbstractEventLoop,
    *,
    remote_writes: bool,
) -> RdmaMemory | None:
    """The region, registered once as a whole; the caller closes it. None: rdma is not to be offered, or cannot be,
    which is logged. May take seconds: the region is pinned.

    Raises:
        InvalidField: rdma alone is to be offered, and it does not work here.
    """
    if TransportName.RDMA not in transports:
        return None
    try:
        memory = RdmaMemory(region=region, config=config, loop=loop, remote_writes=remote_writes, limits=RDMA_LIMITS)
    except RdmaUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has rdma alone, which does not work here: {error}. `baton doctor` tells more"
            ) from error
        # On a machine without any such device that is nothing to warn of.
        (log.warning if find_ports() else log.debug)("rdma is not offered", reason=str(error))
        return None
    device = memory.device
    assert device is not None
    # That there is no dma-buf is nothing to warn of: peer memory moves the same bytes the same way.
    log.info(
        "rdma is offered",
        device=device.port.device,
        port=device.port.number,
        gid=device.port.best_gid.kind.name,
        region=device.registration.told,
    )
    return memory
