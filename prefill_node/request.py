"""What a prefill node refuses at its door: requests that it could never serve. The router has checked the client's
input; the region is this node's own."""

from __future__ import annotations

from batonpb import prefill_pb2

from baton.errors import Reason, bad_field
from engine.types import Runner


def check_request(request: prefill_pb2.PrefillRequest, *, runner: Runner, num_blocks: int) -> None:
    """Raises BatonError EMPTY_PROMPT, PROMPT_TOO_LONG or TOKEN_OUT_OF_RANGE."""
    count = len(request.prompt)
    if count == 0:
        raise bad_field("prompt", "The prompt is empty.", reason=Reason.EMPTY_PROMPT)
    if count >= runner.context_len_max:
        raise bad_field(
            "prompt",
            f"The prompt has {count} tokens; the model's context of {runner.context_len_max} must hold an output token "
            "too.",
            reason=Reason.PROMPT_TOO_LONG,
        )
    if max(request.prompt) >= runner.vocab_size:
        raise bad_field(
            "prompt",
            f"Token id {max(request.prompt)} is outside the vocabulary of {runner.vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )
    need = -(-count // runner.kv_spec.block_size)
    if need > num_blocks:
        raise bad_field(
            "prompt",
            f"The prompt's {count} tokens need {need} blocks; this node's region has {num_blocks}.",
            reason=Reason.PROMPT_TOO_LONG,
        )
