"""Routers that are tested alone, and what the directory says of nodes to them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from baton.clock import Clock
from baton.ids import Incarnation, RequestId
from baton.lifecycle import LifecycleEvent, NodeLifecycle
from baton.rpc import Channels
from baton.tracing import Traceparent
from baton.wire import ModelInfo, NodeRecord
from router.config import RouterConfig
from router.node import RouterNode
from router.prompts import PromptEncoder
from router.request import ClientCall

MODEL = ModelInfo(
    name="m", fingerprint="f", vocab_size=1000, context_len_max=100, eos_token_ids=(0,), layout_hash="l",
    block_size=16, protocol_min=1, protocol_max=1,
)  # fmt: skip


def lone_router(
    records: Sequence[NodeRecord], *, config: RouterConfig, channels: Channels, rng: random.Random, **others: Any
) -> RouterNode:
    """A router without a tokenizer that takes requests and knows these nodes."""
    lifecycle = NodeLifecycle(now_s=0.0)
    lifecycle.handle(LifecycleEvent.STARTED, now_s=0.0)
    router = RouterNode(
        config=config,
        incarnation=Incarnation(99),
        lifecycle=lifecycle,
        channels=channels,
        prompts=PromptEncoder(chars_max=config.prompt_chars_max),
        clock=Clock(),
        rng=rng,
        token_bytes=rng.randbytes,
        **others,
    )
    router.follow_directory(records)
    return router


def client_call(deadline_s: float, *, name: str = "r") -> ClientCall:
    """A client that reads as fast as it can. `deadline_s` is the loop's time."""
    return ClientCall(id=RequestId(name), trace=Traceparent(trace=1, span=1, sampled=False), deadline_s=deadline_s)
