"""SIGKILL and SIGSTOP of each role at each point of a request's life."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from cli.supervisor import DIRECTORY_NAME
from tests.cluster_harness import assert_conserved, leftovers, wait_for
from tests.faults.cluster import TTL_MS, WAIT_S_MAX, FaultyCluster
from tests.faults.load import Asked, Load, Question
from tests.faults.outcome import Outcome
from tests.faults.points import SIGNAL_POINTS, Failpoint, Hit, Side


class Questions(Protocol):
    """Where the requests of a case come from."""

    @property
    def mark(self) -> int: ...

    def __call__(self) -> Question: ...

    def marked(self) -> Question: ...

    def short(self) -> Question: ...


class Blow(Enum):
    """What is done to the process. The value begins the name of the case."""

    KILL = "kill"
    """SIGKILL; started again when the others have done without it."""
    RESTART = "restart"
    """SIGKILL; started again at once, under the same name and on the same port, while all goes on."""
    STOP = "stop"
    """SIGSTOP; SIGCONT when everybody has noticed and done without it."""
    STOP_KILL = "stop-and-kill"
    """SIGSTOP; SIGKILL then."""

    @property
    def stops(self) -> bool:
        return self in (Blow.STOP, Blow.STOP_KILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalCase:
    blow: Blow
    side: Side
    point: Failpoint
    kind: str = ""
    """Begins the name of a case that is not on prefill and decode nodes of the mock engine."""

    @property
    def name(self) -> str:
        return f"{self.kind}{self.blow.value}-{self.side.value}-at-{self.point.value}"

    async def run(self, cluster: FaultyCluster, questions: Questions) -> Outcome:
        """Raises AssertionError where the case itself could not be played."""
        outcome = Outcome(case=self.name)
        async with Load(cluster.client, questions) as load:
            blow = Hit(side=self.side, signum=signal.SIGSTOP if self.blow.stops else signal.SIGKILL)
            cluster.arm(point=self.point, mark=questions.mark, hits=(blow,))
            hit = load.ask(questions.marked())
            struck = await cluster.struck()
            if self.blow.stops:
                await self._stopped(cluster, struck.target, load, hit)
            else:
                await cluster.killed(struck.target)
            if self.blow is Blow.RESTART:
                await cluster.restart(struck.target)
            await hit.task
            await load.finish()
        router_killed = self.side is Side.ROUTER and not self.blow.stops
        outcome.count(load.asked, hit, struck_s=struck.at_s, router_killed=router_killed)
        if self.blow in (Blow.KILL, Blow.STOP_KILL):
            await nothing_left(cluster, outcome)  # now: a new process of that name is news that may free something
            await cluster.restart(struck.target)
        await settle(cluster, questions, struck.targets, outcome)
        return outcome

    async def _stopped(self, cluster: FaultyCluster, target: str, load: Load, hit: Asked) -> None:
        """Let it be stopped until everybody else has noticed and done without it."""
        cluster.set_down(target)
        if self.side is Side.ROUTER:
            await cluster.wait_listed(target, False)
        else:
            await hit.task
            await load.finish()
            if self.side is Side.DIRECTORY:
                await asyncio.sleep(TTL_MS / 1e3)
            else:
                await cluster.wait_listed(target, False)
        if self.blow is Blow.STOP:
            cluster.go_on(target)
        else:
            cluster.cluster.send_signal(target, signal.SIGKILL)
            await cluster.killed(target)


async def nothing_left(cluster: FaultyCluster, outcome: Outcome) -> None:
    """Count what those that live still have of any request, after they have had time to let go."""
    try:
        await assert_conserved(cluster, timeout_s=WAIT_S_MAX / 2)
    except AssertionError as error:
        left = leftovers(await cluster.statuses())
        outcome.leaked += sum(count for found in left.values() for count in found.values()) or 1
        outcome.problems.append(str(error))


async def settle(cluster: FaultyCluster, questions: Questions, struck: Sequence[str], outcome: Outcome) -> None:
    """All is whole again: everybody is listed, those that were struck serve, and nothing is left of any request."""
    for name in cluster.cluster.names:
        if name != DIRECTORY_NAME:
            await cluster.wait_listed(name, True)
    for name in struck:
        await served_by(cluster, questions, name, outcome)
    await nothing_left(cluster, outcome)


async def served_by(cluster: FaultyCluster, questions: Questions, name: str, outcome: Outcome) -> None:
    """Ask until the node of this name has had a part in an answer; every answer must be right."""

    async def holds() -> bool:
        asked = [Asked(cluster.client, questions.short()) for _ in range(4)]
        await asyncio.gather(*(one.task for one in asked))
        now_s = time.monotonic()
        outcome.count(asked, asked[0], struck_s=now_s, router_killed=False)
        answers = [one.answer for one in asked if one.answer is not None]
        used = {node for answer in answers for node in (answer.stats.prefill_node, answer.stats.decode_node)}
        return name in used or not services[name].has_engine

    services = dict(cluster.cluster.spec.processes())
    await wait_for(holds, f"{name} to serve again", story=cluster.story, timeout_s=WAIT_S_MAX)


CASES: Final = (
    *(
        SignalCase(blow=blow, side=side, point=point)
        for blow in (Blow.KILL, Blow.STOP)
        for side in Side
        for point in SIGNAL_POINTS
    ),
    *(
        SignalCase(blow=Blow.RESTART, side=side, point=point)
        for side in (Side.PREFILL, Side.DECODE, Side.DIRECTORY)
        for point in (Failpoint.LAYER, Failpoint.COMMIT_SENT)
    ),
    SignalCase(blow=Blow.STOP_KILL, side=Side.PREFILL, point=Failpoint.LAYER),
    SignalCase(blow=Blow.STOP_KILL, side=Side.DECODE, point=Failpoint.DECODING),
)
MIXED_CASES: Final = (
    *(
        SignalCase(blow=Blow.KILL, side=side, point=point, kind="mixed-")
        for side in (Side.PREFILL, Side.DECODE)
        for point in (Failpoint.RESERVED, Failpoint.LAYER, Failpoint.COMMIT_SENT, Failpoint.DECODING)
    ),
    SignalCase(blow=Blow.STOP, side=Side.PREFILL, point=Failpoint.LAYER, kind="mixed-"),
    SignalCase(blow=Blow.STOP, side=Side.DECODE, point=Failpoint.LAYER, kind="mixed-"),
    SignalCase(blow=Blow.STOP, side=Side.DECODE, point=Failpoint.DECODING, kind="mixed-"),
    SignalCase(blow=Blow.RESTART, side=Side.DECODE, point=Failpoint.LAYER, kind="mixed-"),
    SignalCase(blow=Blow.KILL, side=Side.ROUTER, point=Failpoint.LAYER, kind="mixed-"),
)
KEPT_CASES: Final = tuple(
    SignalCase(blow=blow, side=side, point=Failpoint.DECODING, kind="mixed-kept-")
    for side, blow in ((Side.DECODE, Blow.KILL), (Side.DECODE, Blow.STOP), (Side.ROUTER, Blow.KILL))
)
"""Of a request that runs on the node that read its prompt."""
