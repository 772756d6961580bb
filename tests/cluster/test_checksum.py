"""A record that is not what was sent: found before its handoff counts, and told; the client notices nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cli.services import Service
from tests.faults.cluster import FaultyCluster, faulty, faulty_spec
from tests.faults.load import Asked, Load
from tests.faults.points import Failpoint
from tests.faults.questions import MockQuestions
from tests.support.cluster_harness import assert_conserved

SHOUT = "CORRUPT RECORDS"


async def flipped(cluster: FaultyCluster) -> Asked:
    """One bit of one record of the marked request flips after it has landed, while eight other requests run."""
    questions = MockQuestions(seed=5)
    async with Load(cluster.asker, questions) as load:
        await cluster.arm(point=Failpoint.LANDED, mark=questions.mark, hits=(), flip=True)
        hit = load.ask(questions.marked())
        await cluster.struck()
        await hit.task
        await load.finish()
    others = [asked for asked in load.asked if asked is not hit]
    assert not [asked for asked in others if asked.failed or asked.wrong]
    assert not hit.failed, hit.error
    await assert_conserved(cluster)
    return hit


async def scene(transport: str, fraction: float) -> None:
    spec = faulty_spec(both={"transports": transport})
    flags = {**spec.flags, Service.PREFILL: {**spec.flags[Service.PREFILL], "writer.checksum_fraction": fraction}}
    async with faulty(replace(spec, flags=flags)) as cluster:
        hit = await flipped(cluster)
        struck = await cluster.struck()
        statuses = await cluster.statuses()
        pairs = [pair for name in ("prefill-0", "prefill-1") for pair in statuses[name].pairs]
        if fraction == 0:
            assert hit.wrong, "the flip had no effect: the other test proves nothing"
            assert sum(pair.handoffs_corrupt + pair.records_checksummed for pair in pairs) == 0
            return
        assert not hit.wrong
        assert hit.answer is not None
        assert hit.answer.stats.resumptions == 1
        assert hit.answer.stats.decode_node != struck.receiver
        assert hit.answer.stats.prefill_node != struck.writer
        assert sum(pair.handoffs_corrupt for pair in pairs) == 1
        counters = {counter.name: counter.value for counter in statuses[struck.receiver].counters}
        assert counters[f"CORRUPT handoffs from {struck.writer} over {transport}"] == 1
        assert counters["records checked"] > 0
        reported = [name for name in cluster.cluster.names if SHOUT in cluster.log_text(name)]
        assert sorted(reported) == sorted((struck.receiver, struck.writer)), reported


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_flipped_bit_is_found_before_the_commit(transport: str) -> None:
    """Every record is compared: the handoff is refused, both nodes say so loudly, the request is resumed on the other
    two nodes, and its client has the right tokens. Nobody else's answer is touched and nothing is left."""
    asyncio.run(scene(transport, 1.0))


@pytest.mark.slow
def test_without_checksums_the_flip_is_a_wrong_answer() -> None:
    """The same with nothing compared: the client is told other tokens, and no node notices."""
    asyncio.run(scene("shm", 0.0))
