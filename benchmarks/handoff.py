"""How much of a handoff is exposed: from the end of the last step to the Commit accepted, by prompt and transport.

    python -m benchmarks.handoff --json handoff.json --plot handoff.png --trace handoff-trace

A prefill node in this process, whose writer is watched, and a decode node, a router and a directory as processes
of their own; one request at a time, one compute thread each. The model has random weights. Cases:

    cold            nothing is cached anywhere
    prefill-cached  7/8 of the prompt are cached by the prefill node alone: all of them are sent
    both-cached     7/8 are cached on both sides: they are neither computed nor sent

`--trace PREFIX` writes PREFIX-TRANSPORT-LENGTH-CASE.json of the longest prompt of 2,048 tokens or less, for
https://ui.perfetto.dev. Samples are added to the JSON file, so that a measurement can be made in several pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.client import AsyncClient, BatonError, Sampling, Stats
from benchmarks.handoff_trace import Event, What, chrome_trace, figures, spans
from cli.child import Child, stop_children
from cli.services import Service, load_config
from engine.core import Engine
from engine.demo_model import DemoModelParams, write_demo_model
from kvtransfer.protocol.writer import HandoffEnd, ReportEnd
from kvtransfer.writer import Handoff, StepWrites, WriterPeer
from prefill_node.main import serve

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
NAMES = ("transport", "length", "case")
CASES = ("cold", "prefill-cached", "both-cached")
CACHED_EIGHTHS = 7
PICTURE_LENGTH_MAX = 2048
ANSWER_S_MAX = 120.0
BLOCK = 16
VOCAB = 2048


class Recorder:
    """Takes the time at each stage of a handoff. Appends, safe on any thread."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def _add(self, what: What, layer: int = -1, writes: int = 0, nbytes: int = 0) -> None:
        self.events.append(Event(time.perf_counter(), what, layer, writes, nbytes))

    def watch(self) -> None:
        """Take the time on the engine's thread where a step ends and a layer is posted, and in the writers here."""
        add = self._add

        def planned(self: Handoff, src_blocks_B: Any, dst_blocks_B: Any) -> None:
            add(What.PLANNED, writes=self.peer.layout.num_layers * len(src_blocks_B))

        def posted(self: StepWrites, first: int, end: int) -> None:
            for layer in range(first, end):
                add(What.POSTED, layer, self.plan.writes_per_layer, self.plan.layer_nbytes(layer))

        def ended(self: WriterPeer, instruction: ReportEnd) -> None:
            assert instruction.end is HandoffEnd.COMMITTED, instruction
            add(What.ENDED)

        after(Engine, "run", lambda *_: add(What.COMPUTED))
        after(WriterPeer, "_start_writing", lambda *_: add(What.GRANTED))
        after(Handoff, "plan_step", planned)
        after(StepWrites, "layers_done", posted)
        after(WriterPeer, "_seal_now", lambda *_: add(What.SEALED))
        after(WriterPeer, "_report_end", ended)
        before(WriterPeer, "completed", lambda _peer, _handoff, writes: add(What.COMPLETED, writes=writes))
        before(Handoff, "all_posted", lambda *_: add(What.DRAWN))


def before(owner: type, method: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments of this method each time before it runs."""
    real = getattr(owner, method)

    def looked(*args: Any) -> Any:
        look(*args)
        return real(*args)

    setattr(owner, method, looked)


def after(owner: type, method: str, look: Callable[..., None]) -> None:
    """The same after it has returned."""
    real = getattr(owner, method)

    def looked(*args: Any) -> Any:
        result = real(*args)
        look(*args)
        return result

    setattr(owner, method, looked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: Path
    blocks: int
    tokens_per_step: int


@asynccontextmanager
async def cluster(setting: Setting, transport: str) -> AsyncIterator[AsyncClient]:
    """A client of a router; the prefill node is here, the others are processes. All end at the end."""
    engine = {
        "engine.model": setting.model,
        "engine.num_blocks": setting.blocks,
        "engine.compute_threads": 1,
        "engine.tokens_per_step_max": setting.tokens_per_step,
    }
    with tempfile.TemporaryDirectory(prefix="baton-handoff-") as logs:
        children: list[Child] = []

        async def start(service: Service, **flags: object) -> str:
            command = [sys.executable, "-P", "-m", "cli.main", service.value, "--log-level", "warning"]
            for key, value in {"name": service.value, "listen": "127.0.0.1:0", **flags}.items():
                command += ["--" + key.replace(".", "-").replace("_", "-"), str(value)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            child = Child(
                name=service.value, command=command, env=env, log_path=Path(logs) / service.value,
                on_progress=lambda *_: None,
            )  # fmt: skip
            children.append(child)
            if not await child.wait_ready():
                raise SystemExit(f"{service.value} did not start:\n{child.log_tail()}")
            return child.ready.result()

        stop, ready = asyncio.Event(), asyncio.Event()
        serving: asyncio.Task[None] | None = None
        try:
            directory = await start(Service.DIRECTORY)
            await start(Service.DECODE, directory=directory, **engine)
            router = await start(Service.ROUTER, directory=directory, model=setting.model)
            flags = {"name": "prefill", "directory": directory, "transports": transport, **engine}
            config = load_config(
                Service.PREFILL, toml_path=None, env={}, flags={key: str(value) for key, value in flags.items()}
            )
            serving = asyncio.create_task(
                serve(config, stop=stop, on_ready=lambda _: ready.set(), progress=lambda *_: None)
            )
            waiting = asyncio.create_task(ready.wait())
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if serving.done():
                serving.result()
            async with AsyncClient(router, timeout_s=ANSWER_S_MAX, retries_max=0) as client:
                yield client
        finally:
            stop.set()
            if serving is not None:
                await asyncio.wait({serving})
            for child in reversed(children):
                await stop_children([child], grace_ms=5_000)


async def ask(client: AsyncClient, ids: list[int], max_tokens: int) -> Stats:
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    async with client.stream(ids, sampling=sampling, resumable=False) as pieces:
        async for _ in pieces:
            pass
    return pieces.answer.stats


async def until_placed(client: AsyncClient) -> None:
    """The first requests may find that the nodes are not listed yet. Also warms everything up."""
    for _ in range(100):
        with contextlib.suppress(BatonError):
            await ask(client, list(range(2, 70)), 2)
            return
        await asyncio.sleep(0.1)
    raise SystemExit("the nodes were not found")


async def one(
    client: AsyncClient, recorder: Recorder, rng: random.Random, *, length: int, case: str
) -> tuple[list[Event], Stats]:
    """One handoff of a new prompt."""
    ids = [rng.randrange(2, VOCAB) for _ in range(length)]
    cached = length * CACHED_EIGHTHS // 8 // BLOCK * BLOCK
    if case != "cold":
        # With one token only nothing is handed over, and the decode node knows nothing of it.
        await ask(client, [*ids[:cached], 2], 1 if case == "prefill-cached" else 2)
    await asyncio.sleep(0.05)
    recorder.events.clear()
    stats = await ask(client, ids, 2)
    assert stats.prompt_tokens_cached == (0 if case == "cold" else cached), (case, stats)
    assert stats.prompt_tokens_skipped == (cached if case == "both-cached" else 0), (case, stats)
    return sorted(recorder.events, key=lambda event: event.at_s), stats


async def measure(setting: Setting, transport: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    recorder, samples = Recorder(), []
    recorder.watch()
    rng = random.Random(f"{args.seed} {transport}")
    async with cluster(setting, transport) as client:
        await until_placed(client)
        plan = [(length, case) for _ in range(args.rounds) for length in args.lengths for case in args.cases]
        for done, (length, case) in enumerate(plan):
            print(f"\r{transport}: {done} of {len(plan)} ({length} tokens, {case})   ", end="", file=sys.stderr)
            events, stats = await one(client, recorder, rng, length=length, case=case)
            assert stats.transport == transport, stats
            samples.append({"transport": transport, "length": length, "case": case, **asdict(figures(events))})
            if args.trace is not None and length == max(n for n in args.lengths if n <= PICTURE_LENGTH_MAX):
                keep_trace(Path(f"{args.trace}-{transport}-{length}-{case}"), events, f"{transport} {length} {case}")
        print(f"\r{transport}: {len(plan)} handoffs{' ' * 40}", file=sys.stderr)
    return samples


def keep_trace(path: Path, events: list[Event], name: str) -> None:
    path.with_suffix(".json").write_text(json.dumps(chrome_trace(events, name=name)))
    with contextlib.suppress(ImportError):
        draw_timeline(path.with_suffix(".png"), events, name)


def draw_timeline(path: Path, events: list[Event], name: str) -> None:
    from matplotlib.figure import Figure

    start_s = events[0].at_s
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=(2, 1))
    for (found, colour, label, offset), ax in (
        (each, ax)
        for ax in axes
        for each in zip(spans(events), ("tab:blue", "tab:orange"), ("computed", "sent"), (0.0, 0.5), strict=True)
    ):
        for span in found:
            left, width = (span.begin_s - start_s) * 1e3, (span.end_s - span.begin_s) * 1e3
            ax.barh(span.layer + offset, width, left=left, height=0.45, color=colour, label=label)
            label = ""
    marks = [event for event in events if event.what in (What.DRAWN, What.SEALED, What.ENDED)]
    for event in marks:
        at_ms = (event.at_s - start_s) * 1e3
        for ax in axes:
            ax.axvline(at_ms, color="black", linewidth=0.7, linestyle=":")
    for number, event in enumerate(marks):
        at_ms, top = (event.at_s - start_s) * 1e3, axes[1].get_ylim()[1]
        axes[1].text(at_ms, top * (0.95 - 0.12 * number), event.what.value + " ", ha="right", fontsize=7)
    last_ms = (events[-1].at_s - start_s) * 1e3
    final = figures(events)
    axes[0].set(title=f"{name}: {final.exposed_ms:.1f} ms exposed", ylabel="layer", xlabel="ms")
    axes[1].set(
        xlim=(last_ms - 2 * (final.exposed_ms + final.tail_ms), last_ms * 1.002),
        ylabel="layer",
        xlabel="ms, the end of it",
    )
    axes[0].legend(loc="upper left")
    figure.savefig(path, dpi=120)


def report(samples: list[dict[str, Any]]) -> str:
    lines = [
        "transport case           tokens  computed ms  sent MiB  left MiB  drain ms  tail ms  exposed ms (min..max)"
    ]
    for key in sorted({(s["transport"], CASES.index(s["case"]), s["length"]) for s in samples}):
        mine = [s for s in samples if (s["transport"], CASES.index(s["case"]), s["length"]) == key]
        medians = {name: statistics.median(s[name] for s in mine) for name in mine[0] if name not in NAMES}
        exposed = [s["exposed_ms"] for s in mine]
        lines.append(
            f"{key[0]:9} {CASES[key[1]]:14} {key[2]:6}  {medians['computed_ms']:11.0f}  "
            f"{medians['sent_bytes'] / 2**20:8.1f}  {medians['left_bytes'] / 2**20:8.2f}  {medians['drain_ms']:8.1f}  "
            f"{medians['tail_ms']:7.1f}  {medians['exposed_ms']:7.1f} ({min(exposed):.1f}..{max(exposed):.1f})"
        )
    return "\n".join(lines)


def draw(samples: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    transports = sorted({s["transport"] for s in samples})
    for ax, transport in zip(
        figure.subplots(1, len(transports), sharey=True, squeeze=False)[0], transports, strict=True
    ):
        for case in CASES:
            mine = [s for s in samples if (s["transport"], s["case"]) == (transport, case)]
            lengths = sorted({s["length"] for s in mine})
            medians = [statistics.median(s["exposed_ms"] for s in mine if s["length"] == n) for n in lengths]
            ax.plot(lengths, medians, "o-", label=case)
            ax.plot([s["length"] for s in mine], [s["exposed_ms"] for s in mine], "k.", markersize=2)
        ax.set(title=transport, xscale="log", yscale="log", xlabel="prompt tokens", xticks=LENGTHS, xticklabels=LENGTHS)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.supylabel("ms from the end of the last step to the Commit accepted")
    figure.savefig(path, dpi=120)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--transport", action="append", choices=("shm", "tcp"), dest="transports")
    parser.add_argument("--lengths", type=numbers, default=list(LENGTHS))
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--model-dir", type=Path, default=Path("build/handoff-model"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--trace")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what the JSON file has")
    args = parser.parse_args()
    samples = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else []
    if not args.report:
        params = DemoModelParams(
            num_layers=args.layers, hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=4, head_dim=64,
            vocab_size=VOCAB, context_len_max=max(args.lengths) + 64,
        )  # fmt: skip
        write_demo_model(args.model_dir, params)
        setting = Setting(
            model=args.model_dir,
            blocks=2 * max(args.lengths) // BLOCK + 64,
            tokens_per_step=args.tokens_per_step,
        )
        for transport in args.transports or ("shm", "tcp"):
            samples += asyncio.run(measure(setting, transport, args))
        if args.json is not None:
            args.json.write_text(json.dumps(samples) + "\n")
    print(report(samples))
    if args.plot is not None:
        draw(samples, args.plot)


if __name__ == "__main__":
    main()
