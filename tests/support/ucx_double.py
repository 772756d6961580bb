"""Stands in for `UcxAgent`: two sides in one process, whose writes land, wait or fail as a test says."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np
import pytest

from kvtransfer.transport import WriteOps
from kvtransfer.transports import ucx
from kvtransfer.transports.ucx import UcxFailed, UcxUnavailable, UcxWelcome


class AgentDouble:
    """Bytes land when the writer asks what has completed, while both sides live and `stalled` is off."""

    alive: ClassVar[dict[bytes, AgentDouble]] = {}
    stalled: ClassVar[bool] = False
    failing: ClassVar[bool] = False
    unavailable: ClassVar[str] = "nobody"
    """How the names of agents begin that cannot be made."""
    indestructible: ClassVar[bool] = False
    deaf: ClassVar[bool] = False
    """Notifications do not arrive."""
    _names = itertools.count(1)

    def __init__(self, region_U8: np.ndarray, name: str, transports: str) -> None:
        if name.startswith(AgentDouble.unavailable):
            raise UcxUnavailable("the test says so")
        self.region_U8: np.ndarray | None = region_U8
        self.base, self.nbytes = region_U8.ctypes.data, region_U8.nbytes
        self._metadata = f"{name} {next(self._names)}".encode()
        self.welcome = UcxWelcome(region_base=self.base, region_nbytes=self.nbytes, metadata=self._metadata)
        self._peer = b""
        self._posts: dict[int, WriteOps] = {}
        self._told: list[int] = []
        self.alive[self._metadata] = self

    def load_peer(self, welcome: UcxWelcome) -> None:
        if welcome.metadata not in self.alive:
            raise UcxFailed("no such agent")
        self._peer, self.peer_nbytes = welcome.metadata, welcome.region_nbytes

    def post(self, ops: WriteOps, number: int) -> None:
        self._posts[number] = ops

    def completed(self) -> list[int]:
        if AgentDouble.failing or (self._posts and self._peer not in self.alive):
            raise UcxFailed("a write failed")
        if AgentDouble.stalled:
            return []
        done = list(self._posts)
        for ops in self._posts.values():
            self._land(ops)
        self._posts.clear()
        return done

    def notify(self, number: int) -> None:
        if self._peer in self.alive and not AgentDouble.deaf:
            self.alive[self._peer]._told.append(number)

    def notified(self) -> list[int]:
        reported, self._told = self._told, []
        return reported

    def destroy(self) -> None:
        assert not AgentDouble.indestructible
        self.alive.pop(self._metadata, None)
        self.region_U8 = None

    def _land(self, ops: WriteOps) -> None:
        dst_U8 = self.alive[self._peer].region_U8
        assert dst_U8 is not None and self.region_U8 is not None
        for src, dst, nbytes in zip(ops.src, ops.dst, ops.nbytes, strict=True):
            dst_U8[dst : dst + nbytes] = self.region_U8[src : src + nbytes]


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> type[AgentDouble]:
    """Agents of both sides are doubles, without any misfortune at first."""
    for name in ("stalled", "failing", "indestructible", "deaf"):
        monkeypatch.setattr(AgentDouble, name, False)
    monkeypatch.setattr(AgentDouble, "unavailable", "nobody")
    monkeypatch.setattr(AgentDouble, "alive", {})
    for module in (ucx,):
        monkeypatch.setattr(module, "UcxAgent", AgentDouble)
    monkeypatch.delenv("UCX_TLS", raising=False)
    return AgentDouble
