"""Requests that a mixed node keeps stand back too for those that have lost their node in the middle of their answer."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from baton.errors import Reason
from baton.ids import ReserveNumber
from tests.cluster.test_mixed_protocol import cancel, directly, key
from tests.support.cluster_harness import assert_conserved, error_of, mock_spec, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.unit.decode_node.test_resumed_first import LONG, Asker, id_of

BLOCKS: Final = 40
LEASE = {"receiver.lease_ms": 600_000}
LOST: Final = id_of(2)
"""Asks the mixed node in its second attempt, by another prefill node, and in its third by the node itself."""


async def waited_for(cluster: InProcessCluster) -> None:
    """The mixed node has refused a resumed request of 20 blocks, and since then all of its blocks are free."""
    decode = cluster.decode["mixed-0"]
    asker = Asker(decode)
    assert asker.ask(1, id_of(1), blocks=35).HasField("granted")
    assert asker.ask(2, LOST, blocks=20, output=5).HasField("busy")
    await decode.receiver.release(asker.pair, ReserveNumber(1), ReserveNumber(3), in_doubt=False)
    await until(cluster, "the room to come", lambda: decode.requests == 0 and decode.ledger.available == BLOCKS)


async def resumed(cluster: InProcessCluster, rng: random.Random) -> int:
    return await directly(cluster, "mixed-0", key(LOST, 3), random_prompt(rng, 80), 12, [], output=[7] * 5)


def test_a_new_request_waits_in_the_queue_until_the_resumed_one_is_kept() -> None:
    """It would fit, and nobody else is there to run it. It runs when the node has kept the resumed one."""

    async def scenario() -> None:
        rng = random.Random(31)
        spec = mock_spec(prefill=0, decode=0, mixed=1, blocks=BLOCKS, mixed_flags={**LONG, **LEASE})
        async with inprocess(spec) as cluster:
            prefill, decode = cluster.prefill["mixed-0"], cluster.decode["mixed-0"]
            await waited_for(cluster)
            new = asyncio.create_task(directly(cluster, "mixed-0", key("new"), random_prompt(rng, 40), 4, []))
            await until(cluster, "the new request to come", lambda: prefill.requests == 1)
            prefill.look_again()
            assert (prefill.load().waiting_requests, decode.requests) == (1, 0)
            own = cluster.runtimes["mixed-0"].incarnation
            assert await resumed(cluster, rng) == own
            assert await new == own
            assert await cancel(cluster, "mixed-0", key(LOST, 3)) and await cancel(cluster, "mixed-0", key("new"))
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_new_request_does_not_fall_back_on_room_that_is_kept() -> None:
    """The only decode node is full, and the mixed node then runs what is asked of it: not a new request, as long as a
    resumed one waits for its room. When that has it, the full node, which was asked for it too, does not wait for it.
    """

    async def scenario() -> None:
        rng = random.Random(32)
        mixed = {**LONG, **LEASE, "handoff_tokens_min": 0, "local_fallback": "full"}
        spec = mock_spec(prefill=0, decode=1, mixed=1, blocks=BLOCKS, mixed_flags=mixed, decode_flags={**LONG, **LEASE})
        async with inprocess(spec) as cluster:
            await waited_for(cluster)
            full = cluster.decode["decode-0"]
            asker = Asker(full)
            assert asker.ask(1, id_of(1), blocks=38).HasField("granted")
            refused = await error_of(directly(cluster, "mixed-0", key("new"), random_prompt(rng, 80), 4, []))
            assert refused.reason is Reason.DECODE_FULL
            own = cluster.runtimes["mixed-0"].incarnation
            assert await resumed(cluster, rng) == own
            await until(cluster, "the full node to be told", lambda: not full.reserving.yields(resumed=False))
            assert await directly(cluster, "mixed-0", key("new", 1), random_prompt(rng, 80), 4, []) == own
            assert await cancel(cluster, "mixed-0", key(LOST, 3)) and await cancel(cluster, "mixed-0", key("new", 1))
            await full.receiver.release(asker.pair, ReserveNumber(1), ReserveNumber(2), in_doubt=False)
            await assert_conserved(cluster)

    asyncio.run(scenario())
