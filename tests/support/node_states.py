"""What a prefill or a decode node has at this moment, by its private books. Jobs are the node's own."""

from __future__ import annotations

from dataclasses import dataclass

from baton.ids import RequestKey
from decode_node.job import Job as DecodeJob
from decode_node.node import DecodeNode
from prefill_node.job import Job as PrefillJob
from prefill_node.node import PrefillNode
from prefill_node.request_queue import PrefillRate


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillState:
    queue: tuple[PrefillJob, ...]
    admitted: tuple[PrefillJob, ...]
    rate: PrefillRate


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    jobs: tuple[DecodeJob, ...]
    """Granted or kept, and not over."""
    known: dict[RequestKey, DecodeJob]
    """Those, and answers that their router has not acknowledged."""
    lives: int
    """Tasks of requests."""
    outputs: int
    """Answers in streams to routers."""


def prefill_state(node: PrefillNode) -> PrefillState:
    return PrefillState(queue=tuple(node._queue), admitted=tuple(node._admitted.values()), rate=node._rate)


def decode_state(node: DecodeNode) -> DecodeState:
    return DecodeState(
        jobs=tuple(node._jobs.values()),
        known=dict(node._by_key),
        lives=len(node._lives),
        outputs=len(node.streams),
    )
