"""`baton demo`: a cluster on this machine, some prompts, and a check of every answer and every block."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import click
from batonpb import inference_pb2

from baton.cores import own_cores
from baton.errors import BatonError, InvalidField, Reason
from baton.rpc_client import ChannelLimits, Channels
from cli.answers import answer_data
from cli.client import Answer, InferenceClient
from cli.demo_check import IDLE_MS_MAX, Mismatch, find_mismatches, wait_idle
from cli.demo_model import FAMILIES
from cli.demo_prompts import FIRST_WAVE, SECOND_WAVE, DemoRequest
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import Output, output_option, print_json
from cli.services import Service
from cli.signals import StopSignals
from cli.supervisor import Cluster, ClusterSpec
from cli.table import format_table
from cli.up import StartBoard
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ModelError

ANSWER_S_MAX: Final = 120.0
NODE_BLOCKS: Final = 512
_TEXT_CHARS_MIN: Final = 40
_COLUMNS_DEFAULT: Final = 120
_INDENT: Final = " " * 16
_GAP: Final = " ... "
_COLUMNS: Final = (
    "REQUEST", "PREFILL", "DECODE", "TRANSPORT", "WRITTEN", "SKIPPED",
    "PROMPT", "CACHED", "TOKENS", "TTFT ms", "ITL ms", "ANSWER",
)  # fmt: skip
_RIGHT: Final = frozenset(range(4, 11))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    request: DemoRequest
    answer: Answer


_Show = Callable[[Sequence[_Result], Sequence[Mismatch]], None]


@click.command()
@click.option(
    "--model-dir", type=click.Path(path_type=Path), default=Path("build/demo-model"), show_default=True,
    metavar="DIR", help="Where the demo model is, or is written.",
)  # fmt: skip
@click.option("--family", type=click.Choice(list(FAMILIES)), default="llama", show_default=True, help="Architecture.")
@click.option("--prefill", type=click.IntRange(min=1), default=2, show_default=True, help="Prefill nodes.")
@click.option("--decode", type=click.IntRange(min=1), default=2, show_default=True, help="Decode nodes.")
@output_option
def demo(model_dir: Path, family: str, prefill: int, decode: int, output: str) -> int:
    """Start a cluster on this machine, ask it some questions, check the answers, stop it.

    Writes a small random model, starts a directory, a router, prefill and decode nodes as separate processes, sends
    prompts over gRPC and shows what happened to each. Then every node must be empty again, and every answer must equal,
    token for token, what one process computes alone; else the exit status is 1. With -o json, stdout has the
    table only.

    \b
    Example:
      baton demo --prefill 2 --decode 2
    """
    try:
        spec = ClusterSpec(
            prefill=prefill,
            decode=decode,
            model=str(model_dir),
            engine=EngineKind.MODEL,
            blocks=NODE_BLOCKS,
            flags={service: {"engine.poison_freed": True} for service in (Service.PREFILL, Service.DECODE)},
        )
    except InvalidField as error:
        raise BatonError(Reason.BAD_CONFIG, f"{error}.") from error
    if Output(output) is Output.TEXT:
        return asyncio.run(_demo(model_dir, family, spec, show=_print_table))
    found: list[dict[str, object]] = []
    with redirect_stdout(sys.stderr):
        status = asyncio.run(_demo(model_dir, family, spec, show=lambda *results: found.extend(_data(*results))))
    print_json(found)
    return status


async def _demo(model_dir: Path, family: str, spec: ClusterSpec, *, show: _Show) -> int:
    with StopSignals() as signals:
        running = asyncio.ensure_future(_run(model_dir, family, spec, signals, show))
        if not await signals.unless_stopped(running):
            click.echo("\nInterrupted; everything is stopped.", err=True)
            return EXIT_INTERRUPTED
        return running.result()


async def _run(model_dir: Path, family: str, spec: ClusterSpec, signals: StopSignals, show: _Show) -> int:
    try:
        params = DemoModelParams(family=FAMILIES[family])
        written = await asyncio.to_thread(write_demo_model, model_dir, params)
    except ModelError as error:
        raise BatonError(Reason.BAD_CONFIG, str(error)) from error
    click.echo(f"Demo model {model_dir}: {'written' if written else 'there already'}.")
    spec.check()
    click.echo("Starting the cluster, each line a process:")
    board = StartBoard(tuple(name for name, _ in spec.processes()), sys.stdout)
    cluster = Cluster(spec, on_progress=board.progress, on_ready=board.ready)
    signals.at_second = cluster.abandon
    try:
        await cluster.start()
        results, leftovers = await _use(cluster)
    finally:
        problems = await cluster.stop()
        for problem in problems:
            click.echo(f"NOT STOPPED WELL  {problem}", err=True)
    click.echo("\nStopped the cluster. Now the same requests in one process, alone:")
    mismatches = await find_mismatches(
        [(result.request, result.answer) for result in results],
        model=model_dir,
        compute_threads=own_cores().usable,
    )
    show(results, mismatches)
    return _verdict(len(results), mismatches, leftovers, len(problems))


async def _use(cluster: Cluster) -> tuple[list[_Result], list[str]]:
    """Send everything; then what the nodes still hold when they should hold nothing."""
    channels = Channels(limits=ChannelLimits())
    watching = asyncio.ensure_future(cluster.watch())
    working = asyncio.ensure_future(_send_all(cluster, channels))
    try:
        await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            raise watching.result()
        return await working
    finally:
        for task in (watching, working):
            task.cancel()
        await asyncio.wait({watching, working})
        await channels.close()


async def _send_all(cluster: Cluster, channels: Channels) -> tuple[list[_Result], list[str]]:
    client = InferenceClient(cluster.router, channels=channels, timeout_s=ANSWER_S_MAX)
    results = []
    for title, wave in (
        (f"{len(FIRST_WAVE)} requests at once; the first one as it comes:", FIRST_WAVE),
        (f"{len(SECOND_WAVE)} more that begin like earlier ones (both caches know the beginning):", SECOND_WAVE),
    ):
        click.echo(f"\n{title}")
        results += await _send_wave(client, wave)
    leftovers = await wait_idle(cluster.directory, channels=channels, nodes_expected=len(cluster.names) - 1)
    return results, leftovers


async def _send_wave(client: InferenceClient, wave: Sequence[DemoRequest]) -> list[_Result]:
    screen = _Screen(wave[0].name)

    async def answer_of(request: DemoRequest) -> Answer:
        message = inference_pb2.GenerateRequest(text=request.prompt, sampling=request.sampling.to_proto())
        if request.unary:
            return await client.generate_unary(message)
        live = request.name == screen.live
        return await client.generate(message, (lambda tokens: screen.show(tokens.text)) if live else None)

    async def send(request: DemoRequest) -> _Result:
        try:
            answer = await answer_of(request)
        except BatonError as error:
            raise _named(error, request.name) from error
        screen.ended(request, answer)
        return _Result(request=request, answer=answer)

    screen.begin(wave[0])
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(request)) for request in wave]
    except* BatonError as failed:
        failure = failed.exceptions[0]  # the others were cancelled, or failed together with it
    if failure is not None:
        click.echo("")  # the line of an answer that will not go on
        raise failure
    return [task.result() for task in tasks]


def _named(error: BatonError, request: str) -> BatonError:
    """The same error, of the demo's request of this name."""
    return BatonError(
        error.reason,
        f"The demo's request {request} failed: {error.message}",
        code=error.code,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )


@dataclass(slots=True)
class _Screen:
    """The first request of a wave grows token by token on its line; the others follow, whole, as they end."""

    live: str
    _live_ended: bool = False
    _waiting: list[str] = field(default_factory=list)

    def begin(self, request: DemoRequest) -> None:
        click.echo(f"{_fitted(request.name, request.prompt)}\n{_INDENT}>", nl=False)

    def show(self, text: str) -> None:
        click.echo(text, nl=False)

    def ended(self, request: DemoRequest, answer: Answer) -> None:
        if request.name == self.live:
            click.echo("")
            self._live_ended = True
        else:
            self._waiting += [_fitted(request.name, request.prompt), _fitted("", f">{answer.text}")]
        if self._live_ended:
            for line in self._waiting:
                click.echo(line)
            self._waiting.clear()


def _fitted(name: str, text: str) -> str:
    """One line, the middle of a long text left out."""
    room = max(_TEXT_CHARS_MIN, shutil.get_terminal_size(fallback=(_COLUMNS_DEFAULT, 0)).columns - len(_INDENT) - 1)
    half = (room - len(_GAP)) // 2
    shown = text if len(text) <= room else text[:half] + _GAP + text[-half:]
    return f"  {name}".ljust(len(_INDENT)) + shown


def _print_table(results: Sequence[_Result], mismatches: Sequence[Mismatch]) -> None:
    wrong = {mismatch.name for mismatch in mismatches}
    rows = []
    for result in results:
        stats = result.answer.stats
        rows.append([
            result.request.name,
            stats.prefill_node,
            stats.decode_node,
            stats.transport,
            str(stats.blocks_written),
            str(stats.blocks_skipped),
            str(stats.prompt_tokens),
            str(stats.prompt_tokens_cached),
            str(stats.output_tokens),
            f"{stats.ttft_ms:.0f}",
            f"{stats.itl_mean_ms:.1f}",
            "wrong" if result.request.name in wrong else "equal",
        ])  # fmt: skip
    click.echo(format_table(_COLUMNS, rows, right=_RIGHT))


def _data(results: Sequence[_Result], mismatches: Sequence[Mismatch]) -> list[dict[str, object]]:
    wrong = {mismatch.name for mismatch in mismatches}
    return [
        {"name": result.request.name, "equal": result.request.name not in wrong, **answer_data(result.answer)}
        for result in results
    ]


def _verdict(count: int, mismatches: Sequence[Mismatch], leftovers: Sequence[str], problems: int) -> int:
    for mismatch in mismatches:
        click.echo(f"WRONG  {mismatch.name}: {mismatch.what}")
    for leftover in leftovers:
        click.echo(f"LEFT BEHIND  {leftover} (after {IDLE_MS_MAX} ms)")
    if mismatches or leftovers or problems:
        click.echo(
            f"FAILED: {len(mismatches)} of {count} answers wrong, {len(leftovers)} nodes with something left, "
            f"{problems} processes not stopped well."
        )
        return EXIT_ERROR
    click.echo(
        f"OK: all {count} answers equal those of one process, token for token; no node held anything at the end."
    )
    return 0
