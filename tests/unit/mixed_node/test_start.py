"""A mixed node that cannot start leaves nothing open."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import patch

import pytest

import mixed_node.main
import node.peers
import node.pool
from baton.errors import InvalidField
from baton.rpc import Channels
from baton.runtime import NodeRuntime
from engine.build import EngineConfig, EngineKind
from mixed_node.config import MixedConfig

CONFIG = MixedConfig(name="mixed-0", engine=EngineConfig(kind=EngineKind.MOCK, num_blocks=8))


def test_a_failure_in_the_prefill_half_closes_what_the_node_has_opened() -> None:
    """The decode half is there, and the region is registered, when the prefill half refuses a setting. The error says
    so; the links to peers are closed, then the registration, and no thread is left that reads the region."""
    closed: list[str] = []
    made: list[Channels] = []
    real_make = NodeRuntime.make_channels

    class Memory:
        async def close(self) -> None:
            closed.append("registration")

        def describe(self) -> str:
            return "here"

    def make_channels(self: NodeRuntime) -> Channels:
        channels = real_make(self)
        made.append(channels)
        real_close = channels.close

        async def close() -> None:
            closed.append(f"channels {made.index(channels)}")
            await real_close()

        channels.close = close  # type: ignore[method-assign]
        return channels

    def refused(_shm: Any) -> None:
        raise InvalidField("shm.copy_threads", "is refused here")

    async def scenario() -> None:
        await mixed_node.main.serve(CONFIG, stop=asyncio.Event(), on_ready=lambda _: None, progress=lambda *_: None)

    before = set(threading.enumerate())
    with (
        patch.object(node.pool, "RdmaMemory", lambda *_, **__: Memory()),
        patch.object(NodeRuntime, "make_channels", make_channels),
        patch.object(node.peers, "copy_turns", refused),
        pytest.raises(InvalidField, match="is refused here"),
    ):
        asyncio.run(scenario())
    assert closed == ["channels 1", "registration", "channels 0"]
    assert not [thread.name for thread in set(threading.enumerate()) - before if "_poll_wrapper" not in thread.name]
