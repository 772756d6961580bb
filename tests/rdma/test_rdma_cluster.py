"""A whole cluster on the mock engine whose handoffs go over rdma alone: exact tokens, counted by the device itself."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from pathlib import Path

from kvtransfer.transports.rdma_ports import counters_of, find_ports
from tests.rdma.device_link import ADD_LINK, REMOVE_LINK, note_packets
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt, running, wait_for

PATIENT = {
    "liveness.answer_ms_max": 20_000,
    "liveness.reconnect_ms_max": 10_000,
    "membership.ttl_ms": 30_000,
    "rdma.ack_timeout_code": 16,
}
"""The machine is slow: it may be emulated, with as many processes as cores."""
START_MS_MAX = 180_000
BLOCK = 16
LENGTHS = [BLOCK - 1, BLOCK, 5 * BLOCK, 513, 1999]


def test_answers_over_rdma_are_exact() -> None:
    """Prompts around block and chunk boundaries, at once: every token is the reference's, every block went over rdma
    or was there, and the device has sent as many packets as the bytes need."""
    rng = random.Random(21)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    port = find_ports()[0]
    spec = mock_spec(blocks=300, both={"transports": "rdma", **PATIENT})
    with running(replace(spec, start_ms_max=START_MS_MAX)) as cluster:
        before = counters_of(port.device, port.number)["sent_pkts"]

        async def ask(prompt: list[int]) -> int:
            answer = await cluster.client.generate(prompt, max_tokens=9)
            assert answer.ids == mock_tokens(prompt, 9)
            assert answer.stats.transport == "rdma"
            assert answer.stats.blocks_written + answer.stats.blocks_skipped == -(-len(prompt) // BLOCK)
            return int(answer.stats.bytes_written)

        async def ask_all() -> int:
            return sum(await asyncio.gather(*map(ask, prompts)))

        moved = cluster.run(ask_all())
        sent = counters_of(port.device, port.number)["sent_pkts"] - before
        if report := os.environ.get("BATON_RDMA_BYTES"):
            Path(report).write_text(f"{moved} {sent}\n")
        print(f"handed over {moved:,} bytes; the device counts {sent:,} packets of at most 4,096 bytes of data")
        assert moved > 0
        assert sent * 4096 >= moved
        cluster.run(assert_conserved(cluster))


def test_the_device_is_taken_away_in_mid_handoff() -> None:
    """Handoffs are being written when the device goes. Every answer is exact all the same, and nothing stays behind,
    though a lease would last ten minutes: what was on its way has been fenced and not waited for."""
    rng = random.Random(22)
    spec = mock_spec(
        blocks=600,
        both={"transports": "rdma,tcp", **PATIENT},
        prefill_flags={"engine.mock_layer_delay_ms": 100},
        decode_flags={"receiver.lease_ms": 600_000},
    )
    with running(replace(spec, start_ms_max=START_MS_MAX)) as cluster:

        async def ask(length: int) -> str:
            prompt = random_prompt(rng, length)
            answer = await cluster.client.generate(prompt, max_tokens=9)
            assert answer.ids == mock_tokens(prompt, 9)
            return str(answer.stats.transport)

        async def link(command: str) -> None:
            process = await asyncio.create_subprocess_shell(command)
            assert await process.wait() == 0

        async def writes() -> bool:
            return (await cluster.status("prefill-0")).grants_written > 0

        async def scenario() -> None:
            assert await ask(5 * BLOCK) == "rdma"
            calls = [asyncio.create_task(ask(1500 + i)) for i in range(3)]
            await wait_for(writes, "a handoff to be under way")
            note_packets()
            await link(REMOVE_LINK)
            try:
                over = await asyncio.gather(*calls)
                took_s = await assert_conserved(cluster)
            finally:
                await link(ADD_LINK)
            status = await cluster.status("decode-0")
            seen = {c.name.removeprefix("rdma: "): int(c.value) for c in status.counters if c.name.startswith("rdma: ")}
            print(f"over {over}; nothing held {took_s:.1f} s later; {seen}")
            # The pair by which the first answer went, once, by the loss of the device or by the writer's word of it.
            assert (seen["fences_ended"], seen["fences_waiting"], seen["destroy_failed"]) == (1, 0, 0)
            assert seen["devices_lost"] == 1
            await ask(5 * BLOCK)

        cluster.run(scenario())
