"""SIGKILL and SIGSTOP of each role at each point of a request's life."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from cli.supervisor import DIRECTORY_NAME
from tests.cluster_harness import assert_conserved, leftovers, wait_for
from tests.faults.cluster import TTL_MS, FaultyCluster
from tests.faults.load import Asked, Load, Question
from tests.faults.outcome import Outcome
from tests.faults.points import SIGNAL_POINTS, Failpoint, Side, Struck

NTH: Final = {Failpoint.LAYER: 6, Failpoint.DECODING: 20}
"""Second layer of the second chunk; twentieth token behind the first. Elsewhere the first time."""


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
    engine: str = ""
    """Begins the name of a case that is not on the mock engine."""

    @property
    def name(self) -> str:
        return f"{self.engine}{self.blow.value}-{self.side.value}-at-{self.point.value}"

    async def run(self, cluster: FaultyCluster, questions: Questions) -> Outcome:
        """Raises AssertionError where the case itself could not be played."""
        outcome = Outcome(case=self.name)
        async with Load(cluster.client, questions) as load:
            cluster.arm(
                point=self.point,
                nth=NTH.get(self.point, 1),
                mark=questions.mark,
                side=self.side,
                signum=signal.SIGSTOP if self.blow.stops else signal.SIGKILL,
            )
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
        await settle(cluster, questions, struck, outcome)
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
        await assert_conserved(cluster)
    except AssertionError as error:
        left = leftovers(await cluster.statuses())
        outcome.leaked += sum(count for found in left.values() for count in found.values()) or 1
        outcome.problems.append(str(error))


async def settle(cluster: FaultyCluster, questions: Questions, struck: Struck, outcome: Outcome) -> None:
    """All is whole again: everybody is listed, the node that was struck serves, and nothing is left of any request."""
    for name in cluster.cluster.names:
        if name != DIRECTORY_NAME:
            await cluster.wait_listed(name, True)
    await served_by(cluster, questions, struck.target, outcome)
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
        return name in used or not name.startswith((Side.PREFILL.value, Side.DECODE.value))

    await wait_for(holds, f"{name} to serve again", story=cluster.story)


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
