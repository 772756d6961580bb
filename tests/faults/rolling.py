"""Every process of a cluster is ended and started again, one after the other, under streams and new requests."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from cli.supervisor import DIRECTORY_NAME
from tests.faults.cluster import FaultyCluster, faulty, faulty_spec
from tests.faults.load import Load
from tests.faults.outcome import Outcome
from tests.faults.questions import MockQuestions, Questions
from tests.faults.signals import settle

STREAMS: Final = 10
"""At a time over gRPC; as many over HTTP."""
IMPATIENT: Final = {"lame_duck_ms": 300, "drain_ms_max": 200, "stop_grace_ms": 100}
"""A router ends in the middle of answers, which go on at the other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingCase:
    """SIGTERM to each process, which drains; the next one when everybody has its successor."""

    name: str = "rolling-restart"

    async def run(self, cluster: FaultyCluster, questions: Questions) -> Outcome:
        """Raises AssertionError where the case itself could not be played."""
        outcome = Outcome(case=self.name)
        began_s = time.monotonic()
        async with (
            Load(cluster.grpc_asker, questions, at_once=STREAMS) as load,
            Load(cluster.web_asker, questions, at_once=STREAMS) as web_load,
        ):
            for name in cluster.cluster.names:
                await self._restart(cluster, name)
            await load.finish()
            await web_load.finish()
        asked = [*load.asked, *web_load.asked]
        outcome.count(asked, asked[0], struck_s=began_s, router_struck=True)
        await settle(cluster, questions, [name for name in cluster.cluster.names if name != DIRECTORY_NAME], outcome)
        return outcome

    async def _restart(self, cluster: FaultyCluster, name: str) -> None:
        cluster.set_down(name)
        cluster.send_signal(name, signal.SIGTERM)
        status = await cluster.wait_exit(name)
        assert status == 0, f"{name} has ended with status {status}\n{cluster.story()}"
        await cluster.restart(name)
        for each in cluster.cluster.names:
            if each != DIRECTORY_NAME:
                await cluster.wait_listed(each, True)
        await cluster.wait_in_reach()


@asynccontextmanager
async def rolling_cluster(*, seed: int) -> AsyncIterator[tuple[FaultyCluster, Questions]]:
    async with faulty(faulty_spec(web=True, router_flags=IMPATIENT), forked=False) as cluster:
        yield cluster, MockQuestions(seed=6 + seed)


CASES: Final = (RollingCase(),)
