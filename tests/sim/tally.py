"""What came of one run, in a form that can be kept and added up."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass

from tests.sim.run import RunConfig, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one run."""

    seed: int
    profile: str
    digest: str
    requests: int
    complete: int
    lost: dict[str, int]
    """Ended in an error that a fault excuses, by its reason."""
    resumable: int = 0
    lost_resumable: int = 0
    """Of those that were lost."""
    attached: int = 0
    """Calls to go on with an answer."""
    moved: int = 0
    """Answers that came by several calls."""
    refused: int
    left: int
    tokens: int
    attempts_later: int
    """Answers that more than one attempt has drawn."""
    faults: dict[str, int]
    deaths: int
    callbacks: int
    simulated_s: float
    wall_s: float
    cpu_s: float
    violations: list[str]
    text: str = ""

    def line(self) -> str:
        """JSON, without the text."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "text"})


def run(config: RunConfig) -> Result:
    """Simulate, and take the time. A function of a module, for processes to find."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    outcome = simulate(config)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    f = outcome.figures
    text = [
        f"seed {outcome.config.seed}, {outcome.config.profile}: {outcome.reported()}",
        f"  {wall_s:.1f} s, {cpu_s:.1f} s of one core: {f.asked / cpu_s:.0f} requests a second of it, "
        f"{f.complete / cpu_s:.0f} of them complete",
        *(f"  VIOLATION {violation}" for violation in outcome.violations),
    ]
    if outcome.violations:
        text.append(f"  Again: {outcome.config.replay()}")
    return Result(
        seed=outcome.config.seed,
        profile=outcome.config.profile,
        digest=outcome.digest,
        requests=f.asked,
        complete=f.complete,
        lost=dict(f.lost),
        resumable=f.resumable,
        lost_resumable=f.lost_resumable,
        attached=f.attached,
        moved=f.moved,
        refused=sum(f.refused.values()),
        left=f.left,
        tokens=f.tokens,
        attempts_later=f.mixed,
        faults=dict(outcome.faults),
        deaths=outcome.deaths,
        callbacks=outcome.callbacks,
        simulated_s=outcome.simulated_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
        violations=outcome.violations,
        text="\n".join(text),
    )


_SUMMED = (
    "requests",
    "complete",
    "resumable",
    "lost_resumable",
    "attached",
    "moved",
    "refused",
    "left",
    "tokens",
    "attempts_later",
    "deaths",
    "callbacks",
)


class Tally:
    """The sum of some runs."""

    def __init__(self) -> None:
        self.violations = 0
        self._sums: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._runs: Counter[str] = Counter()
        self._cpu_s = self._simulated_s = 0.0

    def add(self, result: Result) -> None:
        self._runs[result.profile] += 1
        for name in _SUMMED:
            self._sums[name] += getattr(result, name)
        for reason, count in result.lost.items():
            self._lost[reason.rstrip("-0123456789")] += count
        self._faults.update(result.faults)
        self._cpu_s += result.cpu_s
        self._simulated_s += result.simulated_s
        self.violations += len(result.violations)

    def reported(self, wall_s: float | None = None) -> str:
        """`wall_s`: how long all of them took together."""
        s = self._sums
        runs = ", ".join(f"{count} {profile}" for profile, count in sorted(self._runs.items()))
        ended = "".join(f", {count} {reason}" for reason, count in self._lost.most_common())
        speed = f"{s['requests'] / self._cpu_s:.0f} requests a second of one core ({self._cpu_s:.0f} s)"
        if wall_s is not None:
            speed += f", {s['requests'] / wall_s:.0f} a second in all ({wall_s:.0f} s)"
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self._faults.items()))
        return (
            f"{sum(self._runs.values())} runs ({runs}); {s['requests']} requests: {s['complete']} complete "
            f"({s['attempts_later']} of several attempts), {sum(self._lost.values())} ended by an error that a fault "
            f"excuses{ended}, {s['refused']} refused for want of room, {s['left']} left by their clients; "
            f"{s['resumable']} of the requests resumable: {s['lost_resumable']} ended by an error, {s['moved']} had "
            f"over several calls ({s['attached']} attaches); "
            f"{s['tokens']} tokens; {sum(self._faults.values())} faults ({faults}), "
            f"{s['deaths']} deaths; {self._simulated_s:.0f} s simulated, {s['callbacks']} callbacks, the books looked "
            f"at after each; {self.violations} violations; {speed}"
        )
