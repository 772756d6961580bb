"""How late the control thread is while a real torch engine is at full load beside it, against the same loop idle.

    python benchmarks/control_lag.py [--model FOLDER] [--sequences 32] [--seconds 10] [--compute-threads 1]

The engine steps on its own thread as in a node (schedule and postprocess on the control thread, run on the engine's),
with every place taken and a new prompt for each answer that ends; the reaper's recount of blocks runs each second. The
lags are those that `baton.loop_lag` measures. Without --model a small demo model is written and used.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from itertools import count
from pathlib import Path

import numpy as np

from baton import loop_lag
from baton.clock import Clock
from baton.ids import Attempt, RequestId, RequestKey
from engine.build import EngineConfig
from engine.core import TokenEvent
from engine.demo_model import write_demo_model
from engine.scheduler import Sequence, SequenceMode
from engine.types import Batch, KvSink, NullSink, SamplingParams
from node.engine_loop import EngineLoop
from node.main import ConservationWatch
from node.pool import DevicePool, open_device_pool

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64


class FullHost:
    """A `StepHost` that keeps every place of the engine taken."""

    def __init__(self, pool: DevicePool, sequences: int) -> None:
        self.tokens = 0
        self.stopping = False
        self._pool = pool
        self._numbers = count()
        self._rng = np.random.default_rng(0)
        for _ in range(sequences):
            self._submit()

    def step_begins(self, batch: Batch) -> KvSink:
        del batch
        return NullSink()

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        del sink
        for event in events:
            self.tokens += event.token is not None
            if event.finish is not None:
                self._pool.ledger.unpromise(event.seq.key)
                self._pool.blocks.release(event.seq.block_table)
                if not self.stopping:
                    self._submit()

    def _submit(self) -> None:
        blocks, ledger = self._pool.blocks, self._pool.ledger
        key = RequestKey(request=RequestId(f"r{next(self._numbers)}"), attempt=Attempt(0))
        prompt = self._rng.integers(1, self._pool.runner.vocab_size, PROMPT_TOKENS).tolist()
        table = blocks.admit([], blocks.blocks_for(PROMPT_TOKENS))
        ledger.promise(key, blocks.blocks_for(PROMPT_TOKENS + OUTPUT_TOKENS) - len(table))
        self._pool.engine.submit(
            Sequence(
                key=key,
                params=SamplingParams(
                    temperature=0.0, top_k=0, top_p=1.0, seed=1, max_tokens=OUTPUT_TOKENS,
                    stop_token_ids=frozenset(), ignore_eos=True,
                ),
                tokens=prompt,
                prompt_len=PROMPT_TOKENS,
                computed=0,
                block_table=table,
                promise_key=key,
                mode=SequenceMode.COMPLETE,
                cache_salt=b"",
                cached_tokens=0,
            )
        )  # fmt: skip


async def lags_ms(seconds: float) -> np.ndarray:
    """What is seen on this loop for so long."""
    found: list[float] = []
    lag = loop_lag.LoopLag(Clock())
    lag.report = found.append
    lag.start()
    await asyncio.sleep(seconds)
    await lag.close()
    return np.array(found) * 1000


async def measure(config: EngineConfig, seconds: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Lags of the idle loop, of the loaded one, and tokens a second meanwhile."""
    pool = await open_device_pool(config, name="bench", progress=lambda *_: None)
    try:
        idle = await lags_ms(seconds)
        host = FullHost(pool, config.sequences_max)
        loop = EngineLoop(pool.engine, host, name="bench")
        stepping = asyncio.create_task(loop.run())
        watch = ConservationWatch(pool.ledger, Clock())

        async def reap() -> None:
            while True:
                await asyncio.sleep(1)
                watch.check_sometimes()

        reaping = asyncio.create_task(reap())
        loaded = await lags_ms(seconds)
        rate = host.tokens / seconds
        host.stopping = True
        reaping.cancel()
        await loop.stop(stepping)
        assert watch.errors == 0
        del host, loop
    finally:
        pool.close()
    return idle, loaded, rate


def reported(name: str, lags: np.ndarray) -> str:
    p50, p99 = np.percentile(lags, [50, 99])
    return f"{name:8} {len(lags):6} looks   p50 {p50:7.2f} ms   p99 {p99:7.2f} ms   max {lags.max():7.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="Lag of the control thread beside a busy engine.")
    parser.add_argument("--model", default="")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--compute-threads", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        if not given.model:
            write_demo_model(Path(folder) / "model")
        config = EngineConfig(
            model=given.model or str(Path(folder) / "model"),
            num_blocks=given.sequences * 16,
            sequences_max=given.sequences,
            compute_threads=given.compute_threads,
        )
        idle, loaded, rate = asyncio.run(measure(config, given.seconds))
    print(reported("idle", idle), reported("loaded", loaded), sep="\n")
    ratio = np.percentile(loaded, 99) / max(np.percentile(idle, 99), 1e-3)
    print(f"{rate:.0f} tokens a second meanwhile; p99 loaded is {ratio:.1f} times that of the idle loop")


if __name__ == "__main__":
    main()
