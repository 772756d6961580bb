"""How nodes see the directory: one interface, and the client of the embedded directory."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from batonpb import directory_pb2, directory_pb2_grpc

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.log import get_log
from baton.rpc import Channels, rpc_errors
from baton.wire import NodeRecord, record_from_proto, record_to_proto

log = get_log("directory")

CALL_MS_MAX: Final = 1_000
"""Time limit of one call to the directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All records at one moment, ordered by name.

    `left` has the names that were removed or expired since the watch's last snapshot, as far as the directory
    remembers, and in the first one only those that were removed. This directory has not heard lately from a name that
    is in neither, which may be its own fault.
    """

    records: tuple[NodeRecord, ...]
    left: frozenset[NodeName] = frozenset()


class Directory(Protocol):
    """Who is in the cluster: embedded (`EmbeddedDirectory`) or in Redis (`RedisDirectory`).

    Each call has a time limit and raises BatonError: PEER_UNREACHABLE or DEADLINE if the directory does not answer.
    """

    async def push(self, record: NodeRecord, *, ttl_ms: int) -> None:
        """Register or renew. Also raises NAME_IN_USE, DIRECTORY_FULL, INCARNATION_MISMATCH, or for a bad record."""
        ...

    async def remove(self, name: NodeName, incarnation: Incarnation) -> bool:
        """False if that incarnation does not hold the name."""
        ...

    async def list(self) -> Snapshot: ...

    def watch(self) -> AsyncGenerator[Snapshot, None]:
        """The cluster now, and after each change (some may be merged). Ends by BatonError only; use `aclosing`."""
        ...

    async def close(self) -> None:
        """End its calls and watches first. Idempotent."""
        ...


class EmbeddedDirectory:
    """`Directory` over gRPC, to the process that `baton up` or `baton directory` starts. Does not own `channels`."""

    def __init__(self, endpoint: str, *, channels: Channels, call_ms_max: int = CALL_MS_MAX) -> None:
        """Raises BatonError BAD_ENDPOINT."""
        self._peer = f"The directory at {endpoint}"
        self._stub = directory_pb2_grpc.DirectoryStub(channels.get(endpoint))
        self._timeout_s = call_ms_max / 1e3

    async def push(self, record: NodeRecord, *, ttl_ms: int) -> None:
        request = directory_pb2.PushRequest(record=record_to_proto(record), ttl_ms=ttl_ms)
        with rpc_errors(self._peer):
            await self._stub.Push(request, timeout=self._timeout_s)

    async def remove(self, name: NodeName, incarnation: Incarnation) -> bool:
        request = directory_pb2.RemoveRequest(name=name, incarnation=incarnation)
        with rpc_errors(self._peer):
            reply: directory_pb2.RemoveReply = await self._stub.Remove(request, timeout=self._timeout_s)
        return reply.removed

    async def list(self) -> Snapshot:
        with rpc_errors(self._peer):
            reply: directory_pb2.ListReply = await self._stub.List(directory_pb2.ListRequest(), timeout=self._timeout_s)
        return snapshot_of({record.name: record for record in readable_records(reply.records)})

    async def watch(self) -> AsyncGenerator[Snapshot, None]:
        records: dict[NodeName, NodeRecord] = {}
        call = self._stub.Watch(directory_pb2.WatchRequest())
        try:
            with rpc_errors(self._peer):
                async for event in call:
                    left = apply_event(event, records)
                    yield dataclasses.replace(snapshot_of(records), left=left)
        finally:
            call.cancel()
        raise BatonError(Reason.PEER_UNREACHABLE, f"{self._peer} has ended the watch: it is stopping.")

    async def close(self) -> None:
        """Nothing to do: the channel belongs to `channels`."""


def apply_event(event: directory_pb2.WatchEvent, records: dict[NodeName, NodeRecord]) -> frozenset[NodeName]:
    """Bring `records` up to date. Returns the names that have left."""
    if event.snapshot:
        records.clear()
    left = frozenset(NodeName(removal.name) for removal in event.removals)
    for name in left:
        records.pop(name, None)
    for record in readable_records(event.upserts):
        records[record.name] = record
    return left


def readable_records(messages: Iterable[directory_pb2.NodeRecord]) -> list[NodeRecord]:
    """Without those that this version cannot read."""
    records = []
    for message in messages:
        try:
            records.append(record_from_proto(message))
        except BatonError as error:
            log.warning("record ignored", name=message.name, problem=error.message)
    return records


def snapshot_of(records: dict[NodeName, NodeRecord]) -> Snapshot:
    return Snapshot(records=tuple(records[name] for name in sorted(records)))
