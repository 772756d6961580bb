"""What twenty streams notice of each attack: the times between their tokens with it and without, in the same run.

    python -m benchmarks.attacks --json attacks.jsonl [--only "one byte chunks" ...]
    python -m benchmarks.attacks --report attacks.jsonl

All on one machine: a router, a prefill and a decode node with mock engines, the streams in this process, the attacker
in one of its own. Each line is one attack: streams alone, then the attack again and again for as long. Times are the
clock's, so what else the machine does is in both. `hold_ms` is processor time: the longest that the event loop of the
router was kept from turning (tests/support/loop_holds.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.attack import Bystanders, Front, bystanders, front_door
from tests.support.attacks import ATTACKS, AttackerProcess

PHASE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Between two tokens of a stream, in milliseconds."""

    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, gaps_s: Sequence[float]) -> Gaps:
        ordered = sorted(gaps_s)
        at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 1.0)]
        p50, p99, longest = (round(1e3 * gap_s, 1) for gap_s in at)
        return cls(p50=p50, p99=p99, longest=longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    attack: str
    times: int
    """That it was played."""
    alone: Gaps
    attacked: Gaps
    hold_ms: float
    cpu_share: float
    """Of one core, that the router used meanwhile."""


def _taken(others: Bystanders) -> list[int]:
    return [len(each.gaps_s) for each in others.each]


async def _measure(front: Front, attacker: AttackerProcess, name: str) -> Line:
    loop, times = asyncio.get_running_loop(), 0
    async with bystanders(front) as others:
        await asyncio.sleep(PHASE_S)
        before = _taken(others)
        holds = await front.holds()
        await holds.reset()
        began_s = loop.time()
        while loop.time() - began_s < PHASE_S:
            await attacker.play(name)
            times += 1
        found, took_s = await holds.read(), loop.time() - began_s
        await holds.close()
    others.check()
    return Line(
        attack=name,
        times=times,
        alone=Gaps.of([gap_s for each, n in zip(others.each, before, strict=True) for gap_s in each.gaps_s[:n]]),
        attacked=Gaps.of([gap_s for each, n in zip(others.each, before, strict=True) for gap_s in each.gaps_s[n:]]),
        hold_ms=round(found.longest_ms, 1),
        cpu_share=round(found.cpu_s / took_s, 2),
    )


async def _measure_all(front: Front, names: Sequence[str], path: Path) -> None:
    attacker = await AttackerProcess.start(front.target)
    try:
        for name in names:
            line = json.dumps(asdict(await _measure(front, attacker, name)))
            print(line, flush=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    finally:
        await attacker.close()


def _report(path: Path) -> None:
    print("| attack (times) | P50 gap alone, attacked (ms) | P99 | longest | ratio of P99 | hold (ms) |")
    print("| --- | --- | --- | --- | --- | --- |")
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        alone, attacked = line["alone"], line["attacked"]
        cells = [f"{alone[what]:.0f}, {attacked[what]:.0f}" for what in ("p50", "p99", "longest")]
        cells += [f"{attacked['p99'] / alone['p99']:.1f}", f"{line['hold_ms']:.0f}"]
        print(" | ".join([f"| {line['attack']} ({line['times']})", *cells]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("attacks.jsonl"), help="lines are added to it")
    parser.add_argument("--report", type=Path, help="print this file as a table, and do nothing else")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="ATTACK")
    given = parser.parse_args()
    if given.report is not None:
        _report(given.report)
        return
    with front_door(tokenizer=True) as front:
        front.run(_measure_all(front, given.only, given.json))


if __name__ == "__main__":
    main()
