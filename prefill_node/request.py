"""What a prefill node refuses at its door: requests that it could never serve, and those beyond its queue. The router
has checked the client's input; the region is this node's own."""

from __future__ import annotations

from collections.abc import Sequence

from batonpb import prefill_pb2

from baton.errors import REGION_BLOCKS_KEY, BatonError, Reason, bad_field
from baton.ids import RequestId
from baton.retry_time import retry_after_ms, spread_of
from cachestore.block_manager import BlockManager
from engine.types import Runner


def check_request(request: prefill_pb2.PrefillRequest, *, runner: Runner, blocks: BlockManager) -> None:
    """Raises BatonError EMPTY_PROMPT, PROMPT_TOO_LONG, TOKEN_OUT_OF_RANGE or BAD_FIELD."""
    if not request.prompt:
        raise bad_field("prompt", "The prompt is empty.", reason=Reason.EMPTY_PROMPT)
    tokens = [*request.prompt, *request.output]
    if len(tokens) >= runner.context_len_max:
        raise bad_field(
            "prompt",
            f"Prompt and output have {len(tokens)} tokens; the model's context of {runner.context_len_max} must hold "
            "another one.",
            reason=Reason.PROMPT_TOO_LONG,
        )
    if max(tokens) >= runner.vocab_size:
        raise bad_field(
            "prompt",
            f"Token id {max(tokens)} is outside the vocabulary of {runner.vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )
    if len(request.output) >= request.sampling.max_tokens:
        raise bad_field("output", f"The answer has its {request.sampling.max_tokens} tokens (max_tokens) already.")
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
