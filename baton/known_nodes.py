"""The last known nodes in a small file, for a start while the directory is away. Hints, as all of the directory: a node
that has restarted since refuses what is meant for its predecessor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from batonpb import directory_pb2
from google.protobuf import json_format

from baton.directory_client import readable_records
from baton.log import get_log
from baton.replace_file import replace_file
from baton.wire import NodeRecord, Role, record_to_proto

log = get_log("known nodes")

NODES_MAX: Final = 1_024
"""Further ones are not written."""
BYTES_MAX: Final = 4 << 20
"""A longer file is not read."""


def read_nodes(path: Path) -> tuple[NodeRecord, ...]:
    """Ordered by name. Empty where there is no file, or none that can be read: the log says why. Blocks."""
    try:
        with path.open("rb") as file:
            text = file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:
            raise ValueError(f"it has more than {BYTES_MAX} bytes")
        message = json_format.Parse(text, directory_pb2.ListReply(), ignore_unknown_fields=True)
    except (OSError, ValueError, json_format.ParseError) as error:
        log.warning("no last known nodes", file=path, problem=str(error))
        return ()
    return tuple(sorted(readable_records(message.records), key=lambda record: record.name))


def write_nodes(path: Path, records: Sequence[NodeRecord]) -> None:
    """All or nothing: who reads it meanwhile gets the former ones. Blocks. Raises OSError."""
    message = directory_pb2.ListReply(records=[record_to_proto(record) for record in records[:NODES_MAX]])
    replace_file(path, json_format.MessageToJson(message).encode(), mode=0o600)


class KnownNodes:
    """Keeps the file of one process in step with the directory. One event loop. Without a path it knows nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written: object = ()
        self._wanted: Sequence[NodeRecord] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._failed = False

    def read(self) -> tuple[NodeRecord, ...]:
        """At the start. Blocks."""
        return read_nodes(self._path) if self._path is not None else ()

    def follow(self, records: Sequence[NodeRecord]) -> None:
        """What the directory has now. It is written if other nodes are there than before, or in another state; with
        none at all, what was known stays: a directory that came back empty knows them again in a moment."""
        nodes = [record for record in records if record.role is not Role.ROUTER]
        there = [(node.name, node.role, node.incarnation, node.endpoint, node.lifecycle) for node in nodes]
        if self._path is None or not there or there == self._written:
            return
        self._written, self._wanted = there, nodes
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(self._path), name="known nodes")

    async def close(self) -> None:
        """Write what is to be written. Idempotent."""
        if self._writing is not None:
            await self._writing

    async def _write(self, path: Path) -> None:
        while self._wanted is not None:
            records, self._wanted = self._wanted, None
            try:
                await asyncio.to_thread(write_nodes, path, records)
                self._failed = False
            except OSError as error:
                if not self._failed:
                    log.warning("the last known nodes cannot be written", file=path, problem=str(error))
                self._failed = True
