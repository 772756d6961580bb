"""RDMA against the suite of all transports, on a real device: see `transport_suite`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

import pytest

from tests.conformance.transport_kits import RDMA_KITS, Kit
from tests.conformance.transport_suite import (
    CASES,
    a_closed_port_lets_go_of_everything,
    a_killed_writer_is_gone_and_writes_no_more,
    a_stopped_writer_is_fenced_as_its_transport_can,
    an_abandoned_grant_completes_and_others_go_on,
    records_have_landed_when_the_seal_arrives,
)
from tests.conformance.transport_suite_more import (
    MORE_CASES,
    a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence,
)
from tests.support.shm_harness import run

KIT, DEVICE_KIT = RDMA_KITS
DEVICE_CASES = (
    records_have_landed_when_the_seal_arrives,
    a_killed_writer_is_gone_and_writes_no_more,
    a_stopped_writer_is_fenced_as_its_transport_can,
    an_abandoned_grant_completes_and_others_go_on,
    a_closed_port_lets_go_of_everything,
    a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence,
)
"""Here a device's registration, its flush or its late sources decide. The machine is slow: the rest runs against the
double."""


@pytest.mark.parametrize(
    ("kit", "case"),
    [(KIT, case) for case in CASES + MORE_CASES] + [(DEVICE_KIT, case) for case in DEVICE_CASES],
    ids=lambda of: of.name if isinstance(of, Kit) else of.__name__,
)
def test_conformance(kit: Kit, case: Callable[[Kit], Coroutine[None, None, None]]) -> None:
    """See the case's own text."""
    run(case(kit))
