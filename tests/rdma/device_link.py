"""The device of these tests, taken away and put back."""

from __future__ import annotations

import os
from pathlib import Path

from kvtransfer.transports.rdma_ports import counters_of, find_ports

ADD_LINK = os.environ.get("BATON_RDMA_TEST_ADD", "rdma link add rxe0 type rxe netdev dummy0")
REMOVE_LINK = os.environ.get("BATON_RDMA_TEST_REMOVE", "rdma link delete rxe0")


def note_packets() -> None:
    """For the report, before the device is taken away: its counters go with it."""
    if report := os.environ.get("BATON_RDMA_PACKETS"):
        port = find_ports()[0]
        file = Path(report)
        file.write_text(str(int(file.read_text()) + counters_of(port.device, port.number)["sent_pkts"]))
