"""One run: a cluster comes up, answers requests while faults strike, calms down, and is judged."""

from __future__ import annotations

import gc
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from tests.sim.checks import check_blocks, check_bounds, check_now, is_quiet, what_is_left
from tests.sim.cluster import SimCluster, current
from tests.sim.excuses import Excuses
from tests.sim.faults import FaultPlan, Faults
from tests.sim.judge import DEADLINE_S
from tests.sim.load import Load, LoadFigures
from tests.sim.loop import ProcessState, World
from tests.sim.network import Network
from tests.sim.profiles import PROFILES

START_S_MAX = 60.0
IDLE_S_MAX = 90.0
"""How long after the faults, and after the last request's deadline, a cluster may take to be quiet."""
STUCK_S_MAX = 2 * DEADLINE_S
"""A request has ended by then, or hangs."""
UP_TO_DATE_S = 0.05
PROBES = 8
"""Requests that are asked when the faults are over."""
COLLECT_EVERY_S = 20.0
"""Of simulated time, between two runs of the garbage collector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A seed, a commit and these settle everything that happens in a run."""

    seed: int
    requests: int = 40
    profile: str = "small"
    fault_gap_s: float | None = None
    """Mean simulated time between faults; 0: none; None: the profile's."""
    lost_allowed: bool = False
    resumable: float | None = None
    """Share of the requests that are; None: the profile's."""
    check_every_s: float = 0.02
    """Of simulated time, between two looks at every node's limits. (Its blocks are looked at after each callback.)"""
    recount_every_s: float = 0.1
    """Of simulated time, between two recounts of all of every node's blocks."""
    trace: bool = False
    progress: Callable[[int, float], None] | None = None
    """Told now and then how many requests have ended, and the simulated time."""

    def replay(self) -> str:
        command = f"make sim SEED={self.seed} STEPS={self.requests} PROFILE={self.profile}"
        if self.fault_gap_s is not None:
            command += f" GAP={self.fault_gap_s:g}"
        flags = ["--loss"] if self.lost_allowed else []
        if self.resumable is not None:
            flags.append(f"--resumable={self.resumable:g}")
        return f"{command} FLAGS='{' '.join(flags)}'" if flags else command


@dataclass(slots=True, kw_only=True)
class Outcome:
    config: RunConfig
    violations: list[str]
    figures: LoadFigures
    faults: Counter[str]
    deaths: int
    simulated_s: float
    callbacks: int
    messages: int
    digest: str
    resolves: int
    """Times that a decode node was asked to Resolve."""
    fetches: int
    """Whose blocks came."""
    fetches_failed: int
    """Or were refused."""
    quiet_after_s: float
    """From the end of the faults and the last request to nothing left."""

    def reported(self) -> str:
        f = self.figures
        return (
            f"{f.asked} requests: {f.complete} complete ({f.mixed} of several attempts), "
            f"{sum(f.lost.values())} lost to faults {dict(f.lost)}, "
            f"{sum(f.refused.values())} refused for want of room, {f.left} left by their clients; "
            f"{f.whole} whole, {f.resumable} resumable, {f.lost_resumable} of them lost, {f.moved} had over several "
            f"calls ({f.attached} attaches); {f.tokens} tokens; "
            f"{self.fetches} fetches, {self.fetches_failed} of nothing; "
            f"{sum(self.faults.values())} faults {dict(self.faults)}, {self.deaths} deaths; "
            f"{self.simulated_s:.1f} s simulated, quiet after {self.quiet_after_s:.2f} s; {self.messages} messages, "
            f"{self.callbacks} callbacks; digest {self.digest}"
        )


class SimFailure(AssertionError):
    """A check did not hold. Says how to run the same again."""

    def __init__(self, outcome: Outcome) -> None:
        listed = "\n  ".join(outcome.violations)
        super().__init__(f"seed {outcome.config.seed}:\n  {listed}\nAgain: {outcome.config.replay()}")
        self.outcome = outcome


def simulate(config: RunConfig) -> Outcome:
    """Run it to its end, or to the first violation."""
    return _Simulation(config).run()


def simulate_or_fail(config: RunConfig) -> Outcome:
    """Raises SimFailure when something is wrong."""
    outcome = simulate(config)
    if outcome.violations:
        raise SimFailure(outcome)
    return outcome


class _Simulation:
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        profile = PROFILES[config.profile]
        if config.resumable is not None:
            profile = replace(profile, resumable=config.resumable)
        root = Random(f"{config.seed}/{config.profile}")
        self.world = World(root.getrandbits(64))
        self.network = Network(self.world, profile.network, rng=Random(root.getrandbits(64)))
        self.cluster = SimCluster(self.world, self.network, profile, rng=Random(root.getrandbits(64)))
        self.excuses = self.cluster.excuses = Excuses(self.cluster, self.network)
        self.load = Load(
            self.cluster,
            requests=config.requests,
            rng=Random(root.getrandbits(64)),
            excuses=self.excuses,
            lost_allowed=config.lost_allowed,
        )
        self.faults = Faults(self.cluster, self.network, self.load, self._plan(), rng=Random(root.getrandbits(64)))
        self.quiet_after_s = 0.0
        self._turn = 0

    def run(self) -> Outcome:
        handler = _LogEar(self.cluster, trace=self.config.trace)
        collecting = gc.isenabled()
        gc.disable()  # it would run at moments that no seed decides
        gc.freeze()  # what was here before the run need not be looked through again and again
        try:
            with self.cluster.in_place(), handler:
                try:
                    self._run()
                except Exception as error:  # noqa: BLE001  # told as a violation
                    reported = "".join(traceback.format_exception(error)[-12:])
                    self.cluster.violations.append(f"{self.world.now_s:.6f} broke off: {reported}")
                finally:
                    for process in list(self.cluster.processes.values()):
                        process.loop.kill()
        finally:
            gc.collect()
            gc.unfreeze()
            if collecting:
                gc.enable()
        self.cluster.violations += self.world.failures
        return self._outcome()

    def _plan(self) -> FaultPlan:
        profile = PROFILES[self.config.profile]
        gap_s = profile.fault_gap_s if self.config.fault_gap_s is None else self.config.fault_gap_s
        if gap_s == 0:
            return FaultPlan(weights=())
        weights = (*(profile.fault_weights or FaultPlan().weights), *profile.faults_more)
        return FaultPlan(mean_gap_s=gap_s, at_once_max=profile.faults_at_once_max, weights=weights)

    def _run(self) -> None:
        self.cluster.start_all()
        self._until(self._everybody_known, START_S_MAX, "the cluster did not come up")
        self.world.after(COLLECT_EVERY_S, self._collect_sometimes)
        self.excuses.look_sometimes()
        self._check_sometimes()
        self._recount_sometimes()
        self.load.begin()
        self.faults.begin()
        self._until_answered()
        if self.cluster.violations or self.world.failures:
            return
        self.faults.calm()
        calm_s = self.world.now_s
        self._until(self._quiet, IDLE_S_MAX, "not quiet after the faults")
        self.quiet_after_s = self.world.now_s - calm_s
        self._until(self._everybody_known, START_S_MAX, "the nodes do not know each other again")
        self._ask_undisturbed()
        check_now(self.cluster)

    def _ask_undisturbed(self) -> None:
        """What works without faults works after them: nothing excuses an error now."""
        if self.cluster.violations or self.world.failures:
            return
        self.load.judge.disturbed, self.load.judge.disturbed_s = False, -1.0
        self.excuses.forget()
        self.load.ask_more(PROBES)
        self._until_answered()
        self._until(self._quiet, IDLE_S_MAX, "not quiet at the end")

    def _until_answered(self) -> None:
        """Until every request has ended, each in its time."""
        while not (self.load.over or self.cluster.violations or self.world.failures):
            ended = self.load.figures.ended
            self._until(lambda: self.load.over or self.load.figures.ended > ended, STUCK_S_MAX, "no request ended")  # noqa: B023

    def _until(self, holds: object, limit_s: float, problem: str) -> None:
        assert callable(holds)
        end_s = self.world.now_s + limit_s
        while not holds():
            if self.cluster.violations or self.world.failures:
                return
            if self.world.now_s >= end_s:
                self.cluster.violation(f"{problem} within {limit_s} s: {what_is_left(self.cluster)}")
                return
            self.world.run(self.world.now_s + UP_TO_DATE_S)
            if self.config.progress is not None:
                self.config.progress(self.load.figures.ended, self.world.now_s)

    def _everybody_known(self) -> bool:
        runtimes = [p.runtime for p in self.cluster.processes.values() if p.runtime is not None]
        count = len(self.cluster.kinds) - 1
        return len(runtimes) == count and all(len(r.membership.nodes()) == count for r in runtimes)

    def _quiet(self) -> bool:
        self.faults.keep_up()
        return is_quiet(self.cluster)

    def _check_sometimes(self) -> None:
        for process in self.cluster.processes.values():
            if process.alive:
                check_bounds(process)
        self.world.after(self.config.check_every_s, self._check_sometimes)

    def _recount_sometimes(self) -> None:
        """One node at a time, so that each look is cheap and comes at another moment."""
        nodes = [process for process in self.cluster.processes.values() if process.ledger is not None]
        self._turn = (self._turn + 1) % max(1, len(nodes))
        if nodes and nodes[self._turn].alive:
            check_blocks(nodes[self._turn])
        self.world.after(self.config.recount_every_s / max(1, len(nodes)), self._recount_sometimes)

    def _collect_sometimes(self) -> None:
        gc.collect()
        self.world.after(COLLECT_EVERY_S, self._collect_sometimes)

    def _outcome(self) -> Outcome:
        return Outcome(
            config=self.config,
            violations=self.cluster.violations,
            figures=self.load.figures,
            faults=self.faults.counts,
            deaths=self.cluster.deaths,
            simulated_s=self.world.now_s,
            callbacks=self.world.callbacks,
            messages=self.network.messages,
            digest=f"{self.network.digest:08x}",
            resolves=self.cluster.resolves,
            fetches=sum(fetches.costs.total.times.count for fetches in self.cluster.fetches),
            fetches_failed=sum(
                fetches.costs.total.failed + fetches.costs.total.refused for fetches in self.cluster.fetches
            ),
            quiet_after_s=self.quiet_after_s,
        )


class _LogEar(logging.Handler):
    """What a node logs as an error is a violation: the product says so itself. With `trace`, all is printed."""

    def __init__(self, cluster: SimCluster, *, trace: bool) -> None:
        super().__init__()
        self._cluster = cluster
        self._trace = trace

    def __enter__(self) -> _LogEar:
        logger = logging.getLogger("baton")
        self._before = logger.level, logger.propagate
        logger.setLevel(logging.DEBUG if self._trace else logging.ERROR)
        logger.propagate = False
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("baton")
        logger.removeHandler(self)
        logger.setLevel(self._before[0])
        logger.propagate = self._before[1]

    def emit(self, record: logging.LogRecord) -> None:
        process = current()
        if process.loop.state is ProcessState.DEAD:
            return
        fields = " ".join(f"{key}={value}" for key, value in getattr(record, "baton_fields", {}).items())
        text = f"{process.name} {record.levelname} {record.name}: {record.getMessage()} {fields}"
        if self._trace:
            print(f"{self._cluster.world.now_s:.6f} {text}")
        if record.levelno >= logging.ERROR:
            cause = ""
            if record.exc_info and record.exc_info[1] is not None:
                cause = "\n" + "".join(traceback.format_exception(record.exc_info[1]))
            self._cluster.violation(text + cause)


SUITE_SEEDS = 120
"""Of `make test-all`."""
SUITE_REQUESTS = 40
_SUITE_PROFILES = ("small", "tangled", "routers", "pair", "overtaken", "stalled")


def suite_config(seed: int, resumable: float | None = None, profile: str | None = None) -> RunConfig:
    """The short run of this seed: the profiles take turns, but for a mutant that has one of its own."""
    turn = _SUITE_PROFILES[seed % len(_SUITE_PROFILES)]
    return RunConfig(seed=seed, requests=SUITE_REQUESTS, profile=profile or turn, resumable=resumable)
