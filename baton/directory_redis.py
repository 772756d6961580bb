"""The directory in a Redis server: the rules of the embedded one, in a script that Redis runs as one step.

Hints only: Redis may lose everything at any moment, and the next heartbeats fill it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from batonpb import directory_pb2
from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from baton.clock import Clock
from baton.directory import DirectoryLimits, check_push, directory_full, incarnation_gone, name_in_use
from baton.directory_client import Snapshot, apply_event, readable_records, snapshot_of
from baton.endpoint import RedisAddress
from baton.errors import BatonError, Reason, check_positive
from baton.ids import Incarnation, NodeName
from baton.log import get_log
from baton.wire import NodeRecord, record_to_proto

log = get_log("directory")

# The braces keep all keys on one server of a Redis cluster.
KEYS: Final = tuple(
    f"{{baton}}:{what}" for what in ("meta", "records", "expiry", "versions", "left", "ran_out", "gone")
)
_SCRIPT: Final = resources.files("baton").joinpath("directory_redis.lua").read_text(encoding="utf-8")
_Answer = list[Any]
"""Byte strings and lists of them."""
_SEQUENCE_DIGITS: Final = len(str(2**64))
_PASSING: Final = (BusyLoadingError, MasterDownError, OutOfMemoryError, ReadOnlyError)
"""Redis answers, and may recover: it loads its data, has lost its primary, is full, or is a replica."""
_REFUSED: Final = (AuthenticationError, AuthorizationError, NoPermissionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisDirectoryConfig:
    call_ms_max: int = 1_000
    """For one operation, with connecting."""
    watch_interval_ms: int = 100
    """Time between two looks of a watcher. A look without news is one small call. Notifications by Redis (PUBLISH)
    would need the same looks, for expired records and lost messages."""
    connections_max: int = 8
    limits: DirectoryLimits = field(default_factory=DirectoryLimits)
    """Must be the same for all clients of one Redis database."""

    def __post_init__(self) -> None:
        check_positive(self, "call_ms_max", "watch_interval_ms", "connections_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    identity: str
    """Of the running Redis process and its data: if it is another one, records were lost."""
    version: str
    event: directory_pb2.WatchEvent


class RedisDirectory:
    """`Directory` over one Redis database. Lives on one event loop; connects at the first call and again after a loss.

    Each call is tried once; `Membership` decides when to try again. Records expire by Redis's clock.
    """

    def __init__(self, address: RedisAddress, *, clock: Clock, config: RedisDirectoryConfig) -> None:
        self._peer = f"directory at {address}"
        self._clock = clock
        self._config = config
        tls: dict[str, Any] = {"ssl": True, **address.tls_options} if address.tls else {}
        self._redis = Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username,
            password=address.password,
            # `_call` limits the whole call. The library limits each write by asyncio.wait_for, which swallows a
            # cancellation that comes as the write ends (Python 3.11).
            socket_timeout=None,
            socket_connect_timeout=config.call_ms_max / 1e3,
            retry=Retry(NoBackoff(), 0),
            max_connections=config.connections_max,
            protocol=2,
            **tls,
        )
        self._script = self._redis.register_script(_SCRIPT)

    async def push(self, record: NodeRecord, *, ttl_ms: int) -> None:
        await self.push_message(record_to_proto(record), ttl_ms=ttl_ms)

    async def push_message(self, record: directory_pb2.NodeRecord, *, ttl_ms: int) -> None:
        """As `push`, keeping fields of a later version. Does not change `record`."""
        check_push(record, ttl_ms, self._config.limits)
        message = directory_pb2.NodeRecord()
        message.CopyFrom(record)
        message.sequence = 0
        outcome, *details = await self._call(
            "push",
            record.name,
            _hex(record.incarnation),
            f"{record.sequence:0{_SEQUENCE_DIGITS}d}",
            record.endpoint,
            message.SerializeToString(deterministic=True),
            ttl_ms,
        )
        match outcome:
            case b"gone":
                raise incarnation_gone(message)
            case b"full":
                raise directory_full(int(details[0]), ttl_ms)
            case b"held":
                endpoint, incarnation, left_ms = details
                raise name_in_use(record.name, endpoint.decode(errors="replace"), int(incarnation, 16), int(left_ms))

    async def remove(self, name: NodeName, incarnation: Incarnation) -> bool:
        (removed,) = await self._call("remove", name, _hex(incarnation))
        return bool(removed == b"1")

    async def list(self) -> Snapshot:
        changes = await self._changes_since(None)
        return snapshot_of({record.name: record for record in readable_records(changes.event.upserts)})

    async def watch(self) -> AsyncGenerator[Snapshot, None]:
        records: dict[NodeName, NodeRecord] = {}
        seen: _Changes | None = None
        while True:
            changes = await self._changes_since(seen)
            if seen is not None and changes.identity != seen.identity:
                raise BatonError(
                    Reason.PEER_UNREACHABLE,
                    f"The {self._peer} was restarted or emptied: it may know less than it did.",
                )
            if seen is None or changes.version != seen.version:
                left = apply_event(changes.event, records)
                yield dataclasses.replace(snapshot_of(records), left=left)
            seen = changes
            await self._clock.sleep_s(self._config.watch_interval_ms / 1e3)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _changes_since(self, seen: _Changes | None) -> _Changes:
        identity, version, snapshot, left, upserts = await self._call(
            "read", "" if seen is None else seen.identity, "0" if seen is None else seen.version
        )
        event = directory_pb2.WatchEvent(
            snapshot=snapshot == b"1",
            upserts=_records(upserts),
            removals=[directory_pb2.RemoveRequest(name=name.decode(errors="replace")) for name in left],
        )
        return _Changes(identity=identity.decode(), version=version.decode(), event=event)

    async def _call(self, operation: str, *arguments: str | bytes | int) -> _Answer:
        limits = self._config.limits
        common = (limits.ttl_ms_max, limits.removals_kept_max, limits.gone_kept_max, limits.records_max)
        with self._redis_errors():
            async with asyncio.timeout(self._config.call_ms_max / 1e3):
                answer: _Answer = await self._script(keys=KEYS, args=(operation, *common, *arguments))
        return answer

    @contextmanager
    def _redis_errors(self) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, RedisTimeoutError) as error:
            raise BatonError(
                Reason.DEADLINE, f"The {self._peer} did not answer within {self._config.call_ms_max} ms."
            ) from error
        except _REFUSED as error:
            raise self._not_let_in(error) from error
        except _PASSING as error:
            raise BatonError(Reason.PEER_UNREACHABLE, f"The {self._peer} cannot answer now: {error}.") from error
        except ResponseError as error:
            if "unauthenticated" in str(error):  # a call of more than ten parts before a password
                raise self._not_let_in(error) from error
            raise BatonError(
                Reason.BAD_CONFIG,
                f"The {self._peer} refuses: {error}. Baton needs Redis 5 or later and the keys {{baton}}:* for itself; "
                "name a database of its own, as in redis://host:port/1.",
                field="directory",
            ) from error
        except (RedisError, OSError) as error:
            raise BatonError(Reason.PEER_UNREACHABLE, f"The {self._peer} cannot be reached: {_why(error)}.") from error

    def _not_let_in(self, error: RedisError) -> BatonError:
        return BatonError(
            Reason.BAD_CONFIG,
            f"The {self._peer} does not let us in: {error}. Check the user name and password in its address.",
            field="directory",
        )


def _records(flat: Sequence[bytes]) -> list[directory_pb2.NodeRecord]:
    """Those of name, value, name, value, ... that the script has written."""
    records = []
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        header, _, body = value.partition(b"\n")
        try:
            _, sequence, _ = header.split(b" ")
            record = directory_pb2.NodeRecord.FromString(body)
            if record.name.encode() != name:
                raise ValueError(f"it is the record of {record.name!r}")
            record.sequence = int(sequence)
        except (ValueError, DecodeError) as error:
            log.warning("no record of ours in Redis, ignored", name=name.decode(errors="replace"), problem=str(error))
        else:
            records.append(record)
    return records


def _hex(incarnation: int) -> str:
    return f"{incarnation:016x}"


def _why(error: Exception) -> str:
    """Why a connection failed. The library hides the system's error behind its own."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(cause, socket.gaierror):
        return "its host's name is not known"
    return str(error).rstrip(".")
