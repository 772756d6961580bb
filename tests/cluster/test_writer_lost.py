"""What a decode node's log says of prefill nodes that are no longer heard of."""

from __future__ import annotations

import asyncio
import logging

import pytest

from baton.ids import Incarnation
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens
from tests.support.inprocess_cluster import inprocess


def test_one_that_has_ended_in_order_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Its books were closed before its call ended. Of one that has them open there is a warning, by its name."""

    async def scene() -> None:
        async with inprocess(mock_spec()) as cluster:
            answer = await cluster.client.generate([5, 6, 7], max_tokens=3)
            assert answer.ids == mock_tokens([5, 6, 7], 3)
            await assert_conserved(cluster)
            receiver = cluster.decode["decode-0"].receiver
            (pair,) = receiver._writers
            with caplog.at_level(logging.INFO):
                caplog.clear()
                receiver.writer_lost(pair._replace(writer=Incarnation(0xABC)))
                receiver.writer_lost(pair)
            reported = [r for r in caplog.records if r.getMessage().startswith("writer ")]
            assert [(r.levelname, r.getMessage(), r.baton_fields["writer"]) for r in reported] == [  # type: ignore[attr-defined]
                ("INFO", "writer gone", "unknown/0000000000000abc"),
                ("WARNING", "writer lost", f"prefill-0/{pair.writer:016x}"),
            ]

    asyncio.run(scene())
