"""Where the bytes of one data connection land at the receiver: in the region, or in pinned memory before a device.

Shape suffixes: U8 = one-dimensional array of bytes; S = one entry per segment of a frame; S2 = (place, length) of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.ids import GrantId
from kvtransfer.device.staging import StagingShare
from kvtransfer.transports import tcp_wire as wire


class LandingMemory:
    """The region itself, in host memory: what has been received there has landed.

    The receive thread's, but for `wait_for` and `release`, which are the control thread's.
    """

    staged = False
    """Bytes are received elsewhere, and get to the region by `copy`."""

    def __init__(self, array_U8: np.ndarray, region_nbytes: int) -> None:
        self.array_U8: np.ndarray | None = array_U8
        """What is received into."""
        self.region_nbytes = region_nbytes

    def holds(self, frame: wire.Data, table_S2: np.ndarray) -> bool:
        """Whether the table agrees with the frame's head, and lies in the region. Compared so that no sum overflows."""
        if frame.segments == 1:
            dst, nbytes = table_S2[0].tolist()
            return bool(nbytes == frame.payload_nbytes and 0 <= dst <= self.region_nbytes - nbytes)
        dst_S, nbytes_S = table_S2[:, 0], table_S2[:, 1]
        bad_S = (nbytes_S <= 0) | (nbytes_S > frame.payload_nbytes)
        bad_S |= (dst_S < 0) | (dst_S > self.region_nbytes - nbytes_S)
        return not bool(bad_S.any()) and int(nbytes_S.sum()) == frame.payload_nbytes

    def place(self, table_S2: np.ndarray) -> np.ndarray | None:
        """Where a frame with this table is to be received. None: nowhere as long as the device copies."""
        return table_S2

    def copy(self, frame: wire.Data, place_S2: np.ndarray, table_S2: np.ndarray) -> None:
        """Queue the copy of a frame that has been received. The caller holds what makes `forbid` a barrier."""
        raise AssertionError(("there is nothing to copy", frame, place_S2, table_S2))

    def give(self, place_S2: np.ndarray) -> None:
        """What was received there is not wanted."""

    def copied(self) -> int | None:
        """The sequence of the oldest frame whose copy is over; each is told once, in order. Raises DeviceError."""
        return None

    @property
    def copying(self) -> bool:
        """There are frames whose copies are not over."""
        return False

    def wait_for(self, grant: GrantId) -> None:
        """Wait until no copy of this grant that was queued by now is left on a device. Raises DeviceError."""

    def settle(self) -> None:
        """Wait until nothing is left on a device. The last that the receive thread calls. Raises DeviceError."""

    def try_settle(self) -> bool:
        """`settle` without waiting, after the receive thread. Raises DeviceError."""
        return True

    def release(self) -> None:
        """Let go of the memory; the receive thread has ended, or was never begun, and nothing is left on a device."""
        self.array_U8 = None

    def leave_behind(self) -> None:
        """Instead of `release`, where nobody knows whether a device still copies."""
        self.array_U8 = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFrame:
    """A frame on its way to the device, from where it begins in pinned memory."""

    grant: GrantId
    sequence: int
    start: int


class StagedMemory(LandingMemory):
    """A share of pinned memory, from which the device copies. A frame is not larger than a chunk of it."""

    staged = True

    def __init__(self, array_U8: np.ndarray, region_nbytes: int, share: StagingShare[StagedFrame]) -> None:
        """Takes the share over."""
        super().__init__(array_U8, region_nbytes)
        self._share = share

    def place(self, table_S2: np.ndarray) -> np.ndarray | None:
        start = self._share.take()
        return None if start is None else np.array([[start, table_S2[:, 1].sum()]], table_S2.dtype)

    def copy(self, frame: wire.Data, place_S2: np.ndarray, table_S2: np.ndarray) -> None:
        staged = StagedFrame(grant=frame.grant, sequence=frame.sequence, start=int(place_S2[0, 0]))
        self._share.to_device(staged.start, table_S2[:, 0], table_S2[:, 1], tag=staged)

    def give(self, place_S2: np.ndarray) -> None:
        self._share.give(int(place_S2[0, 0]))

    def copied(self) -> int | None:
        staged = self._share.finished()
        if staged is None:
            return None
        self._share.give(staged.start)
        return staged.sequence

    @property
    def copying(self) -> bool:
        return self._share.flying > 0

    def wait_for(self, grant: GrantId) -> None:
        self._share.wait_for(lambda staged: staged.grant == grant)

    def settle(self) -> None:
        self._share.settle()

    def try_settle(self) -> bool:
        return self._share.try_settle()

    def release(self) -> None:
        super().release()
        self._share.give_back()

    def leave_behind(self) -> None:
        super().leave_behind()
        self._share.leave_behind()
