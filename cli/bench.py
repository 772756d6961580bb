"""`baton bench`: load on a cluster or on any server with OpenAI's API, and its figures."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from baton.errors import BatonError, InvalidField, Reason
from baton.rpc import ChannelLimits, Channels
from cli.bench_load import LoadConfig, Loader, OpenAiTarget, RouterTarget, Target
from cli.bench_plan import (
    BLOCK_TOKENS,
    LENGTH_MAX,
    LENGTHS_HELP,
    Arrivals,
    Caps,
    Fixed,
    Lengths,
    Planned,
    TraceError,
    TraceScale,
    arrival_times,
    at_times,
    check_trace,
    drawn_requests,
    parse_lengths,
    trace_requests,
    without_times,
)
from cli.bench_stats import Progress, Slo, check_plot, draw, report_data, report_text
from cli.client import answer_timeout_option, router_option
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import Output, output_option, print_json
from cli.parameters import TOKEN_ID_MAX, Number
from cli.signals import StopSignals
from cli.supervisor import Cluster, ClusterSpec
from cli.up import StartBoard
from engine.build import EngineKind

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
        help=f"Closed loop: so many at a time.  [default: {CONCURRENCY_DEFAULT}, without --rate and --trace]",
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
        help=f"End after this many requests.  [default: {REQUESTS_DEFAULT}, without --duration and --trace]",
    ),
    _option("--duration", type=Above0(), metavar="SECONDS", help="Send nothing later than this."),
    _option(
        "--warm-up", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
        help="The first requests of this number are warm-up and do not count.",
    ),
    _option(
        "--in-flight-max", type=click.IntRange(min=1), default=4096, show_default=True, metavar="N",
        help="Open loop: a request is not sent, and counts as failed, while this many are running.",
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


PROGRESS_S: Final = 0.5


@click.command()
@bench_options
@output_option
def bench(output: str, **given: Any) -> int:
    """Send requests to a cluster and report latencies, throughput and goodput.

    With --concurrency a closed loop: so many requests at a time. With --rate an open loop, whose requests come when
    they are due, however slow the answers are, and are measured from then; with --trace at the times of the trace.
    Prompts are random token ids, answers have exactly the length asked for. Starts a cluster of its own where --model
    or --mock is given. A gap (ITL) is the time between two messages with tokens. Ctrl-C reports what there is. The exit
    status is 1 where nothing was answered.

    \b
    Example:
      baton bench --concurrency 8 --prompt-tokens lognormal:512:0.6 --output-tokens 64 --requests 200
      baton bench --rate 4 --duration 60 --warm-up 20 --slo-ttft-ms 500 --slo-itl-ms 100 --json run.json --plot run.png
      baton bench --trace conversation_trace.jsonl --trace-speed 0.1 --trace-length-scale 0.05 --duration 120
      baton bench --model /tmp/demo-model --mixed 1 --concurrency 4
      baton bench --url http://127.0.0.1:8000 --openai-model my-model --concurrency 8
    """
    options = BenchOptions(**given)
    try:
        run = _Run(options, as_json=Output(output) is Output.JSON)
    except (InvalidField, TraceError) as error:
        raise BatonError(Reason.BAD_CONFIG, f"{error}.") from error
    return asyncio.run(run.run())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    target: Target
    watching: asyncio.Future[Any] | None
    """Ends when a process of the cluster started here does."""


class _Run:
    """One run of the command. What can be refused without sending anything is refused by its making."""

    def __init__(self, options: BenchOptions, *, as_json: bool) -> None:
        """Raises BatonError, InvalidField, TraceError."""
        self._options = options
        self._as_json = as_json
        self._load = options.load_config()
        self._spec = _cluster_spec(options)
        if self._spec is not None:
            self._spec.check()
        if options.plot is not None:
            check_plot(options.plot)
        for path in (options.json, options.plot):
            why = None if path is None else unwritable(path)
            if why is not None:
                raise BatonError(Reason.BAD_CONFIG, f"{path} cannot be written: {why}.")
        self._in_trace = None if options.trace is None else check_trace(options.trace)

    async def run(self) -> int:
        with StopSignals() as signals:
            async with _place(self._options, self._spec, signals) as place:
                if place is None or not await signals.unless_stopped(place.target.check()):
                    return EXIT_INTERRUPTED
                loader = Loader(
                    self._load, _plan(self._options), place.target, slo=self._options.slo(), now_s=time.monotonic
                )
                complete = await self._drive(loader, place, signals)
        self._tell(loader, place.target.name, complete=complete)
        if not complete:
            return EXIT_INTERRUPTED
        return 0 if loader.measured.answered else EXIT_ERROR

    async def _drive(self, loader: Loader, place: _Place, signals: StopSignals) -> bool:
        """Whether it came to its end; False after a signal. Raises BatonError where the own cluster breaks."""
        known = [number for number in (self._load.requests_max, self._in_trace) if number is not None]
        progress = Progress(sys.stderr, min(known) if known and self._load.duration_s_max is None else None)
        showing = asyncio.ensure_future(_show(progress, loader))
        try:
            return await signals.unless_stopped(_or_broken(loader, place.watching))
        finally:
            showing.cancel()
            await asyncio.wait([showing])
            progress.end()

    def _tell(self, loader: Loader, target: str, *, complete: bool) -> None:
        options = self._options
        what = f"{options.text()} to {target}"
        data = report_data(loader.measured, config={"target": target, **options.data()}, complete=complete)
        if self._as_json:
            print_json(data)
        else:
            click.echo(report_text(loader.measured, what=what, complete=complete))
        path = options.json
        try:
            if options.json is not None:
                options.json.write_text(json.dumps(data) + "\n", encoding="utf-8")
            path = options.plot
            if options.plot is not None:
                draw(data, options.plot, title=what)
        except OSError as error:
            raise BatonError(Reason.BAD_CONFIG, f"{path} cannot be written: {error.strerror}.") from error


def unwritable(path: Path) -> str | None:
    """Why nothing can be written there after the run, as far as that shows before it."""
    parent = path.absolute().parent
    if not parent.is_dir():
        return f"{path.parent} is no folder"
    if path.is_dir():
        return "it is a folder"
    return None if os.access(path if path.exists() else parent, os.W_OK) else "this user may not"


async def _show(progress: Progress, loader: Loader) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        progress.show(loader.measured, loader.elapsed_s)


async def _or_broken(loader: Loader, watching: asyncio.Future[Any] | None) -> None:
    """The run, or the error that says which process of the cluster has ended."""
    if watching is None:
        return await loader.run()
    running = asyncio.ensure_future(loader.run())
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise watching.result()
        return await running
    finally:
        running.cancel()
        await asyncio.wait({running})


@asynccontextmanager
async def _place(options: BenchOptions, spec: ClusterSpec | None, signals: StopSignals) -> AsyncIterator[_Place | None]:
    """Where to send: a cluster started here, and stopped at the end, or what runs already.

    None: a signal came first. Raises BatonError.
    """
    channels = Channels(limits=ChannelLimits())
    try:
        if spec is None:
            yield _Place(target=_target(options, options.router, channels), watching=None)
            return
        board = StartBoard(tuple(name for name, _ in spec.processes()), sys.stderr)
        cluster = Cluster(spec, on_progress=board.progress, on_ready=board.ready)
        signals.at_second = cluster.abandon
        watching: asyncio.Future[Any] | None = None
        try:
            if not await signals.unless_stopped(cluster.start()):
                yield None
                return
            watching = asyncio.ensure_future(cluster.watch())
            yield _Place(target=_target(options, cluster.router, channels), watching=watching)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait({watching})
            for problem in await cluster.stop():
                click.echo(problem, err=True)
    finally:
        await channels.close()


def _target(options: BenchOptions, router: str, channels: Channels) -> Target:
    if options.url is not None:
        try:
            return OpenAiTarget(
                options.url,
                model=options.openai_model,
                timeout_s=options.timeout_s,
                temperature=options.temperature,
            )
        except ValueError as error:
            raise BatonError(Reason.BAD_ENDPOINT, f"{error}.") from error
    return RouterTarget(router, channels=channels, timeout_s=options.timeout_s, temperature=options.temperature)


def _cluster_spec(options: BenchOptions) -> ClusterSpec | None:
    """What to start here. Raises InvalidField."""
    if options.model is None and not options.mock:
        return None
    default = 0 if options.mixed else 1
    return ClusterSpec(
        prefill=default if options.prefill is None else options.prefill,
        decode=default if options.decode is None else options.decode,
        mixed=options.mixed,
        model=None if options.model is None else str(options.model),
        engine=EngineKind.MOCK if options.mock else EngineKind.MODEL,
        blocks=options.blocks,
        config=options.config,
    )


def _plan(options: BenchOptions) -> Iterator[Planned]:
    """The requests in order, with times for an open loop."""
    if options.trace is not None:
        requests = trace_requests(options.trace, scale=options.trace_scale(), caps=options.caps())
    else:
        requests = drawn_requests(
            prompt=options.prompt_tokens,
            output=options.output_tokens,
            shared_prefix_tokens=options.shared_prefix_tokens,
            caps=options.caps(),
            seed=options.seed,
        )
    if options.closed:
        return without_times(requests)
    if options.rate is None:
        return requests
    rng = random.Random(f"arrivals {options.seed}")
    return at_times(requests, arrival_times(Arrivals(options.arrivals), options.rate, rng))
