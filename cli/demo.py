"""`baton demo`: a cluster on this machine, some prompts, and a check of every answer and every block.

The answers are compared with those of one process, and the nodes must hold nothing afterwards.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import click

from baton.client import Answer, AsyncClient, BatonError, Reason, Sampling
from baton.cores import own_cores
from baton.errors import InvalidField
from baton.rpc import Channels
from cli.client import answer_data
from cli.demo_model import FAMILIES
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.nodes import NodeView, open_channels, view_nodes
from cli.output import TEXT, format_table, output_option, print_json
from cli.reference import Reference
from cli.services import Service
from cli.signals import StopSignals
from cli.supervisor import Cluster, ClusterSpec
from cli.up import started
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model, write_trained_model
from engine.model_config import ComputeDtype, ModelError
from engine.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    name: str
    prompt: str
    sampling: Sampling
    unary: bool = False


def _ask(name: str, prompt: str, *, unary: bool = False, **sampling: Any) -> DemoRequest:
    return DemoRequest(name=name, prompt=prompt, sampling=Sampling(**sampling), unary=unary)


_TALE: Final = (
    "Once upon a time, there was a curious otter named Fern. She lived by the river. One spring day, Fern found a seed "
    'under the bridge. She planted it in the garden and gave it water every day. "Nothing is growing," said Bruno the '
    'badger. "We must wait," said Fern. The rain came and the sun shone, and one morning there was a small green leaf. '
    "The leaf became an apple tree, and it grew taller than Fern."
)
"""A beginning of several blocks that some requests share."""
_LONG_TALE: Final = " ".join([_TALE] * 6)
"""More tokens than one step takes: its prefill is in chunks."""

FIRST_WAVE: Final = (
    _ask("greedy", "Once upon a time", temperature=0, max_tokens=256),
    _ask("shared-1", f"{_TALE} When autumn came,", temperature=0, max_tokens=48),
    _ask("shared-2", f"{_TALE} One winter day, Bruno", temperature=0.8, seed=7, max_tokens=48),
    _ask("seeded-top-p", "Tell me of the sea.", temperature=1.0, top_p=0.9, seed=42, max_tokens=64),
    _ask(
        "seeded-top-k", "Why is the sky blue in the afternoon and red in the evening?",
        temperature=0.7, top_k=20, seed=2024, max_tokens=64,
    ),
    _ask("unary", "The sea is", temperature=0, max_tokens=32, unary=True),
    _ask("long", f"{_LONG_TALE} When autumn came,", temperature=0, max_tokens=32),
)  # fmt: skip
SECOND_WAVE: Final = (
    _ask("shared-3", f"{_TALE} That night", temperature=0, max_tokens=48),
    _ask("long-again", f"{_LONG_TALE} Then the wind", temperature=0.5, seed=11, max_tokens=32),
)


IDLE_MS_MAX: Final = 5_000
"""How long after the last answer the nodes may take to let go of everything."""
IDLE_POLL_MS: Final = 100
STATUS_CALL_MS_MAX: Final = 2_000
_REFERENCE_BLOCKS: Final = 1024
DTYPE: Final = ComputeDtype.FLOAT32
"""Of the cluster and of the one process: bfloat16 scores tie, and then the batch decides (docs/models.md)."""


async def find_mismatches(
    answers: Sequence[tuple[DemoRequest, Answer]], *, model: Path, compute_threads: int
) -> dict[str, str]:
    """Compute every request again in this process; by the request's name, how its answer differs.

    Raises BatonError where the model cannot be loaded.
    """
    reference = await asyncio.to_thread(
        Reference, model, num_blocks=_REFERENCE_BLOCKS, compute_threads=compute_threads, dtype=DTYPE
    )
    found = {}
    for request, answer in answers:
        what = _compare(request, answer, reference)
        if what:
            found[request.name] = what
        await asyncio.sleep(0)  # let Ctrl-C in
    return found


def _compare(request: DemoRequest, answer: Answer, reference: Reference) -> str:
    """How the answer differs; empty where it does not."""
    prompt = reference.encode(request.prompt)
    if answer.stats.prompt_tokens != len(prompt):
        return f"the prompt has {len(prompt)} tokens, the router counted {answer.stats.prompt_tokens}"
    expected = reference.answer(prompt, _params(request.sampling))
    for index, (token, right) in enumerate(zip_longest(answer.ids, expected)):
        if token != right:
            return f"output token {index} is {token}, one process draws {right}"
    text = reference.decode(expected)
    return "" if answer.text == text else f"the text is {answer.text!r}, its tokens say {text!r}"


def _params(sampling: Sampling) -> SamplingParams:
    """What the router makes of it, by the defaults that the interface states."""
    assert sampling.max_tokens and sampling.temperature is not None, sampling
    assert sampling.temperature == 0 or sampling.seed is not None, sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        seed=sampling.seed or 0,
        max_tokens=sampling.max_tokens,
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

_Results = list[tuple[DemoRequest, Answer]]


@click.command()
@click.option(
    "--model-dir", type=click.Path(path_type=Path), default=Path("build/demo-model"), show_default=True,
    metavar="DIR", help="Where the demo model is, or is written.",
)  # fmt: skip
@click.option(
    "--family", type=click.Choice(list(FAMILIES)), help="Take a model of random weights, of this architecture.",
)  # fmt: skip
@click.option("--prefill", type=click.IntRange(min=1), default=2, show_default=True, help="Prefill nodes.")
@click.option("--decode", type=click.IntRange(min=1), default=2, show_default=True, help="Decode nodes.")
@output_option
def demo(model_dir: Path, family: str | None, prefill: int, decode: int, output: str) -> int:
    """Start a cluster on this machine, ask it some questions, check the answers, stop it.

    Writes a small trained model, starts a directory, a router, prefill and decode nodes as separate processes, sends
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
            engine_kind=EngineKind.MODEL,
            blocks=NODE_BLOCKS,
            flags={
                service: {"engine.poison_freed": True, "engine.dtype": DTYPE.value}
                for service in (Service.PREFILL, Service.DECODE)
            },
        )
    except InvalidField as error:
        raise BatonError(Reason.BAD_CONFIG, f"{error}.") from error
    if output == TEXT:
        return asyncio.run(_demo(model_dir, family, spec))
    found: list[dict[str, object]] = []
    with redirect_stdout(sys.stderr):
        status = asyncio.run(_demo(model_dir, family, spec, found))
    print_json(found)
    return status


async def _demo(
    model_dir: Path, family: str | None, spec: ClusterSpec, data: list[dict[str, object]] | None = None
) -> int:
    """The results go into `data`, or, without it, into a table on the screen."""
    with StopSignals() as signals:
        running = asyncio.ensure_future(_run(model_dir, family, spec, signals, data))
        if not await signals.unless_stopped(running):
            click.echo("\nInterrupted; everything is stopped.", err=True)
            return EXIT_INTERRUPTED
        return running.result()


async def _run(
    model_dir: Path, family: str | None, spec: ClusterSpec, signals: StopSignals, data: list[dict[str, object]] | None
) -> int:
    try:
        if family is None:
            written = write_trained_model(model_dir)
        else:
            params = DemoModelParams(family=FAMILIES[family])
            written = await asyncio.to_thread(write_demo_model, model_dir, params)
    except ModelError as error:
        raise BatonError(Reason.BAD_CONFIG, str(error)) from error
    click.echo(f"Demo model {model_dir}: {'written' if written else 'there already'}.")
    spec.check()
    click.echo("Starting the cluster, each line a process:")
    async with started(spec, signals, sys.stdout) as cluster:
        if cluster is None:
            return EXIT_INTERRUPTED
        results, leftovers = await cluster.run_beside(_send_all(cluster))
    problems = await cluster.stop()
    click.echo("\nStopped the cluster. Now the same requests in one process, alone:")
    mismatches = await find_mismatches(results, model=model_dir, compute_threads=own_cores().usable)
    if data is None:
        click.echo(format_table(_COLUMNS, [_row(*result, mismatches) for result in results], right=range(4, 11)))
    else:
        data += [
            {"name": request.name, "equal": request.name not in mismatches, **answer_data(answer)}
            for request, answer in results
        ]
    return _verdict(len(results), mismatches, leftovers, len(problems))


async def _send_all(cluster: Cluster) -> tuple[_Results, list[str]]:
    """Send everything; then what the nodes still hold when they should hold nothing."""
    results = []
    async with AsyncClient(cluster.router, timeout_s=ANSWER_S_MAX) as client:
        for title, wave in (
            (f"{len(FIRST_WAVE)} requests at once; the first one as it comes:", FIRST_WAVE),
            (f"{len(SECOND_WAVE)} more that begin like earlier ones (both caches know the beginning):", SECOND_WAVE),
        ):
            click.echo(f"\n{title}")
            results += await _send_wave(client, wave)
    async with open_channels() as channels:
        return results, await wait_idle(cluster.directory, channels=channels, nodes_expected=len(cluster.names) - 1)


async def _send_wave(client: AsyncClient, wave: Sequence[DemoRequest]) -> _Results:
    """The first answer grows token by token on its line; the others follow, whole, as they end."""
    first_ended = asyncio.Event()

    async def send(request: DemoRequest) -> Answer:
        live = request is wave[0]
        try:
            if request.unary:
                answer = await client.generate(request.prompt, sampling=request.sampling, resumable=False)
            else:
                async with client.stream(request.prompt, sampling=request.sampling) as pieces:
                    async for piece in pieces:
                        if live:
                            click.echo(piece.text, nl=False)
                answer = pieces.answer
        except BatonError as error:
            raise error.reworded(f"The demo's request {request.name} failed: {error.message}") from error
        if live:
            click.echo("")
            first_ended.set()
        else:
            await first_ended.wait()
            click.echo(f"{_fitted(request.name, request.prompt)}\n{_fitted('', f'>{answer.text}')}")
        return answer

    click.echo(f"{_fitted(wave[0].name, wave[0].prompt)}\n{_INDENT}>", nl=False)
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(request)) for request in wave]
    except* BatonError as failed:
        failure = failed.exceptions[0]  # the others were cancelled, or failed together with it
    if failure is not None:
        click.echo("")  # the line of an answer that will not go on
        raise failure
    return [(request, task.result()) for request, task in zip(wave, tasks, strict=True)]


def _fitted(name: str, text: str) -> str:
    """One line, the middle of a long text left out."""
    room = max(_TEXT_CHARS_MIN, shutil.get_terminal_size(fallback=(_COLUMNS_DEFAULT, 0)).columns - len(_INDENT) - 1)
    half = (room - len(_GAP)) // 2
    shown = text if len(text) <= room else text[:half] + _GAP + text[-half:]
    return f"  {name}".ljust(len(_INDENT)) + shown


def _row(request: DemoRequest, answer: Answer, mismatches: Collection[str]) -> list[str]:
    stats = answer.stats
    counts = (
        stats.blocks_written, stats.blocks_skipped, stats.prompt_tokens, stats.prompt_tokens_cached,
        stats.output_tokens,
    )  # fmt: skip
    return [
        *(request.name, stats.prefill_node, stats.decode_node, stats.transport),
        *map(str, counts),
        f"{stats.ttft_ms:.0f}",
        f"{stats.itl_mean_ms:.1f}",
        "wrong" if request.name in mismatches else "equal",
    ]


def _verdict(count: int, mismatches: Mapping[str, str], leftovers: Sequence[str], problems: int) -> int:
    for name, what in mismatches.items():
        click.echo(f"WRONG  {name}: {what}")
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
