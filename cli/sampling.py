"""How an answer is drawn, as options: one list of them for every command that asks for answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import click
from batonpb import inference_pb2

from cli.parameters import IdBias, Number, Whole, check_utf8
from router.request import LOGPROBS_MAX

_Command = TypeVar("_Command", bound=Callable[..., Any])
_UINT32: Final = Whole(32)
_UINT64: Final = Whole(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoice:
    """Sampling as a client states it; what is None, or empty, is left to the router's defaults.

    The fields have the names and meanings of baton.v1.Sampling (docs/sampling.md).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def to_proto(self) -> inference_pb2.Sampling:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["logit_bias"] = dict(self.logit_bias)
        return inference_pb2.Sampling(**values)


_OPTIONS: Final = (
    click.option("--max-tokens", type=_UINT32, help="Tokens of the answer, at most.  [default: the router's]"),
    click.option("--min-tokens", type=_UINT32, help="Tokens before the answer may end.  [default: 0]"),
    click.option("--temperature", type=Number(), help="0 always takes the best token.  [default: the model's, or 1]"),
    click.option(
        "--top-k", type=_UINT32,
        help="Draw from the K best tokens only; 0 is off.  [default: the model's, or 0]",
    ),
    click.option(
        "--top-p", type=Number(),
        help="Draw from the best tokens of this total probability.  [default: the model's, or 1]",
    ),
    click.option(
        "--min-p", type=Number(),
        help="Leave out tokens less probable than this fraction of the best one's.  [default: the model's, or 0]",
    ),
    click.option(
        "--repetition-penalty", type=Number(),
        help="Above 1: tokens of prompt and answer come again less often.  [default: the model's, or 1]",
    ),
    click.option(
        "--presence-penalty", type=Number(),
        help="Taken from the score of a token that the answer has.  [default: 0]",
    ),
    click.option(
        "--frequency-penalty", type=Number(),
        help="The same, times how often the answer has it.  [default: 0]",
    ),
    click.option(
        "--logit-bias", type=IdBias(), multiple=True, help="Added to the score of this token id; repeatable.",
    ),
    click.option("--seed", type=_UINT64, help="The same seed gives the same answer.  [default: random]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; repeatable."),
    click.option(
        "--stop-token-id", "stop_token_ids", type=_UINT32, multiple=True,
        help="End at this token; repeatable.",
    ),
    click.option("--include-stop", is_flag=True, help="The text of --stop belongs to the answer."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
    click.option(
        "--logprobs", type=click.IntRange(0, LOGPROBS_MAX), metavar="N",
        help="Tell the log-probability of each token, and of the N best ones there.",
    ),
)  # fmt: skip


def sampling_options(command: _Command) -> _Command:
    """Gives a command all options above; their values come as keyword arguments for `sampling_choice`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def sampling_choice(options: dict[str, Any]) -> SamplingChoice:
    """From the keyword arguments of `sampling_options`. Raises UsageError."""
    choice = SamplingChoice(**options)
    for stop in choice.stop:
        check_utf8(stop, "--stop")
    ids = [token for token, _ in choice.logit_bias]
    twice = {token for token in ids if ids.count(token) > 1}
    if twice:
        raise click.UsageError(f"--logit-bias names token {min(twice)} more than once.")
    return choice
