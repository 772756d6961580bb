"""RDMA against the suite of all transports, on a real device: see `transport_suite`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

import pytest

from tests.shm_harness import run
from tests.transport_kits import RDMA_KITS, Kit
from tests.transport_suite import CASES
from tests.transport_suite_more import MORE_CASES


@pytest.mark.parametrize("kit", RDMA_KITS, ids=lambda kit: kit.name)
@pytest.mark.parametrize("case", CASES + MORE_CASES, ids=lambda case: case.__name__)
def test_conformance(case: Callable[[Kit], Coroutine[None, None, None]], kit: Kit) -> None:
    """See the case's own text."""
    run(case(kit))
