"""Every transport against one suite: `transport_suite` tells the situations, `transport_kits` makes the transports."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

import pytest

from kvtransfer.transport import TransportName
from kvtransfer.transports.ucx import installed
from tests.conformance.transport_kits import KITS, UCX_KITS, Kit
from tests.conformance.transport_suite import CASES
from tests.conformance.transport_suite_more import MORE_CASES, TCP_CASES
from tests.support.shm_harness import run

WITHOUT_NIXL = pytest.mark.skipif(not installed(), reason="NIXL is not installed: `make test-ucx` runs these")

HOST_AND_DEVICE_KITS = [
    pytest.param(kit, marks=pytest.mark.slow) if kit.from_device != kit.to_device else pytest.param(kit) for kit in KITS
]
"""A device at one end goes through code that the kit with a device at both ends goes through too."""


@pytest.mark.parametrize(
    "kit",
    [*HOST_AND_DEVICE_KITS, *(pytest.param(kit, marks=WITHOUT_NIXL) for kit in UCX_KITS)],
    ids=lambda kit: kit.name,
)
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Kit], Coroutine[None, None, None]], kit: Kit) -> None:
    """See the case's own text."""
    run(case(kit))


@pytest.mark.parametrize("kit", [kit for kit in KITS if kit.transport is TransportName.TCP], ids=lambda kit: kit.name)
@pytest.mark.parametrize("case", TCP_CASES, ids=lambda case: case.__name__)
def test_conformance_of_tcp(case: Callable[[Kit], Coroutine[None, None, None]], kit: Kit) -> None:
    """See the case's own text."""
    run(case(kit))
