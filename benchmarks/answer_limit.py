"""Do requests without `max_tokens` keep a decode node as busy as requests that name a limit?

    python -m benchmarks.answer_limit --json answer_limit.json         # about four minutes

One router, one prefill and one decode node of the small model, with the default region. `--requests` clients at a time
(32) ask one after another for `--answers` answers in all: in one half of the rounds they name `max_tokens` 256, in the
other none, so that the router decides (`docs/openai.md`). Answers end by themselves, as most do: each token is a stop
token with a chance of about one in a hundred, and both kinds of round ask for the same answers from the same seeds. The
growth of an answer is promised whole, so a limit that takes too much of the region leaves places empty. With
`--to-the-end` all answers go to their limits instead: the longer ones then attend over longer contexts, which costs
time of its own. The two kinds of round alternate. Exit status 1 where the median of the ratios, output tokens a second
without a limit over those with one, is below `--ratio-min`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from baton.client import AsyncClient, Sampling
from cli.supervisor import Cluster, ClusterSpec
from engine.demo_model import DemoModelParams, write_demo_model

CONTEXT = 4_096
VOCABULARY = 2_048
LIMIT = 256
PROMPT_TOKENS_MAX = 64
ANSWER_S_MAX = 300.0
STOP_TOKEN_IDS = 20
KINDS: dict[str, int | None] = {"limit named": LIMIT, "no limit": None}


async def round_of(client: AsyncClient, limit: int | None, args: argparse.Namespace, seed: str) -> dict[str, float]:
    """Output tokens, seconds, and tokens a second of one round."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(1, PROMPT_TOKENS_MAX))] for _ in range(args.answers)]
    stops = [] if args.to_the_end else rng.sample(range(3, VOCABULARY), STOP_TOKEN_IDS)
    lengths: list[int] = []

    async def worker() -> None:
        while prompts:
            sampling = Sampling(
                temperature=1.5, seed=len(prompts), ignore_eos=True, stop_token_ids=stops, max_tokens=limit
            )
            async with client.stream(prompts.pop(), sampling=sampling, resumable=False) as pieces:
                lengths.append(sum([len(piece.ids) async for piece in pieces]))

    begin_s = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(args.requests)))
    seconds = time.monotonic() - begin_s
    return {"tokens": sum(lengths), "longest": max(lengths), "seconds": seconds, "tokens_per_s": sum(lengths) / seconds}


async def measure(args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    spec = ClusterSpec(prefill=1, decode=1, threads=1, model=str(args.model_dir))
    rounds = []
    cluster = Cluster(spec)
    try:
        await cluster.start()
        async with AsyncClient(cluster.router, timeout_s=ANSWER_S_MAX) as client:
            await round_of(client, LIMIT, args, "warm-up")
            for number in range(args.rounds):
                kinds = list(KINDS.items())[:: 1 if number % 2 == 0 else -1]
                rounds.append({kind: await round_of(client, limit, args, f"{number}") for kind, limit in kinds})
                print(json.dumps(rounds[-1]), flush=True)
    finally:
        await cluster.stop()
    return rounds


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, default=Path("build/answer-limit-model"))
    parser.add_argument("--requests", type=int, default=32, help="at a time")
    parser.add_argument(
        "--answers",
        type=int,
        default=512,
        help="of a round; in short rounds the tail of the longest answers counts most",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to-the-end", action="store_true")
    parser.add_argument("--ratio-min", type=float, default=0.9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not (args.model_dir / "config.json").exists():
        write_demo_model(args.model_dir, DemoModelParams(context_len_max=CONTEXT, vocab_size=VOCABULARY))
    rounds = asyncio.run(measure(args))
    ratios = [own["no limit"]["tokens_per_s"] / own["limit named"]["tokens_per_s"] for own in rounds]
    outcome: dict[str, Any] = {"rounds": rounds, "ratio": statistics.median(ratios), "ratios": ratios}
    for kind in KINDS:
        print(f"{kind:12} {statistics.median(own[kind]['tokens_per_s'] for own in rounds):8.0f} tokens/s")
    print(f"ratio {outcome['ratio']:.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
    if args.json is not None:
        args.json.write_text(json.dumps(outcome) + "\n")
    if outcome["ratio"] < args.ratio_min:
        sys.exit(1)


if __name__ == "__main__":
    main()
