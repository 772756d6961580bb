"""The soak, for as long as a test may take. `make soak` is the long one."""

from __future__ import annotations

import pytest

from tests.soak.run import soak

SECONDS = 25.0


@pytest.mark.slow
def test_garbage_on_every_port_disturbs_nobody() -> None:
    """Random bytes, cut calls, valid ones with random fields, half-open connections and bursts, on the public, admin,
    metrics, node, directory and data ports: twenty streams get exactly their tokens, and no process grows or fills its
    log."""
    _, soaked = soak(seconds=SECONDS, seed=7)
    assert sum(soaked.thrown.values()) > 500, soaked.table()
    soaked.check()
