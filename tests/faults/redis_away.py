"""The Redis server that is the cluster's directory is killed, or stopped, and comes back."""

from __future__ import annotations

import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from baton.errors import BatonError, Reason
from tests.faults.cluster import TTL_MS, FaultyCluster, faulty, faulty_spec
from tests.faults.links import Played
from tests.faults.load import Asked
from tests.faults.outcome import Outcome
from tests.faults.points import Failpoint, Side, Struck
from tests.faults.questions import Questions
from tests.support.redis_harness import RedisServer, redis_server


class RedisStage:
    """A cluster whose directory is this server."""

    def __init__(self, cluster: FaultyCluster, redis: RedisServer) -> None:
        self.cluster = cluster
        self.trigger = cluster.trigger
        self.redis = redis
        self.killed = False

    def heal(self) -> None:
        """Back: empty where it was killed."""
        if self.killed:
            self.killed = False
            self.redis.start()
        else:
            self.redis.resume()


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisCase(Played[RedisStage]):
    stop: bool
    point: Failpoint
    killed: Side | None = None
    """A node of the request that is hit, killed at the same moment."""

    @property
    def also_killed(self) -> tuple[Side, ...]:
        return (self.killed,) if self.killed is not None else ()

    @property
    def name(self) -> str:
        also = "".join(f"-and-kill-{side.value}" for side in self.also_killed)
        return f"{'stop' if self.stop else 'kill'}-redis{also}-at-{self.point.value}"

    def strike(self, stage: RedisStage, struck: Struck) -> None:
        if self.stop:
            stage.redis.pause()
        else:
            stage.redis.kill()
            stage.killed = True

    async def meanwhile(self, stage: RedisStage, questions: Questions, outcome: Outcome) -> None:
        """New requests are placed while no record lives any more."""
        until_s = time.monotonic() + 2 * TTL_MS / 1e3
        while time.monotonic() < until_s:
            asked = Asked(stage.cluster.asker(), questions.short())
            await asked.task
            outcome.count([asked], asked, struck_s=time.monotonic())


@asynccontextmanager
async def redis_stage() -> AsyncIterator[RedisStage]:
    """Raises BatonError where Redis is not installed."""
    if shutil.which("redis-server") is None:
        raise BatonError(Reason.BAD_CONFIG, "redis-server is not installed (Debian, Ubuntu: apt-get install it).")
    with redis_server() as redis:
        async with faulty(faulty_spec(redis=redis.url)) as cluster:
            yield RedisStage(cluster, redis)


CASES: Final = (
    *(
        RedisCase(stop=stop, point=point)
        for stop in (False, True)
        for point in (Failpoint.RESERVE_SENT, Failpoint.LAYER, Failpoint.DECODING)
    ),
    RedisCase(stop=False, point=Failpoint.DECODING, killed=Side.DECODE),
    RedisCase(stop=True, point=Failpoint.LAYER, killed=Side.PREFILL),
)
