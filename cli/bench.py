"""`baton bench`: load on a cluster or on any server with OpenAI's API, and its figures."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import click

from baton.client import AsyncClient, BatonError, Reason
from baton.errors import InvalidField
from cli.bench_load import LoadConfig, Loader, OpenAiTarget, RouterTarget, Target
from cli.bench_plan import (
    BLOCK_TOKENS,
    LENGTH_MAX,
    LENGTHS_HELP,
    Arrivals,
    Lengths,
    Planned,
    TraceError,
    arrival_times,
    at_times,
    check_trace,
    drawn_requests,
    parse_lengths,
    trace_requests,
    turns,
)
from cli.bench_stats import Progress, Slo, check_plot, draw, report_data, report_text
from cli.client import answer_timeout_option, api_key_option, read_api_key, router_option
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import JSON, output_option, print_json
from cli.parameters import TOKEN_ID_MAX, Number, options
from cli.signals import StopSignals
from cli.supervisor import ClusterSpec
from cli.up import started
from engine.build import EngineKind

CONCURRENCY_DEFAULT: Final = 4
REQUESTS_DEFAULT: Final = 64
CONCURRENCY_MAX: Final = 1 << 14
PROGRESS_S: Final = 0.5
_ABOVE_0: Final = Number(1e-9, 1e12)
_COUNT: Final = click.IntRange(min=0)
_POSITIVE: Final = click.IntRange(min=1)
_LENGTH: Final = click.IntRange(1, LENGTH_MAX)
_PATH: Final = click.Path(path_type=Path)


class LengthsType(click.ParamType[Lengths]):
    """A distribution of lengths."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        try:
            return value if isinstance(value, Lengths) else parse_lengths(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(LoadConfig):
    """One field for each option, as click gives it. Raises UsageError where options exclude each other."""

    router: str
    resumable: bool
    api_key_file: Path | None
    url: str | None
    openai_model: str | None
    model: Path | None
    mock: bool
    prefill: int | None
    decode: int | None
    mixed: int
    blocks: int | None
    config: Path | None
    rate: float | None
    arrivals: str
    trace: Path | None
    trace_speed: float
    trace_length_scale: float
    trace_block_tokens: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_tokens: int
    conversations: int | None
    turns: int
    prompt_tokens_max: int
    output_tokens_max: int
    temperature: float
    timeout_s: float
    slo_ttft_ms: float | None
    slo_itl_ms: float | None
    slo_tpot_ms: float | None
    json: Path | None
    plot: Path | None

    def __post_init__(self) -> None:
        LoadConfig.__post_init__(self)
        own = self.model is not None or self.mock
        excluded = (
            (self.concurrency is not None and self.rate is not None, "--concurrency and --rate"),
            (self.url is not None and own, "--url and --model or --mock"),
            (self.model is not None and self.mock, "--model and --mock"),
            *(
                (self.conversations is not None and other is not None, f"--conversations and {name}")
                for name, other in (("--rate", self.rate), ("--trace", self.trace), ("--url", self.url))
            ),
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

    def text(self) -> str:
        """What is sent, in a few words."""
        if self.trace is not None:
            lengths = f"requests of {self.trace.name}, lengths times {self.trace_length_scale:g}"
        else:
            lengths = f"prompts of {self.prompt_tokens} tokens, answers of {self.output_tokens}"
        if self.conversations is not None:
            lengths = f"{self.conversations} conversations of {self.turns} turns, {lengths}"
        if self.concurrency is not None:
            return f"{self.concurrency} at a time, {lengths}"
        if self.rate is None:
            return f"{lengths}, at the trace's times, {self.trace_speed:g} times as fast"
        return f"{self.rate:g} requests/s ({self.arrivals}), {lengths}"

    def data(self) -> dict[str, object]:
        """All of it as JSON has it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) if isinstance(value, Path | Lengths) else value for name, value in values.items()}


_bench_options: Final = options(
    router_option,
    click.option(
        "--resumable", is_flag=True, help="Go on with answers whose router is lost; repeat refused requests.",
    ),
    api_key_option,
    click.option("--url", metavar="URL", help="A server with OpenAI's API over HTTP, in place of a router."),
    click.option("--openai-model", metavar="NAME", help="The model to name there; not every server asks for it."),
    click.option("--model", type=_PATH, metavar="DIR", help="Start a cluster here, with this model."),
    click.option("--mock", is_flag=True, help="Start a cluster here, of the mock engine."),
    click.option("--prefill", type=_COUNT, help="Its prefill nodes.  [default: 1, or 0 with --mixed]"),
    click.option("--decode", type=_COUNT, help="Its decode nodes.  [default: 1, or 0 with --mixed]"),
    click.option("--mixed", type=_COUNT, default=0, show_default=True, help="Its nodes that do both halves."),
    click.option("--blocks", type=_POSITIVE, help="KV blocks of each of its nodes."),
    click.option("--config", type=_PATH, metavar="FILE.toml", help="Configuration file of its nodes."),
    click.option(
        "--concurrency", type=click.IntRange(1, CONCURRENCY_MAX), metavar="N",
        help=f"Closed loop: N requests at a time.  [default: {CONCURRENCY_DEFAULT}, without --rate and --trace]",
    ),
    click.option("--rate", type=_ABOVE_0, metavar="PER_S", help="Open loop: requests a second."),
    click.option(
        "--arrivals", type=click.Choice([each.value for each in Arrivals]), default=Arrivals.POISSON.value,
        show_default=True, help="With --rate: how requests arrive.",
    ),
    click.option("--trace", type=_PATH, metavar="FILE", help="Send the requests of this trace."),
    click.option("--trace-speed", type=_ABOVE_0, default=1.0, show_default=True, help="Factor of its speed."),
    click.option("--trace-length-scale", type=_ABOVE_0, default=1.0, show_default=True, help="Factor of its lengths."),
    click.option(
        "--trace-block-tokens", type=_LENGTH, default=BLOCK_TOKENS, show_default=True,
        help="Tokens that one hash id of the trace stands for.",
    ),
    click.option(
        "--requests", type=_POSITIVE, metavar="N",
        help=f"End after this many requests.  [default: {REQUESTS_DEFAULT}, without --duration and --trace]",
    ),
    click.option("--duration", type=_ABOVE_0, metavar="SECONDS", help="Send nothing later than this."),
    click.option(
        "--warm-up", type=_COUNT, default=0, show_default=True, metavar="N",
        help="Leave the first N requests out of the figures.",
    ),
    click.option(
        "--in-flight-max", type=_POSITIVE, default=4096, show_default=True, metavar="N",
        help="Open loop: while N requests are running, a further one is not sent and counts as failed.",
    ),
    answer_timeout_option,
    click.option(
        "--prompt-tokens", type=LengthsType(), default="256", show_default=True, metavar="LENGTHS",
        help=f"Length of prompts: {LENGTHS_HELP}.",
    ),
    click.option(
        "--output-tokens", type=LengthsType(), default="32", show_default=True, metavar="LENGTHS",
        help="Length of answers, likewise.",
    ),
    click.option(
        "--shared-prefix-tokens", type=click.IntRange(0, LENGTH_MAX), default=0, show_default=True, metavar="N",
        help="All prompts begin with the same N tokens.",
    ),
    click.option(
        "--conversations", type=_POSITIVE, metavar="N",
        help="Send the turns of N conversations: each prompt is all that was said before, and --prompt-tokens more.",
    ),
    click.option(
        "--turns", type=_POSITIVE, default=8, show_default=True, metavar="N", help="Of each conversation, in rounds.",
    ),
    click.option("--prompt-tokens-max", type=_LENGTH, default=LENGTH_MAX, metavar="N", help="Cut longer prompts off."),
    click.option("--output-tokens-max", type=_LENGTH, default=LENGTH_MAX, metavar="N", help="Cut longer answers off."),
    click.option(
        "--token-ids", type=(click.IntRange(0, TOKEN_ID_MAX), click.IntRange(0, TOKEN_ID_MAX)), default=(2, 256),
        show_default=True, metavar="FROM TO", help="Prompts are drawn from FROM <= id < TO.",
    ),
    click.option(
        "--seed", type=click.IntRange(0, (1 << 64) - 1), default=0, show_default=True,
        help="The same seed sends the same requests at the same times. Prompts of different seeds share no prefix.",
    ),
    click.option("--temperature", type=Number(), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--slo-ttft-ms", type=_ABOVE_0, help="An answer is good if its first token comes within this time."),
    click.option("--slo-itl-ms", type=_ABOVE_0, help="An answer is good if no gap is longer than this."),
    click.option("--slo-tpot-ms", type=_ABOVE_0, help="An answer is good if its TPOT is at most this."),
    click.option("--json", type=_PATH, metavar="FILE", help="Write all figures there, as JSON."),
    click.option("--plot", type=_PATH, metavar="FILE.png", help="Draw them (.png, .svg, .pdf)."),
)  # fmt: skip


@click.command()
@_bench_options
@output_option
def bench(output: str, **given: Any) -> int:
    """Send requests to a cluster and report latencies, throughput and goodput.

    --concurrency is a closed loop: so many requests at a time. --rate is an open loop: requests are sent when they are
    due, however slow the answers are, and are measured from then. --trace sends them at the times of the trace.
    Prompts are random token ids; answers have exactly the length asked for. --model or --mock starts a cluster for the
    run. A gap (ITL) is the time between two messages with tokens. Ctrl-C reports the figures so far. The exit status is
    1 if nothing was answered.

    \b
    Example:
      baton bench --concurrency 8 --prompt-tokens lognormal:512:0.6 --output-tokens 64 --requests 200
      baton bench --rate 4 --duration 60 --warm-up 20 --slo-ttft-ms 500 --slo-itl-ms 100 --json run.json --plot run.png
      baton bench --trace conversation_trace.jsonl --trace-speed 0.1 --trace-length-scale 0.05 --duration 120
      baton bench --conversations 20 --turns 8 --prompt-tokens 60 --output-tokens 200 --concurrency 2 --warm-up 20
      baton bench --model /tmp/demo-model --mixed 1 --concurrency 4
      baton bench --url http://127.0.0.1:8000 --openai-model my-model --concurrency 8
    """
    if given["concurrency"] is given["rate"] is given["trace"] is None:
        given["concurrency"] = CONCURRENCY_DEFAULT
    if given["requests"] is None and given["conversations"] is not None:
        given["requests"] = given["conversations"] * given["turns"]
    if given["requests"] is given["duration"] is given["trace"] is None:
        given["requests"] = REQUESTS_DEFAULT
    try:
        run = _Run(BenchOptions(**given), as_json=output == JSON)
    except (InvalidField, TraceError) as error:
        raise BatonError(Reason.BAD_CONFIG, f"{error}.") from error
    return asyncio.run(run.run())


class _Run:
    """One run of the command. What can be refused without sending anything is refused by its making."""

    def __init__(self, options: BenchOptions, *, as_json: bool) -> None:
        """Raises BatonError, InvalidField, TraceError."""
        self._options = options
        self._as_json = as_json
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
        options = self._options
        slo = Slo(ttft_ms=options.slo_ttft_ms, itl_ms=options.slo_itl_ms, tpot_ms=options.slo_tpot_ms)
        with StopSignals() as signals:
            own = nullcontext() if self._spec is None else started(self._spec, signals, sys.stderr)
            async with own as cluster, _target(options, cluster.router if cluster else options.router) as target:
                if signals.received:
                    return EXIT_INTERRUPTED
                if not await signals.unless_stopped(target.check()):
                    return EXIT_INTERRUPTED
                loader = Loader(options, _plan(options), target, slo=slo, now_s=time.monotonic)
                running = loader.run() if cluster is None else cluster.run_beside(loader.run())
                showing = asyncio.ensure_future(self._show(loader))
                try:
                    complete = await signals.unless_stopped(running)
                finally:
                    showing.cancel()
                    await asyncio.wait([showing])
        self._report(loader, target.name, complete=complete)
        if not complete:
            return EXIT_INTERRUPTED
        return 0 if loader.measured.answered else EXIT_ERROR

    async def _show(self, loader: Loader) -> None:
        known = [number for number in (self._options.requests, self._in_trace) if number is not None]
        progress = Progress(sys.stderr, min(known) if known and self._options.duration is None else None)
        try:
            while True:
                await asyncio.sleep(PROGRESS_S)
                progress.show(loader.measured, loader.elapsed_s)
        finally:
            progress.end()

    def _report(self, loader: Loader, target: str, *, complete: bool) -> None:
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


@asynccontextmanager
async def _target(options: BenchOptions, router: str) -> AsyncIterator[Target]:
    """Raises BatonError BAD_ENDPOINT."""
    timeout_s, temperature, api_key = options.timeout_s, options.temperature, read_api_key(options.api_key_file)
    if options.url is None:
        # A refused request counts as failed, unless asked for otherwise.
        retries_max = None if options.resumable else 0
        async with AsyncClient(router, timeout_s=timeout_s, api_key=api_key, retries_max=retries_max) as client:
            yield RouterTarget(client, router=router, temperature=temperature, resumable=options.resumable)
        return
    try:
        target = OpenAiTarget(
            options.url, model=options.openai_model, timeout_s=timeout_s, temperature=temperature, api_key=api_key
        )
    except ValueError as error:
        raise BatonError(Reason.BAD_ENDPOINT, f"{error}.") from error
    yield target


def _cluster_spec(options: BenchOptions) -> ClusterSpec | None:
    """What to start here. Raises InvalidField."""
    if options.model is None and not options.mock:
        return None
    return ClusterSpec(
        prefill=options.prefill,
        decode=options.decode,
        mixed=options.mixed,
        model=None if options.model is None else str(options.model),
        engine_kind=EngineKind.MOCK if options.mock else EngineKind.MODEL,
        blocks=options.blocks,
        config=options.config,
    )


def _plan(options: BenchOptions) -> Iterator[Planned]:
    """The requests in order, with times for an open loop."""
    if options.trace is not None:
        requests = trace_requests(
            options.trace,
            speed=options.trace_speed,
            length_scale=options.trace_length_scale,
            block_tokens=options.trace_block_tokens,
            prompt_tokens_max=options.prompt_tokens_max,
            output_tokens_max=options.output_tokens_max,
        )
    elif options.conversations is not None:
        requests = turns(
            options.conversations,
            options.turns,
            question=options.prompt_tokens,
            answer=options.output_tokens,
            seed=options.seed,
        )
    else:
        requests = drawn_requests(
            prompt=options.prompt_tokens,
            output=options.output_tokens,
            seed=options.seed,
            shared_prefix_tokens=options.shared_prefix_tokens,
            prompt_tokens_max=options.prompt_tokens_max,
            output_tokens_max=options.output_tokens_max,
        )
    if options.concurrency is not None:
        return at_times(requests, repeat(None))
    if options.rate is None:
        return requests
    rng = random.Random(f"arrivals {options.seed}")
    return at_times(requests, arrival_times(Arrivals(options.arrivals), options.rate, rng))
