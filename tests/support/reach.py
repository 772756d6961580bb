"""Counts the files that one request goes through.

    python -m tests.support.reach            # files by package
    python -m tests.support.reach --files    # their names too

A router, a prefill node and a decode node, all in this process, serve a small model over tcp. Their first request
arrives on a connection that its client has already: the pair connects, the blocks are handed over, the answer comes
back. Counted are the files of the product of which a function runs, on any thread, from the moment the client sends
until it has the last token. Not counted is how the router takes the client's connection (`router/doors.py`), a function
that also runs while nobody asks for anything (heartbeats, pings), and one that runs in some rounds only.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import click

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from tests.support.inprocess_cluster import inprocess

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    "baton", "cachestore", "decode_node", "engine", "kvtransfer", "mixed_node", "node", "prefill_node", "router",
)  # fmt: skip
"""Of the product, without the command and the generated messages."""
ROUNDS: Final = 3
IDLE_S: Final = 2.0
PROMPT: Final = [5 + i for i in range(40)]
NEW_TOKENS: Final = 3
MODEL: Final = DemoModelParams()


class Recorder:
    """Notes the code of each function that is called, in `into`."""

    def __init__(self) -> None:
        self.into: set[CodeType] | None = None

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        into = self.into
        if into is not None and event == "call":
            into.add(frame.f_code)


def reached_files() -> set[str]:
    """The files that a cold request over tcp goes through, each time. Takes some seconds."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo_model(Path(folder), MODEL)
        spec = ClusterSpec(
            engine_kind=EngineKind.MODEL,
            model=folder,
            threads=1,
            blocks=64,
            flags={Service.PREFILL: {"transports": "tcp"}, Service.DECODE: {"transports": "tcp"}},
        )
        idle: set[CodeType] = set()
        asked = [_round(spec, idle) for _ in range(ROUNDS)]
    return {name for code in set.intersection(*asked) - idle if (name := _file_of(code)) is not None}


def _file_of(code: CodeType) -> str | None:
    """Its path below the repository's root; None where it is no function of the product."""
    path = Path(code.co_filename)
    if code.co_name == "<module>" or not path.is_relative_to(ROOT):
        return None
    name = str(path.relative_to(ROOT))
    return name if name.split("/")[0] in PACKAGES else None


def _round(spec: ClusterSpec, idle: set[CodeType]) -> set[CodeType]:
    """What is called for a request; adds to `idle` what is called when there is none."""
    asked: set[CodeType] = set()
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(_ask(spec, recorder, asked, idle))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return asked


async def _ask(spec: ClusterSpec, recorder: Recorder, asked: set[CodeType], idle: set[CodeType]) -> None:
    async with inprocess(spec) as cluster:
        await cluster.client.connect()
        recorder.into = idle
        await asyncio.sleep(IDLE_S)  # nothing is waited for: this is the nodes' life without requests
        recorder.into = asked
        answer = await cluster.client.generate(PROMPT, max_tokens=NEW_TOKENS, ignore_eos=True)
        recorder.into = None
        assert len(answer.ids) == NEW_TOKENS
        assert answer.stats.transport == "tcp", answer.stats


@click.command(help="Count the files that one cold request over tcp goes through.")
@click.option("--files", is_flag=True, help="Print the names of the files.")
def main(files: bool) -> None:
    found = sorted(reached_files())
    for package, count in sorted(Counter(name.split("/")[0] for name in found).items()):
        click.echo(f"{count:4} {package}")
    click.echo(f"{len(found):4} in all")
    for name in found if files else ():
        click.echo(name)


if __name__ == "__main__":
    main()
