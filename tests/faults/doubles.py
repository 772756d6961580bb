"""Two faults: at the same moment, or the second in the attempt that the first one made necessary."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Final

from cli.supervisor import DIRECTORY_NAME
from tests.faults.cluster import TTL_MS, FaultyCluster
from tests.faults.links import GrpcCase, Ill
from tests.faults.load import Load
from tests.faults.outcome import Outcome
from tests.faults.points import Failpoint, Hit, Side
from tests.faults.questions import Questions
from tests.faults.signals import ask_marked, nothing_left, settle

PREFILL: Final = Hit(side=Side.PREFILL, signum=signal.SIGKILL)
DECODE: Final = Hit(side=Side.DECODE, signum=signal.SIGKILL)
ROUTER: Final = Hit(side=Side.ROUTER, signum=signal.SIGKILL)
DIRECTORY: Final = Hit(side=Side.DIRECTORY, signum=signal.SIGKILL)
DIRECTORY_STOPPED: Final = Hit(side=Side.DIRECTORY, signum=signal.SIGSTOP)
PREFILL_STOPPED: Final = Hit(side=Side.PREFILL, signum=signal.SIGSTOP)
DECODE_STOPPED: Final = Hit(side=Side.DECODE, signum=signal.SIGSTOP)


def _words(hits: tuple[Hit, ...]) -> str:
    return "-and-".join(f"{'stop' if hit.signum == signal.SIGSTOP else 'kill'}-{hit.side.value}" for hit in hits)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleCase:
    """One or two blows, the second of them in a later attempt at the same request."""

    point: Failpoint
    hits: tuple[Hit, ...]
    kind: str = ""
    """Begins the name of a case that is not on prefill and decode nodes."""
    then: tuple[Failpoint, Hit] | None = None
    at_once: bool = False
    """Killed processes are started again at once; otherwise when the others have done without them."""

    @property
    def name(self) -> str:
        first = f"{self.kind}{_words(self.hits)}-at-{self.point.value}"
        if self.then is None:
            return first
        point, hit = self.then
        return f"{first}-then-{_words((hit,))}-at-{point.value}"

    async def run(self, cluster: FaultyCluster, questions: Questions) -> Outcome:
        """Raises AssertionError where the case itself could not be played."""
        outcome = Outcome(case=self.name)
        blows, then = [self.hits], None
        if self.then is not None:
            point, second = self.then
            blows.append((second,))
            nth = 1 if point is Failpoint.LAYER else 0  # its prompt is cached by now: there may be only one chunk
            then = await cluster.strike(point=point, nth=nth, mark=questions.mark, hits=(second,))
        killed, stopped = set[str](), set[str]()
        async with Load(cluster.asker, questions) as load:
            await cluster.arm(point=self.point, mark=questions.mark, hits=self.hits, then=then)
            hit, first = await ask_marked(cluster, load, questions)
            began_s = first.at_s
            for number, hits in enumerate(blows):
                struck = await cluster.struck_unless(hit.task, number)
                assert struck is not None, f"the request was over before the second blow: {hit.course}"
                for blow, name in zip(hits, struck.targets, strict=True):
                    if blow.signum == signal.SIGSTOP:
                        cluster.set_down(name)
                        stopped.add(name)
                        continue
                    await cluster.killed(name)
                    killed.add(name)
                    if self.at_once:
                        await cluster.restart(name)
            await hit.task
            await load.finish()
        outcome.count(load.asked, hit, struck_s=began_s, router_struck=any(ROUTER in hits for hits in blows))
        for name in sorted(stopped, key=cluster.cluster.names.index):  # the directory first: it says who is there
            if name == DIRECTORY_NAME:
                await asyncio.sleep(TTL_MS / 1e3)
            else:
                await cluster.wait_listed(name, False)
            cluster.go_on(name)
        if not self.at_once:
            await nothing_left(cluster, outcome)
            for name in sorted(killed, key=cluster.cluster.names.index):  # the directory first: others look for it
                await cluster.restart(name)
        await settle(cluster, questions, sorted(killed | stopped), outcome)
        return outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAndKillCase(GrpcCase):
    """A gRPC link, and a process that is killed at the same moment."""

    killed: Side

    @property
    def also_killed(self) -> tuple[Side, ...]:
        return (self.killed,)

    @property
    def name(self) -> str:
        ends = "-".join(side.value for side in self.ends)
        return f"{self.kind}{self.ill.value}-{ends}-and-kill-{self.killed.value}-at-{self.point.value}"


CASES: Final = (
    DoubleCase(point=Failpoint.LAYER, hits=(PREFILL, DECODE)),
    DoubleCase(point=Failpoint.COMMIT_SENT, hits=(PREFILL, DECODE)),
    DoubleCase(point=Failpoint.DECODING, hits=(DECODE, DIRECTORY)),
    DoubleCase(point=Failpoint.LAYER, hits=(ROUTER, DECODE)),
    DoubleCase(point=Failpoint.LAYER, hits=(PREFILL_STOPPED, DECODE)),
    DoubleCase(point=Failpoint.LAYER, hits=(PREFILL, DECODE_STOPPED)),
    DoubleCase(point=Failpoint.COMMIT_SENT, hits=(PREFILL, DECODE_STOPPED)),
    DoubleCase(point=Failpoint.LAYER, hits=(ROUTER, PREFILL_STOPPED)),
    DoubleCase(point=Failpoint.DECODING, hits=(ROUTER, DECODE_STOPPED)),
    DoubleCase(point=Failpoint.DECODING, hits=(DECODE, DIRECTORY_STOPPED)),
    DoubleCase(point=Failpoint.DECODING, hits=(DECODE,), then=(Failpoint.LAYER, PREFILL)),
    DoubleCase(point=Failpoint.DECODING, hits=(DECODE,), then=(Failpoint.DECODING, DECODE), at_once=True),
    DoubleCase(point=Failpoint.DECODING, hits=(DECODE_STOPPED,), then=(Failpoint.SEALED, PREFILL)),
    DoubleCase(point=Failpoint.DECODING, hits=(ROUTER, DECODE)),
    DoubleCase(point=Failpoint.FINISHED, hits=(ROUTER, DECODE)),
    DoubleCase(point=Failpoint.DECODING, hits=(ROUTER, PREFILL)),
    DoubleCase(point=Failpoint.DECODING, hits=(ROUTER, DIRECTORY)),
    DoubleCase(point=Failpoint.DECODING, hits=(ROUTER,), then=(Failpoint.TAKE_OVER, DECODE)),
    DoubleCase(point=Failpoint.DECODING, hits=(ROUTER,), then=(Failpoint.TAKE_OVER, DECODE_STOPPED)),
    *(
        DoubleCase(point=Failpoint.DECODING, hits=(ROUTER,), then=(point, ROUTER), at_once=True)
        for point in (Failpoint.ATTACH, Failpoint.TAKE_OVER, Failpoint.TAKEN_OVER)
    ),
)
ONLY_ROUTER_CASES: Final = (
    DoubleCase(kind="only-", point=Failpoint.LAYER, hits=(ROUTER, DECODE), at_once=True),
    DoubleCase(kind="only-", point=Failpoint.DECODING, hits=(ROUTER, DECODE), at_once=True),
    DoubleCase(kind="only-", point=Failpoint.DECODING, hits=(ROUTER,), then=(Failpoint.ATTACH, ROUTER), at_once=True),
)
WEB_CASES: Final = (DoubleCase(kind="web-", point=Failpoint.DECODING, hits=(ROUTER, DECODE)),)
MIXED_CASES: Final = (
    DoubleCase(kind="mixed-", point=Failpoint.LAYER, hits=(PREFILL, DECODE)),
    DoubleCase(kind="mixed-", point=Failpoint.COMMIT_SENT, hits=(PREFILL, DECODE_STOPPED)),
)
LINK_CASES: Final = (
    LinkAndKillCase(ends=(Side.ROUTER, Side.DECODE), ill=Ill.DARK, point=Failpoint.LAYER, killed=Side.PREFILL),
    LinkAndKillCase(ends=(Side.PREFILL, Side.DECODE), ill=Ill.CUT, point=Failpoint.COMMIT_SENT, killed=Side.DIRECTORY),
)
_ROUTER_DECODE: Final = (Side.ROUTER, Side.DECODE)
_ROUTER_PREFILL: Final = (Side.ROUTER, Side.PREFILL)
_PREFILL_DECODE: Final = (Side.PREFILL, Side.DECODE)
MIXED_LINK_CASES: Final = tuple(
    LinkAndKillCase(kind="mixed-", ends=ends, ill=ill, killed=killed, point=point)
    for ends, ill, killed, point in (
        (_ROUTER_DECODE, Ill.DARK, Side.PREFILL, Failpoint.LAYER),
        (_ROUTER_DECODE, Ill.DARK, Side.PREFILL, Failpoint.DECODING),
        (_ROUTER_PREFILL, Ill.DARK, Side.DECODE, Failpoint.LAYER),
        (_PREFILL_DECODE, Ill.DARK, Side.DIRECTORY, Failpoint.LAYER),
        (_PREFILL_DECODE, Ill.CUT, Side.DIRECTORY, Failpoint.COMMIT_SENT),
    )
)
"""With the first three only the third node is left to the router, and it reaches one that the router does not."""
KEPT_LINK_CASES: Final = (
    LinkAndKillCase(
        kind="mixed-kept-", ends=_ROUTER_DECODE, ill=Ill.DARK, killed=Side.DIRECTORY, point=Failpoint.DECODING
    ),
)
