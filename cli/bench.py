"""`baton bench`: load on a cluster or on any server with OpenAI's API, and what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from baton.errors import BatonError, InvalidField, Reason
from baton.rpc_client import ChannelLimits, Channels
from cli.bench_load import Loader
from cli.bench_options import BenchOptions, bench_options
from cli.bench_plan import Arrivals, Planned, arrival_times, at_times, drawn_requests, without_times
from cli.bench_plot import check_plot, draw
from cli.bench_report import Progress, report_data, report_text
from cli.bench_targets import OpenAiTarget, RouterTarget, Target
from cli.bench_trace import TraceError, check_trace, trace_requests
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import Output, output_option, print_json
from cli.signals import StopSignals
from cli.supervisor import Cluster, ClusterSpec
from cli.up import StartBoard
from engine.build import EngineKind

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
