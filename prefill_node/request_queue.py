"""Requests that wait for a place in the engine of a prefill node: who is refused, who is next, how fast it goes. Pure.

The queue is in order of arrival, except that requests in the middle of their answer (`resumed`) go before those without
a token. Each of those is bypassed at most `bypasses_max` times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from batonpb import prefill_pb2

from baton.errors import REGION_BLOCKS_KEY, BatonError, Reason, bad_field
from baton.ids import RequestId
from baton.retry_time import retry_after_ms, spread_of
from cachestore.block_manager import BlockManager
from engine.types import Runner, sampling_problem
from prefill_node.job import Job


class RequestQueue(deque[Job]):
    """Control thread only."""

    def __init__(self, *, bypasses_max: int) -> None:
        super().__init__()
        self._bypasses_max = bypasses_max

    def add(self, job: Job) -> None:
        """Behind all that came before it, or, resumed, before those without a token that may still be bypassed."""
        place = len(self)
        while job.resumed and place and not self[place - 1].resumed and self[place - 1].bypassed < self._bypasses_max:
            place -= 1
            self[place].bypassed += 1
        self.insert(place, job)


class PrefillRate:
    """Mutable; owned by the node's control thread. Times are of one clock that never goes back."""

    def __init__(self, *, tokens_per_step_max: int, age_ms_max: int) -> None:
        """A rate that was measured longer ago than `age_ms_max` is forgotten: a node that was slow once would be given
        nothing that shows otherwise."""
        self._tokens_per_step_max = tokens_per_step_max
        self._age_s_max = age_ms_max / 1000
        self._measured_s = 0.0
        self._ended_s = 0.0
        self.last_per_s = 0.0
        """Tokens a second, however long ago they were measured; 0 before the first time."""

    def step_ended(self, tokens: int, *, began_s: float, now_s: float) -> None:
        """So many prompt tokens were computed in a step. The rate is smoothed over about ten.

        A step that was launched behind another one counts from that one's end. Only steps that fill half their budget
        count. A step of a few tokens costs nearly as much, and a node that has had nothing else would say that it is
        slow, and then be given nothing that shows otherwise.
        """
        ended_before_s, self._ended_s = self._ended_s, now_s
        if 2 * tokens < self._tokens_per_step_max:
            return
        per_s = tokens / max(now_s - max(began_s, ended_before_s), 1e-6)
        afresh = self.last_per_s == 0 or self._is_old(now_s)
        self.last_per_s = per_s if afresh else 0.9 * self.last_per_s + 0.1 * per_s
        self._measured_s = now_s

    def per_s(self, now_s: float) -> float:
        """Tokens a second; 0 while nothing is known."""
        return 0.0 if self._is_old(now_s) else self.last_per_s

    def _is_old(self, now_s: float) -> bool:
        return now_s - self._measured_s > self._age_s_max


def check_request(request: prefill_pb2.PrefillRequest, *, runner: Runner, blocks: BlockManager) -> None:
    """Raises BatonError EMPTY_PROMPT, PROMPT_TOO_LONG, TOKEN_OUT_OF_RANGE, SAMPLING_OUT_OF_RANGE or BAD_FIELD."""
    if not request.prompt:
        raise bad_field("prompt", "The prompt is empty.", reason=Reason.EMPTY_PROMPT)
    tokens = [*request.prompt, *request.output]
    if len(tokens) >= runner.context_len_max:
        raise bad_field(
            "prompt",
            f"Prompt and output have {len(tokens)} tokens; the model's context of {runner.context_len_max} needs "
            "room for one more.",
            reason=Reason.PROMPT_TOO_LONG,
        )
    if max(tokens) >= runner.vocab_size:
        raise bad_field(
            "prompt",
            f"Token id {max(tokens)} is outside the vocabulary of {runner.vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )
    problem = sampling_problem(request.sampling, vocab_size=runner.vocab_size)
    if problem is not None:
        text = f"No token can be drawn with these parameters: {problem}."
        raise bad_field("sampling", text, reason=Reason.SAMPLING_OUT_OF_RANGE)
    if len(request.output) >= request.sampling.max_tokens:
        raise bad_field("output", f"The answer already has its {request.sampling.max_tokens} tokens (max_tokens).")
    if blocks.blocks_for(len(tokens)) > blocks.blocks_usable:
        raise no_room(tokens, blocks)


def no_room(tokens: Sequence[int], blocks: BlockManager) -> BatonError:
    """They do not fit into the region, less what pins ask for, whatever else is free. Another node's may hold them."""
    has = f"{blocks.ledger.num_blocks}{blocks.less_others}"
    text = (
        f"The prompt's {len(tokens)} tokens need {blocks.blocks_for(len(tokens))} blocks; this node's region has {has}."
    )
    return BatonError(
        Reason.PROMPT_TOO_LONG, text, field="prompt", metadata={REGION_BLOCKS_KEY: str(blocks.blocks_usable)}
    )


def queue_full(waiting: int, room_s: float | None, *, retry_ms_min: int, request: RequestId) -> BatonError:
    """So many wait here already. `room_s`: how long until there is room; None while that is not known."""
    return BatonError(
        Reason.QUEUE_FULL,
        f"{waiting} requests are waiting here already, the limit.",
        retry_after_ms=retry_after_ms(room_s, ms_min=retry_ms_min, spread=spread_of(request)),
    )
