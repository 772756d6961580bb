"""The options of `baton bench`, and what they say together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from baton.errors import InvalidField
from cli.bench_load import LoadConfig
from cli.bench_plan import LENGTH_MAX, LENGTHS_HELP, Arrivals, Caps, Fixed, Lengths, parse_lengths
from cli.bench_stats import Slo
from cli.bench_trace import BLOCK_TOKENS, TraceScale
from cli.client import answer_timeout_option, router_option
from cli.parameters import TOKEN_ID_MAX, Number

CONCURRENCY_DEFAULT: Final = 4
REQUESTS_DEFAULT: Final = 64
CONCURRENCY_MAX: Final = 1 << 14
_PROMPT_DEFAULT: Final = Fixed(256)
_OUTPUT_DEFAULT: Final = Fixed(32)
_F = TypeVar("_F", bound=Callable[..., Any])


class LengthsType(click.ParamType[Lengths]):
    """A distribution of lengths."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        if not isinstance(value, str):
            found: Lengths = value
            return found
        try:
            return parse_lengths(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Above0(Number):
    """A finite number above 0, and below a million million."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not 0 < number <= 1e12:
            self.fail(f"'{value}' is not above 0 (and at most 1e12)", param, ctx)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One field for each option, as click gives it. Raises UsageError where options exclude each other."""

    router: str
    url: str | None
    openai_model: str | None
    model: Path | None
    mock: bool
    prefill: int | None
    decode: int | None
    mixed: int
    blocks: int | None
    config: Path | None
    concurrency: int | None
    rate: float | None
    arrivals: str
    trace: Path | None
    trace_speed: float
    trace_length_scale: float
    trace_block_tokens: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int
    prompt_tokens_max: int
    output_tokens_max: int
    requests: int | None
    duration: float | None
    warm_up: int
    in_flight_max: int
    token_ids: tuple[int, int]
    seed: int
    temperature: float
    timeout_s: float
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    slo_tpot_ms: float | None
    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        own = self.model is not None or self.mock
        excluded = (
            (self.concurrency is not None and self.rate is not None, "--concurrency and --rate"),
            (self.url is not None and own, "--url and --model or --mock"),
            (self.model is not None and self.mock, "--model and --mock"),
        )
        for both, names in excluded:
            if both:
                raise click.UsageError(f"{names} exclude each other.")
        if self.openai_model is not None and self.url is None:
            raise click.UsageError("--openai-model goes with --url.")
        nodes = (self.prefill, self.decode, self.mixed or None, self.blocks, self.config)
        if not own and any(each is not None for each in nodes):
            raise click.UsageError(
                "--prefill, --decode, --mixed, --blocks and --config are for a cluster that is started here: give "
                "--model or --mock too."
            )

    @property
    def closed(self) -> bool:
        """A closed loop: a request comes when the one before it is over."""
        return self.concurrency is not None or (self.rate is None and self.trace is None)

    def load_config(self) -> LoadConfig:
        """Raises InvalidField."""
        unlimited = self.requests is None and self.duration is None and self.trace is None
        requests = REQUESTS_DEFAULT if unlimited else self.requests
        if requests is not None and self.warm_up >= requests:
            raise InvalidField("warm_up", f"must be below the number of requests ({requests}), not {self.warm_up}")
        return LoadConfig(
            concurrency=(self.concurrency or CONCURRENCY_DEFAULT) if self.closed else None,
            requests_max=requests,
            duration_s_max=self.duration,
            warm_up=self.warm_up,
            in_flight_max=self.in_flight_max,
            ids_from=self.token_ids[0],
            ids_to=self.token_ids[1],
            seed=self.seed,
        )

    def slo(self) -> Slo:
        return Slo(ttft_ms=self.slo_ttft_ms, itl_ms=self.slo_itl_ms, tpot_ms=self.slo_tpot_ms)

    def caps(self) -> Caps:
        return Caps(prompt_tokens_max=self.prompt_tokens_max, output_tokens_max=self.output_tokens_max)

    def trace_scale(self) -> TraceScale:
        return TraceScale(speed=self.trace_speed, length=self.trace_length_scale, block_tokens=self.trace_block_tokens)

    def text(self) -> str:
        """What is sent, in a few words."""
        if self.trace is not None:
            lengths = f"requests of {self.trace.name}, lengths times {self.trace_length_scale:g}"
        else:
            lengths = f"prompts of {_text(self.prompt_tokens)} tokens, answers of {_text(self.output_tokens)}"
        if self.closed:
            return f"{self.concurrency or CONCURRENCY_DEFAULT} at a time, {lengths}"
        if self.rate is None:
            return f"{lengths}, at the trace's times, {self.trace_speed:g} times as fast"
        return f"{self.rate:g} requests/s ({self.arrivals}), {lengths}"

    def data(self) -> dict[str, object]:
        """All of it as JSON has it."""
        return {each.name: _json(getattr(self, each.name)) for each in fields(self)}


def _text(lengths: Lengths) -> str:
    if isinstance(lengths, Fixed):
        return str(lengths.length)
    return ":".join([type(lengths).__name__.lower(), *(f"{getattr(lengths, each.name):g}" for each in fields(lengths))])


def _json(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return _text(value) if isinstance(value, Lengths) else value


def _option(*names: str, **settings: Any) -> Callable[[_F], _F]:
    return click.option(*names, **settings)


_WHERE: Final = (
    router_option,
    _option("--url", metavar="URL", help="A server with OpenAI's API over HTTP, in place of a router."),
    _option("--openai-model", metavar="NAME", help="The model to name there; not every server asks for it."),
    _option("--model", type=click.Path(path_type=Path), metavar="DIR", help="Start a cluster here, with this model."),
    _option("--mock", is_flag=True, help="Start a cluster here, of the mock engine."),
    _option("--prefill", type=click.IntRange(min=0), help="Its prefill nodes.  [default: 1, or 0 with --mixed]"),
    _option("--decode", type=click.IntRange(min=0), help="Its decode nodes.  [default: 1, or 0 with --mixed]"),
    _option("--mixed", type=click.IntRange(min=0), default=0, show_default=True, help="Its nodes that do both halves."),
    _option("--blocks", type=click.IntRange(min=1), help="KV blocks of each of its nodes."),
    _option("--config", type=click.Path(path_type=Path), metavar="FILE.toml", help="Configuration file of its nodes."),
)
_WHEN: Final = (
    _option(
        "--concurrency", type=click.IntRange(1, CONCURRENCY_MAX), metavar="N",
        help=f"Closed loop: so many requests at a time.  [default: {CONCURRENCY_DEFAULT}, without --rate and --trace]",
    ),
    _option("--rate", type=Above0(), metavar="PER_S", help="Open loop: requests a second."),
    _option(
        "--arrivals", type=click.Choice([each.value for each in Arrivals]), default=Arrivals.POISSON.value,
        show_default=True, help="With --rate: how they come.",
    ),
    _option("--trace", type=click.Path(path_type=Path), metavar="FILE", help="Lengths, prefixes, times of a trace."),
    _option("--trace-speed", type=Above0(), default=1.0, show_default=True, help="Times as fast as recorded."),
    _option("--trace-length-scale", type=Above0(), default=1.0, show_default=True, help="Factor of its lengths."),
    _option(
        "--trace-block-tokens", type=click.IntRange(1, LENGTH_MAX), default=BLOCK_TOKENS, show_default=True,
        help="Tokens that one of its hash ids stands for.",
    ),
    _option(
        "--requests", type=click.IntRange(min=1), metavar="N",
        help=f"End after so many requests.  [default: {REQUESTS_DEFAULT}, without --duration and --trace]",
    ),
    _option("--duration", type=Above0(), metavar="SECONDS", help="Send nothing later than this."),
    _option(
        "--warm-up", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
        help="The first so many requests count for nothing.",
    ),
    _option(
        "--in-flight-max", type=click.IntRange(min=1), default=4096, show_default=True, metavar="N",
        help="Open loop: a request beyond so many under way is not sent, and counts as failed.",
    ),
    answer_timeout_option,
)  # fmt: skip
_WHAT: Final = (
    _option(
        "--prompt-tokens", type=LengthsType(), default=_PROMPT_DEFAULT, show_default=False, metavar="LENGTHS",
        help=f"Length of prompts: {LENGTHS_HELP}.  [default: {_PROMPT_DEFAULT.length}]",
    ),
    _option(
        "--output-tokens", type=LengthsType(), default=_OUTPUT_DEFAULT, show_default=False, metavar="LENGTHS",
        help=f"Length of answers, likewise.  [default: {_OUTPUT_DEFAULT.length}]",
    ),
    _option(
        "--shared-prefix-tokens", type=click.IntRange(0, LENGTH_MAX), default=0, show_default=True, metavar="N",
        help="So many tokens at the beginning are the same in all prompts.",
    ),
    _option(
        "--prompt-tokens-max", type=click.IntRange(1, LENGTH_MAX), default=LENGTH_MAX, metavar="N",
        help="Cut longer prompts off.",
    ),
    _option(
        "--output-tokens-max", type=click.IntRange(1, LENGTH_MAX), default=LENGTH_MAX, metavar="N",
        help="Cut longer answers off.",
    ),
    _option(
        "--token-ids", type=(click.IntRange(0, TOKEN_ID_MAX), click.IntRange(0, TOKEN_ID_MAX)), default=(2, 256),
        show_default=True, metavar="FROM TO", help="Prompts are drawn from FROM <= id < TO.",
    ),
    _option(
        "--seed", type=click.IntRange(0, (1 << 64) - 1), default=0, show_default=True,
        help="Same seed, same requests at the same times; another one's prompts share no prefix with these.",
    ),
    _option("--temperature", type=Number(), default=0.0, show_default=True, help="Of every request; 0 is greedy."),
)  # fmt: skip
_TOLD: Final = (
    _option("--slo-ttft-ms", type=Above0(), help="Good is an answer whose first token comes within this."),
    _option("--slo-itl-ms", type=Above0(), help="Good is an answer without a longer gap than this."),
    _option("--slo-tpot-ms", type=Above0(), help="Good is an answer whose later tokens take this at most, on average."),
    _option("--json", type=click.Path(path_type=Path), metavar="FILE", help="Write all figures there."),
    _option("--plot", type=click.Path(path_type=Path), metavar="FILE.png", help="Draw them (.png, .svg, .pdf)."),
)


def bench_options(command: _F) -> _F:
    """All of them, in the order in which the help shows them."""
    for option in reversed((*_WHERE, *_WHEN, *_WHAT, *_TOLD)):
        command = option(command)
    return command
