"""A mixed node's record: who it is to those who look for prefill and for decode nodes, and on the wire."""

from __future__ import annotations

import pytest
from batonpb import common_pb2

from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import NodeRecord, Role, record_from_proto, record_to_proto


@pytest.mark.parametrize("role", Role)
def test_the_wire_has_every_role(role: Role) -> None:
    """Same name and number on both sides; a record keeps it."""
    assert common_pb2.Role.Value(f"ROLE_{role.name}") == role
    record = NodeRecord(
        name=NodeName("n"), role=role, incarnation=Incarnation(7), endpoint="h:1", lifecycle=Lifecycle.READY
    )
    assert record_from_proto(record_to_proto(record)) == record


def test_who_serves_what() -> None:
    """A mixed node serves both halves and is no router; everybody else serves its own role only."""
    served = {role: {other for other in Role if role.serves(other)} for role in Role}
    assert served.pop(Role.MIXED) == {Role.MIXED, Role.PREFILL, Role.DECODE}
    assert served == {role: {role} for role in (Role.ROUTER, Role.PREFILL, Role.DECODE)}
