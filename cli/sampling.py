"""How an answer is drawn, as options: one list of them for every command that asks for answers."""

from __future__ import annotations

from typing import Any, Final

import click

from baton.client import Sampling
from cli.parameters import UINT32, UINT64, IdBias, Number, check_utf8, options
from router.request import LOGPROBS_MAX

sampling_options: Final = options(
    click.option("--max-tokens", type=UINT32, metavar="N", help="Longest answer, in tokens.  [default: the router's]"),
    click.option("--min-tokens", type=UINT32, metavar="N", help="Shortest answer, in tokens.  [default: 0]"),
    click.option("--temperature", type=Number(), help="0 always takes the best token.  [default: the model's, or 1]"),
    click.option(
        "--top-k", type=UINT32, metavar="N",
        help="Draw from the N best tokens; 0 is off.  [default: the model's, or 0]",
    ),
    click.option(
        "--top-p", type=Number(),
        help="Draw from the best tokens that together have this probability.  [default: the model's, or 1]",
    ),
    click.option(
        "--min-p", type=Number(),
        help="Leave out tokens below this fraction of the best token's probability.  [default: the model's, or 0]",
    ),
    click.option(
        "--repetition-penalty", type=Number(),
        help="Above 1: tokens of the prompt and the answer are less likely to come again.  "
        "[default: the model's, or 1]",
    ),
    click.option(
        "--presence-penalty", type=Number(),
        help="Subtract this from the score of each token that the answer already has.  [default: 0]",
    ),
    click.option(
        "--frequency-penalty", type=Number(),
        help="Subtract this from a token's score for each time that the answer has it.  [default: 0]",
    ),
    click.option("--logit-bias", type=IdBias(), multiple=True, help="Add VALUE to the score of token ID; repeatable."),
    click.option("--seed", type=UINT64, metavar="N", help="The same seed gives the same answer.  [default: random]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; repeatable."),
    click.option(
        "--stop-token-id", "stop_token_ids", type=UINT32, multiple=True, metavar="N",
        help="End at this token; repeatable.",
    ),
    click.option("--include-stop", is_flag=True, help="Keep the text of --stop in the answer."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
    click.option(
        "--logprobs", type=click.IntRange(0, LOGPROBS_MAX), metavar="N",
        help="Show the log-probability of each token, and of the N most likely tokens at its place.",
    ),
)  # fmt: skip
"""Their values come as keyword arguments for `sampling_of`."""


def sampling_of(given: dict[str, Any]) -> Sampling:
    """From the keyword arguments of `sampling_options`; what is not given is left to the router. Raises UsageError."""
    for stop in given["stop"]:
        check_utf8(stop, "--stop")
    biases: dict[int, float] = {}
    for token, bias in given["logit_bias"]:
        if token in biases:
            raise click.UsageError(f"--logit-bias names token {token} more than once.")
        biases[token] = bias
    return Sampling(**{**given, "logit_bias": biases})
