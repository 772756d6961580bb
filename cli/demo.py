"""`baton demo`: a cluster on this machine, some prompts, and a check of every answer and every block.

The answers are compared with those of one process, and the nodes must hold nothing afterwards.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

import click
from batonpb import inference_pb2

from baton.cores import own_cores
from baton.errors import BatonError, InvalidField, Reason
from baton.rpc import ChannelLimits, Channels
from cli.client import Answer, InferenceClient, answer_data
from cli.cluster_view import NodeView, view_nodes
from cli.demo_model import FAMILIES
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import Output, format_table, output_option, print_json
from cli.reference import Reference
from cli.sampling import SamplingChoice
from cli.services import Service
from cli.signals import StopSignals
from cli.supervisor import Cluster, ClusterSpec
from cli.up import StartBoard
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ModelError
from engine.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    name: str
    prompt: str
    sampling: SamplingChoice
    unary: bool = False


_TALE: Final = " ".join([
    "The runner carries a wooden baton along the river, and nobody is surprised.",
    "The teacher reads aloud the second letter before breakfast, because there is still time.",
    "The sailor repairs a broken clock during the storm, although it begins to rain.",
    "The gardener gathers a hundred stones behind the station, so that nothing is lost.",
    "The librarian returns the morning paper without a word, until the others arrive.",
    "The carpenter measures the narrow bridge in the middle of the night, while the whole village sleeps.",
    "The grandmother remembers a forgotten song beside the lighthouse, and then everything starts again.",
])  # fmt: skip
"""A beginning of several blocks that some requests share."""
_LONG_TALE: Final = " ".join([_TALE] * 6)
"""More tokens than one step takes: its prefill is in chunks."""

FIRST_WAVE: Final = (
    DemoRequest(
        name="greedy",
        prompt="Tell me a short story about a relay race.",
        sampling=SamplingChoice(temperature=0, max_tokens=64),
    ),
    DemoRequest(
        name="shared-1",
        prompt=f"{_TALE} Where does the road lead?",
        sampling=SamplingChoice(temperature=0, max_tokens=24),
    ),
    DemoRequest(
        name="shared-2",
        prompt=f"{_TALE} Who invented the wheel, and when?",
        sampling=SamplingChoice(temperature=0.8, seed=7, max_tokens=24),
    ),
    DemoRequest(
        name="seeded-top-p",
        prompt="Give three reasons for planting trees.",
        sampling=SamplingChoice(temperature=1.0, top_p=0.9, seed=42, max_tokens=32),
    ),
    DemoRequest(
        name="seeded-top-k",
        prompt="Why is the sky blue in the afternoon and red in the evening?",
        sampling=SamplingChoice(temperature=0.7, top_k=20, seed=2024, max_tokens=32),
    ),
    DemoRequest(
        name="unary",
        prompt="Good morning! Could you please explain how a computer works?",
        sampling=SamplingChoice(temperature=0, max_tokens=16),
        unary=True,
    ),
    DemoRequest(
        name="long",
        prompt=f"{_LONG_TALE} Summarise the following paragraph in one sentence.",
        sampling=SamplingChoice(temperature=0, max_tokens=16),
    ),
)
SECOND_WAVE: Final = (
    DemoRequest(
        name="shared-3",
        prompt=f"{_TALE} What is the capital of that country?",
        sampling=SamplingChoice(temperature=0, max_tokens=24),
    ),
    DemoRequest(
        name="long-again",
        prompt=f"{_LONG_TALE} Which of these numbers is the smallest?",
        sampling=SamplingChoice(temperature=0.5, seed=11, max_tokens=16),
    ),
)


IDLE_MS_MAX: Final = 5_000
"""How long after the last answer the nodes may take to let go of everything."""
IDLE_POLL_MS: Final = 100
STATUS_CALL_MS_MAX: Final = 2_000
_REFERENCE_BLOCKS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """An answer that is not what one process computes."""

    name: str
    what: str


async def find_mismatches(
    answers: Sequence[tuple[DemoRequest, Answer]], *, model: Path, compute_threads: int
) -> list[Mismatch]:
    """Compute every request again in this process. Raises BatonError where the model cannot be loaded."""
    reference = await asyncio.to_thread(Reference, model, num_blocks=_REFERENCE_BLOCKS, compute_threads=compute_threads)
    found = []
    for request, answer in answers:
        mismatch = _compare(request, answer, reference)
        if mismatch is not None:
            found.append(mismatch)
        await asyncio.sleep(0)  # let Ctrl-C in
    return found


def _compare(request: DemoRequest, answer: Answer, reference: Reference) -> Mismatch | None:
    prompt = reference.encode(request.prompt)
    if answer.stats.prompt_tokens != len(prompt):
        what = f"the prompt has {len(prompt)} tokens, the router counted {answer.stats.prompt_tokens}"
        return Mismatch(name=request.name, what=what)
    expected = reference.answer(prompt, _params(request))
    for index, (token, right) in enumerate(zip_longest(answer.ids, expected)):
        if token != right:
            what = f"output token {index} is {token}, one process draws {right}"
            return Mismatch(name=request.name, what=what)
    if answer.text != (text := reference.decode(expected)):
        return Mismatch(name=request.name, what=f"the text is {answer.text!r}, its tokens say {text!r}")
    return None


def _params(request: DemoRequest) -> SamplingParams:
    """What the router makes of the request, by the defaults that the interface states."""
    sampling = request.sampling
    assert sampling.max_tokens is not None and (sampling.seed is not None or sampling.temperature == 0), request.name
    return SamplingParams(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        seed=sampling.seed or 0,
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


async def wait_idle(directory: str, *, channels: Channels, nodes_expected: int) -> list[str]:
    """Ask the nodes until none holds anything, for at most IDLE_MS_MAX; then what is still held, a line for each node.

    Raises BatonError where the directory does not answer.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + IDLE_MS_MAX / 1e3
    while True:
        views = await view_nodes(directory, channels=channels, call_ms_max=STATUS_CALL_MS_MAX)
        leftovers = [f"{view.record.name}: {what}" for view in views if (what := held_by(view))]
        if len(views) != nodes_expected:
            leftovers.append(f"the directory knows {len(views)} nodes instead of {nodes_expected}")
        if not leftovers or loop.time() >= give_up_s:
            return leftovers
        await asyncio.sleep(IDLE_POLL_MS / 1e3)


def held_by(view: NodeView) -> str:
    """What the node holds that an idle one does not; empty for nothing."""
    status = view.status
    if status is None:
        return f"does not answer: {view.problem}"
    load = status.record.load
    counts = {
        "requests": status.requests,
        "waiting requests": load.waiting_requests,
        "running requests": load.running_requests,
        "grants received": status.grants_received,
        "grants written": status.grants_written,
        "unacknowledged writes": status.unacknowledged_writes,
        "blocks held": load.blocks.held,
        "blocks owned by a writer": load.blocks.writer_owned,
        "blocks quarantined": load.blocks.quarantined,
        "blocks promised": load.blocks.promised,
        "conservation errors": status.conservation_errors,
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


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
