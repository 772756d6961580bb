"""A prefill node inside this process, and as a process that owns what `benchmarks.kvstore_fetch` fetches.

python -m benchmarks.kvstore_fetch_side DIRECTORY MODEL BLOCKS TRANSPORT
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from baton.event_loop import collect_seldom, new_event_loop
from baton.grpc_core import WakeReader
from baton.ids import BlockId
from benchmarks.transfer_side import cpu_s
from cachestore.prefix_cache import IndexCursor
from cli.services import Service, load_config, serve_function
from node.pool import DevicePool
from prefill_node.main import PrefillHalf

SALT = b""
VOCAB = 2048
CONTEXT = 8448
T = TypeVar("T")


@asynccontextmanager
async def serving(service: Service, **flags: object) -> AsyncIterator[str]:
    """A process of Baton as a task of this loop -> its endpoint."""
    settings = {"listen": "127.0.0.1:0", **flags}
    config = load_config(service, toml_path=None, env={}, flags={key: str(value) for key, value in settings.items()})
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    serve = serve_function(service)
    task = asyncio.ensure_future(
        serve(config, stop=stop, on_ready=lambda at, **_: ready.set_result(at), progress=lambda *_args, **_kwargs: None)
    )
    try:
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        collect_seldom()
        yield ready.result()
    finally:
        stop.set()
        await asyncio.wait({task})


@asynccontextmanager
async def prefill_node(*, directory: str, name: str, model: str, blocks: int, transport: str) -> AsyncIterator[Any]:
    """-> endpoint, and the node's parts."""
    halves: list[PrefillHalf] = []
    real = PrefillHalf.__init__

    def made(half: PrefillHalf, *parts: Any) -> None:
        real(half, *parts)
        halves.append(half)

    engine = {"engine.model": model, "engine.num_blocks": blocks, "engine.compute_threads": 1}
    with patch.object(PrefillHalf, "__init__", made):
        async with serving(Service.PREFILL, name=name, directory=directory, transports=transport, **engine) as endpoint:
            yield endpoint, halves[0]


def run_as_process(main: Coroutine[Any, Any, T]) -> T:
    """With the event loop of a process of Baton."""
    WakeReader.one_loop = True
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def prompt(seed: int, tokens: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(2, VOCAB, tokens).tolist()
    return ids


def content(seed: int, row: int, position: int, words: int) -> npt.NDArray[np.uint64]:
    """What a record has: its place, in each word."""
    first = np.uint64(((seed * 251 + row) * 8_191 + position) << 16)
    return (first + np.arange(words, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)


def records(pool: DevicePool) -> npt.NDArray[np.uint64]:
    """The region as [rows][blocks][words]."""
    layout, blocks = pool.layout, pool.ledger.num_blocks
    region_U8 = pool.host_region.array_U8[: layout.region_bytes(blocks)]
    return region_U8.view(np.uint64).reshape(layout.num_rows, blocks, layout.page_bytes // 8)


async def make_up(pool: DevicePool, seed: int, tokens: int) -> None:
    """Have a prompt cached whose KV was made up, not computed. Filled on a thread: peers watch this loop."""
    positions = tokens // pool.layout.block_size
    assert pool.blocks.prefix_cache.evict_until(positions)
    table = pool.blocks.admit([], positions)
    await asyncio.to_thread(_fill, records(pool), seed, table)
    pool.blocks.prefix_cache.index(prompt(seed, tokens), table, tokens, SALT, IndexCursor())
    pool.blocks.release(table)


def _fill(region_RBW: npt.NDArray[np.uint64], seed: int, table: list[BlockId]) -> None:
    for row in range(region_RBW.shape[0]):
        for position, block in enumerate(table):
            region_RBW[row, block] = content(seed, row, position, region_RBW.shape[2])


def is_made_up(pool: DevicePool, seed: int, table: list[BlockId]) -> bool:
    """Whether these blocks are the leading ones of such a prompt, byte for byte."""
    region_RBW = records(pool)
    return all(
        np.array_equal(region_RBW[row, block], content(seed, row, position, region_RBW.shape[2]))
        for row in range(region_RBW.shape[0])
        for position, block in enumerate(table)
    )


async def main(directory: str, model: str, blocks: str, transport: str) -> None:
    node = prefill_node(directory=directory, name="owner", model=model, blocks=int(blocks), transport=transport)
    async with node as (endpoint, half):
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            match command.pop("do"):
                case "who":
                    reply: Any = {"endpoint": endpoint, "incarnation": half.node._peers.runtime.incarnation}
                case "cpu":
                    reply = cpu_s()
                case "make up":
                    await make_up(half.node.pool, **command)
                    reply = None
                case unknown:
                    raise AssertionError(unknown)
            print(json.dumps({"reply": reply}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    run_as_process(main(*sys.argv[1:]))
