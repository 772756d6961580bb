"""SIGKILL and SIGSTOP of each role at each point of a request's life."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cli.services import Service
from cli.supervisor import DIRECTORY_NAME
from tests.faults.cluster import TTL_MS, WAIT_S_MAX, FaultyCluster
from tests.faults.load import Asked, Load
from tests.faults.outcome import Outcome
from tests.faults.points import END_POINTS, SIGNAL_POINTS, Failpoint, Hit, Side, Struck
from tests.faults.questions import Questions
from tests.support.cluster_harness import assert_conserved, leftovers, wait_for

MARKED_MAX: Final = 5
"""Marked requests asked, one after the other, before a case counts as one that cannot be played."""


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
        async with Load(cluster.asker, questions) as load:
            blow = Hit(side=self.side, signum=signal.SIGSTOP if self.blow.stops else signal.SIGKILL)
            await cluster.arm(point=self.point, mark=questions.mark, hits=(blow,))
            hit, struck = await self.ask(cluster, load, questions)
            if self.blow.stops:
                await self._stopped(cluster, struck.target, load, hit)
            else:
                await cluster.killed(struck.target)
            if self.blow is Blow.RESTART:
                await cluster.restart(struck.target)
            await hit.task
            await load.finish()
        outcome.count(load.asked, hit, struck_s=struck.at_s, router_struck=self.side is Side.ROUTER)
        if self.blow in (Blow.KILL, Blow.STOP_KILL):
            await nothing_left(cluster, outcome)  # now: a new process of that name is news that may free something
            await cluster.restart(struck.target)
        await settle(cluster, questions, struck.targets, outcome)
        return outcome

    async def ask(self, cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
        """Ask what is struck, and return when it is."""
        return await ask_marked(cluster, load, questions)

    async def _stopped(self, cluster: FaultyCluster, target: str, load: Load, hit: Asked) -> None:
        """Let it be stopped until everybody else has noticed and done without it."""
        cluster.set_down(target)
        if cluster.router_names == [target]:
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
            cluster.send_signal(target, signal.SIGKILL)
            await cluster.killed(target)


async def ask_marked(cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
    """Ask marked requests, one after the other, until one comes to the point that is armed.

    One may not: a node that a busy machine keeps from answering counts as lost for a while, and a mixed node that
    reaches no other keeps what it would have handed over.
    """
    elsewhere = []
    for _ in range(MARKED_MAX):
        hit = load.ask(questions.marked())
        struck = await cluster.struck_unless(hit.task)
        if struck is not None:
            return hit, struck
        elsewhere.append(hit.course)
    raise AssertionError(f"no marked request came to the point; they went {', '.join(elsewhere)}\n{cluster.story()}")


async def nothing_left(cluster: FaultyCluster, outcome: Outcome) -> None:
    """Count what those that live still have of any request, after they have had time to let go."""

    async def forgotten() -> bool:
        return not any(status.answers_unacknowledged for status in (await cluster.statuses()).values())

    try:
        await assert_conserved(cluster, timeout_s=WAIT_S_MAX / 2)
        await wait_for(forgotten, "finished answers to be forgotten", story=cluster.story, timeout_s=WAIT_S_MAX / 2)
    except AssertionError as error:
        left = leftovers(await cluster.statuses())
        outcome.leaked += sum(count for found in left.values() for count in found.values()) or 1
        outcome.problems.append(str(error))


async def settle(cluster: FaultyCluster, questions: Questions, struck: Sequence[str], outcome: Outcome) -> None:
    """All is whole again: everybody is listed and in reach of those that hand over to it, those that were struck serve,
    and nothing is left of any request."""
    for name in cluster.cluster.names:
        if name != DIRECTORY_NAME:
            await cluster.wait_listed(name, True)
    await cluster.wait_in_reach()
    for name in struck:
        await served_by(cluster, questions, name, outcome)
    await nothing_left(cluster, outcome)


async def served_by(cluster: FaultyCluster, questions: Questions, name: str, outcome: Outcome) -> None:
    """Ask until the node of this name has had a part in an answer; every answer must be right. A mixed node must have
    both: it has handed a request over, and one was handed over to it."""
    service = dict(cluster.cluster.spec.processes())[name]
    parts_wanted = 2 if service is Service.MIXED else int(service.has_engine)
    router = name if service is Service.ROUTER else ""
    parts = set[Side]()

    async def holds() -> bool:
        asked = [Asked(cluster.grpc_asker(router), questions.short()) for _ in range(4)]
        await asyncio.gather(*(one.task for one in asked))
        now_s = time.monotonic()
        outcome.count(asked, asked[0], struck_s=now_s)
        for stats in [one.answer.stats for one in asked if one.answer is not None]:
            nodes = {Side.PREFILL: stats.prefill_node, Side.DECODE: stats.decode_node}
            if stats.prefill_node != stats.decode_node:
                parts.update(side for side, node in nodes.items() if node == name)
        return len(parts) >= parts_wanted

    await wait_for(holds, f"{name} to serve again", story=cluster.story, timeout_s=WAIT_S_MAX)


CASES: Final = (
    *(
        SignalCase(blow=blow, side=side, point=point)
        for blow in (Blow.KILL, Blow.STOP)
        for side in (Side.PREFILL, Side.DECODE, Side.ROUTER, Side.DIRECTORY)
        for point in SIGNAL_POINTS
    ),
    *(
        SignalCase(blow=Blow.RESTART, side=side, point=point)
        for side in (Side.PREFILL, Side.DECODE, Side.ROUTER, Side.DIRECTORY)
        for point in (Failpoint.LAYER, Failpoint.COMMIT_SENT)
    ),
    SignalCase(blow=Blow.STOP_KILL, side=Side.PREFILL, point=Failpoint.LAYER),
    SignalCase(blow=Blow.STOP_KILL, side=Side.DECODE, point=Failpoint.DECODING),
    *(
        SignalCase(blow=blow, side=Side.ROUTER, point=point)
        for blow in (Blow.KILL, Blow.STOP, Blow.RESTART)
        for point in END_POINTS
    ),
    SignalCase(blow=Blow.STOP_KILL, side=Side.ROUTER, point=Failpoint.LAYER),
    SignalCase(blow=Blow.STOP_KILL, side=Side.ROUTER, point=Failpoint.DECODING),
    SignalCase(blow=Blow.KILL, side=Side.DECODE, point=Failpoint.FINISHED),
)
ONLY_ROUTER_CASES: Final = (
    *(
        SignalCase(blow=Blow.RESTART, side=Side.ROUTER, point=point, kind="only-")
        for point in (Failpoint.RESERVED, Failpoint.COMMIT_SENT, Failpoint.DECODING, *END_POINTS)
    ),
    SignalCase(blow=Blow.STOP, side=Side.ROUTER, point=Failpoint.DECODING, kind="only-"),
)
"""There is no other router to go to: clients wait until it is back on its port."""
WEB_CASES: Final = (
    *(
        SignalCase(blow=Blow.KILL, side=Side.ROUTER, point=point, kind="web-")
        for point in (Failpoint.RESERVED, Failpoint.COMMIT_SENT, Failpoint.DECODING, Failpoint.FINISHED)
    ),
    SignalCase(blow=Blow.KILL, side=Side.DECODE, point=Failpoint.DECODING, kind="web-"),
)
"""Clients ask over HTTP, and go on by Last-Event-ID."""
WHOLE_CASES: Final = tuple(
    SignalCase(blow=blow, side=side, point=point, kind="whole-")
    for blow in (Blow.KILL, Blow.STOP)
    for side, point in (
        (Side.PREFILL, Failpoint.LAYER),
        (Side.PREFILL, Failpoint.COMMIT_SENT),
        (Side.DECODE, Failpoint.DECODING),
        (Side.DECODE, Failpoint.FINISHED),
    )
)
"""Clients ask over HTTP without streaming, each once."""
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
    SignalCase(blow=Blow.RESTART, side=Side.PREFILL, point=Failpoint.LAYER, kind="mixed-"),
    SignalCase(blow=Blow.STOP_KILL, side=Side.PREFILL, point=Failpoint.LAYER, kind="mixed-"),
    SignalCase(blow=Blow.STOP_KILL, side=Side.DECODE, point=Failpoint.DECODING, kind="mixed-"),
    SignalCase(blow=Blow.KILL, side=Side.ROUTER, point=Failpoint.LAYER, kind="mixed-"),
    SignalCase(blow=Blow.RESTART, side=Side.ROUTER, point=Failpoint.DECODING, kind="mixed-"),
)
KEPT_CASES: Final = tuple(
    SignalCase(blow=blow, side=side, point=Failpoint.DECODING, kind="mixed-kept-")
    for side, blow in (
        (Side.DECODE, Blow.KILL),
        (Side.DECODE, Blow.STOP),
        (Side.DECODE, Blow.RESTART),
        (Side.ROUTER, Blow.KILL),
        (Side.ROUTER, Blow.STOP),
    )
)
"""Of a request that runs on the node that read its prompt."""
