"""The last known nodes in a file."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton import known_nodes
from baton.ids import Incarnation, NodeName
from baton.known_nodes import KnownNodes, read_nodes, write_nodes
from baton.lifecycle import Lifecycle
from baton.wire import NodeLoad, NodeRecord, Role
from tests.support.membership_doubles import HANG_S
from tests.support.router_records import MODEL


def record(number: int, role: Role = Role.DECODE) -> NodeRecord:
    return NodeRecord(
        name=NodeName(f"node-{number}"),
        role=role,
        incarnation=Incarnation((1 << 63) + number),
        endpoint=f"127.0.0.1:{7000 + number}",
        lifecycle=Lifecycle.READY,
        model=None if role is Role.ROUTER else MODEL,
        transports=("tcp",),
        sequence=number,
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """All of it; and nothing is left beside the file."""
    path = tmp_path / "nodes"
    nodes = (record(1), record(2, Role.MIXED))
    write_nodes(path, nodes[:1])
    write_nodes(path, nodes[::-1])
    assert read_nodes(path) == nodes
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "No such file"), (b"", ""), (b'{"records": 5}', "records"), (b"\xff", ""), (b" " * 101, "more than 100")],
)
def test_a_file_that_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
    problem: str,
) -> None:
    """It is as if nothing were known, and the log says why."""
    monkeypatch.setattr(known_nodes, "BYTES_MAX", 100)
    path = tmp_path / "nodes"
    if content is not None:
        path.write_bytes(content)
    assert read_nodes(path) == ()
    (line,) = caplog.records
    assert problem in line.baton_fields["problem"]  # type: ignore[attr-defined]


def test_only_other_nodes_are_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their load is not, nor is a router; and an empty directory does not make them forgotten. What comes while the
    file is being written is written behind it, the newest only."""
    written: list[list[str]] = []
    may_write = threading.Event()

    def write(path: Path, records: Sequence[NodeRecord]) -> None:
        may_write.wait(HANG_S)
        written.append([f"{each.name} {each.lifecycle.name}" for each in records])

    async def scene() -> None:
        known = KnownNodes(tmp_path / "nodes")
        first = record(1)
        known.follow([first, record(9, Role.ROUTER)])
        await asyncio.sleep(0)
        known.follow([dataclasses.replace(first, lifecycle=Lifecycle.CORDONED)])
        known.follow([dataclasses.replace(first, lifecycle=Lifecycle.DRAINING)])
        may_write.set()
        await known.close()
        known.follow([dataclasses.replace(first, lifecycle=Lifecycle.DRAINING, load=NodeLoad(running_requests=3))])
        known.follow([record(9, Role.ROUTER)])
        await known.close()
        assert written == [["node-1 READY"], ["node-1 DRAINING"]]

    monkeypatch.setattr(known_nodes, "write_nodes", write)
    asyncio.run(scene())


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once, and the process goes on."""

    async def scene() -> None:
        known = KnownNodes(tmp_path / "none" / "nodes")
        for number in (1, 2):
            known.follow([record(number)])
            await known.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scene())
    assert [line.getMessage() for line in caplog.records] == ["the last known nodes cannot be written"]
