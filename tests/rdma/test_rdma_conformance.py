"""RDMA against the suite of all transports, on a real device: see `transport_suite`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

import pytest

from tests.conformance.transport_kits import RDMA_KITS, Kit
from tests.conformance.transport_suite import CASES
from tests.conformance.transport_suite_more import (
    MORE_CASES,
    a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence,
)
from tests.support.shm_harness import run

GIVEN_UP = a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence
KIT, DEVICE_KIT = RDMA_KITS


@pytest.mark.parametrize(
    ("kit", "case"),
    [(KIT, case) for case in CASES + MORE_CASES] + [(DEVICE_KIT, case) for case in (*CASES, GIVEN_UP)],
    ids=lambda of: of.name if isinstance(of, Kit) else of.__name__,
)
def test_conformance(kit: Kit, case: Callable[[Kit], Coroutine[None, None, None]]) -> None:
    """See the case's own text. From device to device, where the machine is slow, the rest runs against the double."""
    run(case(kit))
