"""What only Redis can do to a directory: foreign data, a lost memory, a locked door, silence; and its script's rules
against the pure ones."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batonpb import directory_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from baton.clock import Clock
from baton.directory import DirectoryLimits, DirectoryState
from baton.directory_redis import KEYS, RedisDirectory, RedisDirectoryConfig
from baton.directory_setting import parse_directory
from baton.endpoint import RedisAddress
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.wire import record_from_proto, record_to_proto
from tests.conformance.directory_suite import LONG_MS, error_of, eventually, record, refused, seen, until
from tests.support.redis_harness import RedisServer, redis_server

HANG_S = 60.0
CALL_MS_MAX = 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def admin(server: RedisServer) -> Iterator[Redis]:
    """A connection of our own to an empty server."""
    with Redis(port=server.port) as connection:
        connection.flushall()
        yield connection


@asynccontextmanager
async def opened(address: RedisAddress, **config: object) -> AsyncIterator[RedisDirectory]:
    settings = RedisDirectoryConfig(**{"call_ms_max": CALL_MS_MAX, "watch_interval_ms": 10, **config})  # type: ignore[arg-type]
    directory = RedisDirectory(address, clock=Clock(), config=settings)
    try:
        yield directory
    finally:
        await directory.close()


def run(address: RedisAddress, scene: Callable[[RedisDirectory], Awaitable[None]], **config: object) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S), opened(address, **config) as directory:
            await scene(directory)

    asyncio.run(limited())


def test_an_emptied_redis_takes_nobody_away(server: RedisServer, admin: Redis) -> None:
    """FLUSHALL under a watcher, with nobody and with somebody back since: it is told of a loss, not of departures."""

    async def scene(directory: RedisDirectory) -> None:
        for again in (False, True):
            await directory.push(record(sequence=1), ttl_ms=LONG_MS)
            async with aclosing(directory.watch()) as snapshots:
                assert seen(await anext(snapshots)) == [("decode-0", 1)]
                admin.flushall()
                if again:
                    await directory.push(record("other", incarnation=2), ttl_ms=LONG_MS)
                error = await refused(anext(snapshots))
                assert error.reason is Reason.PEER_UNREACHABLE
                assert "restarted or emptied" in error.message

    run(server.address, scene)


def test_a_clock_that_was_set_back_keeps_nobody(server: RedisServer, admin: Redis) -> None:
    """The server's clock goes an hour back after a node has registered, and another has left, and both processes have
    died: names and incarnations are held for the longest time to live, not for the hour more."""
    _meta, _records, expiry, _versions, _left, _ran_out, gone = KEYS
    ttl_ms_max = 60_000

    def until_ms(key: str) -> dict[bytes, float]:
        found: Any = admin.zrange(key, 0, -1, withscores=True)
        return dict(found)

    async def scene(directory: RedisDirectory) -> None:
        await directory.push(record(), ttl_ms=LONG_MS)
        await directory.remove(NodeName("left"), Incarnation(9))
        for key in (expiry, gone):
            admin.zadd(key, {name: at_ms + 3_600_000 for name, at_ms in until_ms(key).items()})
        error = await refused(directory.push(record(incarnation=2, endpoint="elsewhere:1"), ttl_ms=LONG_MS))
        assert error.reason is Reason.NAME_IN_USE
        assert error.retry_after_ms is not None
        assert error.retry_after_ms <= ttl_ms_max + 1
        seconds, microseconds = admin.time()
        for key in (expiry, gone):
            (at_ms,) = until_ms(key).values()
            assert at_ms <= seconds * 1_000 + microseconds / 1_000 + ttl_ms_max + 1

    run(server.address, scene)


def test_a_restart_between_two_looks_is_noticed(tmp_path: Path) -> None:
    """Redis comes back with an older state, saved on disk, before the watcher looks again: the version alone would
    hide it."""
    with redis_server("--dir", str(tmp_path)) as server, Redis(port=server.port) as admin:

        async def scene(directory: RedisDirectory) -> None:
            await directory.push(record("a", endpoint="h:1"), ttl_ms=LONG_MS)
            admin.save()
            await directory.push(record("b", incarnation=2, endpoint="h:2"), ttl_ms=LONG_MS)
            async with aclosing(directory.watch()) as snapshots:
                assert seen(await anext(snapshots)) == [("a", 1), ("b", 2)]
                server.kill()
                server.start()
                async with opened(server.address) as other:
                    await other.push(record("c", incarnation=3, endpoint="h:3"), ttl_ms=LONG_MS)
                    assert seen(await other.list()) == [("a", 1), ("c", 3)]
                assert (await refused(anext(snapshots))).reason is Reason.PEER_UNREACHABLE

        run(server.address, scene)


def test_foreign_values_are_left_out_and_told_of(
    server: RedisServer, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody wrote into our hash: no text, no record, another node's record, a number too large. The real record is
    listed and watched, the others get a log line, and a node whose entry was spoilt just registers again."""
    _meta, records, expiry, versions, *_ = KEYS
    other = record_to_proto(record("other", incarnation=5, endpoint="h:5")).SerializeToString()
    header = b"%016x %020d h:1\n"
    spoilt = {
        "binary": b"\xff\x00\n\x00",
        "nothing": b"",
        "broken": header % (1, 1) + b"\xff\xff\xff",
        "misplaced": header % (5, 1) + other,
        "huge": header % (1, 2**70) + record_to_proto(record("huge")).SerializeToString(),
    }

    async def scene(directory: RedisDirectory) -> None:
        await directory.push(record("real", incarnation=9, endpoint="h:9"), ttl_ms=LONG_MS)
        for name, value in spoilt.items():
            await directory.push(record(name, incarnation=1 + len(name), endpoint="h:1"), ttl_ms=LONG_MS)
            admin.hset(records, name, value)
        admin.hset(records, "unlisted", b"x")
        admin.zadd(versions, {b"valueless": 3, b"\xfe": 4})
        admin.zadd(expiry, {b"\xfe": 0})
        with caplog.at_level(logging.WARNING):
            assert seen(await directory.list()) == [("real", 9)]
        assert {each.baton_fields["name"] for each in caplog.records} == set(spoilt)  # type: ignore[attr-defined]
        async with aclosing(directory.watch()) as snapshots:
            assert seen(await anext(snapshots)) == [("real", 9)]
            await directory.push(record("binary", incarnation=77, endpoint="h:77"), ttl_ms=LONG_MS)
            await until(snapshots, lambda snapshot: seen(snapshot) == [("binary", 77), ("real", 9)])

    run(server.address, scene)


def test_keys_of_another_program_are_not_touched(server: RedisServer, admin: Redis) -> None:
    """A key of ours has a type that we never use, from the start or suddenly: the call says so and what to do."""

    async def scene(directory: RedisDirectory) -> None:
        for _ in range(2):
            admin.set(KEYS[1], "theirs")
            error = await refused(directory.push(record(), ttl_ms=LONG_MS))
            assert error.reason is Reason.BAD_CONFIG
            assert "WRONGTYPE" in error.message
            assert "a database of its own" in error.message
            assert admin.get(KEYS[1]) == b"theirs"
            admin.delete(KEYS[1])
            await directory.push(record(sequence=2), ttl_ms=LONG_MS)
            admin.delete(KEYS[1])

    run(server.address, scene)


@pytest.mark.parametrize("spoilt", [{"version": "x"}, {"complete_since": "1.5"}, {"epoch": None}])
def test_spoilt_books_are_begun_anew(server: RedisServer, admin: Redis, spoilt: dict[str, str | None]) -> None:
    """Somebody damaged what the directory counts by: a watcher is told of a loss, and the next pushes work."""

    async def scene(directory: RedisDirectory) -> None:
        await directory.push(record(), ttl_ms=LONG_MS)
        async with aclosing(directory.watch()) as snapshots:
            assert seen(await anext(snapshots)) == [("decode-0", 1)]
            for field, value in spoilt.items():
                if value is None:
                    admin.hdel(KEYS[0], field)
                else:
                    admin.hset(KEYS[0], field, value)
            assert (await refused(anext(snapshots))).reason is Reason.PEER_UNREACHABLE
        assert seen(await directory.list()) == []
        await directory.push(record(), ttl_ms=LONG_MS)
        assert seen(await directory.list()) == [("decode-0", 1)]

    run(server.address, scene)


def test_nothing_outlives_the_cluster(server: RedisServer, admin: Redis) -> None:
    """Every key that pushes, replacements, removals and records that run out leave behind has a time to live."""

    async def scene(directory: RedisDirectory) -> None:
        await directory.push(record("c", incarnation=4, endpoint="h:4"), ttl_ms=200)
        async with aclosing(directory.watch()) as snapshots:
            await until(snapshots, lambda snapshot: not snapshot.records)
        for key in KEYS:
            assert not admin.exists(key) or 0 < int(admin.pttl(key)) <= 3 * LONG_MS, key
        await directory.push(record(incarnation=1), ttl_ms=LONG_MS)
        await directory.push(record(incarnation=2), ttl_ms=LONG_MS)
        await directory.push(record("b", incarnation=3, endpoint="h:3"), ttl_ms=LONG_MS)
        await directory.remove(NodeName("b"), Incarnation(3))
        keys = admin.keys("*")
        assert isinstance(keys, list)
        assert sorted(keys) == sorted(key.encode() for key in KEYS)
        for key in KEYS:
            assert 2 * LONG_MS < int(admin.pttl(key)) <= 3 * LONG_MS

    run(server.address, scene)


def test_a_redis_that_says_nothing(server: RedisServer, admin: Redis) -> None:
    """It is held for a while: a call ends by its deadline, a cancelled one at once; afterwards the same client gets the
    right answers to its questions, not those to the abandoned ones."""

    async def scene(directory: RedisDirectory) -> None:
        await directory.push(record(), ttl_ms=LONG_MS)
        server.pause()
        assert (await refused(directory.list())).reason is Reason.DEADLINE
        abandoned = asyncio.create_task(directory.remove(NodeName("decode-0"), Incarnation(99)))
        await asyncio.sleep(0)
        abandoned.cancel()
        with pytest.raises(asyncio.CancelledError):
            await abandoned
        server.resume()
        assert seen(await eventually(directory.list)) == [("decode-0", 1)]
        assert await directory.remove(NodeName("decode-0"), Incarnation(1))
        assert seen(await directory.list()) == []

    run(server.address, scene, call_ms_max=1_000)


def test_a_cancellation_is_never_lost(server: RedisServer, admin: Redis) -> None:
    """Calls on new and on used connections, cancelled after every number of turns of the loop that they may take: each
    ends cancelled unless it was done already, and the next one gets its own answer."""

    async def scene(directory: RedisDirectory) -> None:
        await directory.push(record(), ttl_ms=LONG_MS)
        for turns in [*range(40)] * 5:
            async with opened(server.address) as other:
                for client in (directory, other):
                    call = asyncio.create_task(client.list())
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    if call.cancel():
                        await asyncio.wait([call])
                        assert call.cancelled(), turns
                    assert not await client.remove(NodeName("decode-0"), Incarnation(99))
        assert seen(await directory.list()) == [("decode-0", 1)]

    run(server.address, scene)


def test_a_password(server: RedisServer) -> None:
    """Without it, and with a wrong one, the error says what to check and shows no password; with it, all is well."""
    with redis_server("--requirepass", "let me/in") as locked:

        async def scene() -> None:
            for userinfo, works in (("", False), (":wrongword@", False), (":let%20me%2Fin@", True)):
                address = parse_directory(f"redis://{userinfo}127.0.0.1:{locked.port}/0")
                assert isinstance(address, RedisAddress)
                async with opened(address) as directory:
                    if works:
                        await directory.push(record(), ttl_ms=LONG_MS)
                        assert seen(await directory.list()) == [("decode-0", 1)]
                        continue
                    error = await refused(directory.push(record(), ttl_ms=LONG_MS))
                    assert error.reason is Reason.BAD_CONFIG
                    assert "does not let us in" in error.message
                    assert "wrongword" not in error.message

        asyncio.run(scene())


def test_tls(tmp_path: Path) -> None:
    """A server that speaks TLS only: trusted by its own certificate it works; otherwise it is out of reach."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian, Ubuntu: apt-get install openssl)")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=baton test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    options = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with redis_server(*options, tls=True) as locked:

        async def scene() -> None:
            base = f"127.0.0.1:{locked.port}/0"
            for setting, works in (
                (f"rediss://{base}?ssl_ca_certs={certificate}", True),
                (f"rediss://{base}", False),
                (f"redis://{base}", False),
            ):
                address = parse_directory(setting)
                assert isinstance(address, RedisAddress)
                async with opened(address) as directory:
                    if works:
                        await directory.push(record(), ttl_ms=LONG_MS)
                        assert seen(await directory.list()) == [("decode-0", 1)]
                    else:
                        assert (await refused(directory.list())).reason is Reason.PEER_UNREACHABLE

        asyncio.run(scene())


def test_an_account_that_may_not_ask_for_server_information(server: RedisServer, admin: Redis) -> None:
    """Managed servers forbid INFO to clients: the directory works without it. One that may not run scripts is told."""
    admin.acl_setuser("plain", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-info"])
    admin.acl_setuser("mute", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-@scripting"])

    async def scene() -> None:
        plain, mute = (replace(server.address, username=name, password="pw") for name in ("plain", "mute"))
        async with opened(plain) as directory, aclosing(directory.watch()) as snapshots:
            assert seen(await anext(snapshots)) == []
            await directory.push(record(), ttl_ms=LONG_MS)
            assert seen(await anext(snapshots)) == [("decode-0", 1)]
        async with opened(mute) as directory:
            assert (await refused(directory.list())).reason is Reason.BAD_CONFIG

    asyncio.run(scene())


STEP = st.tuples(
    st.sampled_from(["push", "push", "remove", "look", "flush"]),
    st.integers(0, 3),  # name
    st.integers(1, 3),  # incarnation
    st.integers(1, 6),  # sequence, free blocks
)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=40), kept_max=st.integers(1, 3))
def test_the_script_keeps_the_pure_rules(
    server: RedisServer, admin: Redis, steps: list[tuple[str, int, int, int]], kept_max: int
) -> None:
    """The same pushes and removals to Redis and to the pure state: the same answers, records and departures told."""
    limits = DirectoryLimits(records_max=3, removals_kept_max=kept_max, gone_kept_max=kept_max)

    async def scene(directory: RedisDirectory) -> None:
        state = DirectoryState(limits=limits)
        version: int | None = None
        looked = None
        for action, name, incarnation, number in steps:
            pushed = record(
                f"n{name}", incarnation=10 * name + incarnation, endpoint=f"h:{incarnation // 2 + 1}",
                sequence=number, free=number // 2,
            )  # fmt: skip
            message = record_to_proto(pushed)
            if action == "push":
                error = await error_of(directory.push(pushed, ttl_ms=LONG_MS))
                assert (error and error.reason) == pure_outcome(state, message)
            elif action == "remove":
                theirs = state.remove(name=pushed.name, incarnation=pushed.incarnation, now_s=0.0)
                assert await directory.remove(pushed.name, pushed.incarnation) is theirs
            elif action == "look":
                looked = await directory._changes_since(looked)
                changes = state.changes_since(version, now_s=0.0)
                version = state.version
                assert {each.name for each in looked.event.removals} == {each.name for each in changes.removals}
                assert looked.event.snapshot == changes.snapshot
                assert {each.name: each for each in looked.event.upserts} == {
                    each.name: each for each in changes.upserts
                }
            else:
                admin.flushall()
                state, version, looked = DirectoryState(limits=limits), None, None
            records = tuple(record_from_proto(each) for each in state.list(now_s=0.0))
            assert (await directory.list()).records == records

    admin.flushall()
    run(server.address, scene, limits=limits)


def pure_outcome(state: DirectoryState, message: directory_pb2.NodeRecord) -> Reason | None:
    try:
        state.push(message, ttl_ms=LONG_MS, now_s=0.0)
    except BatonError as error:
        return error.reason
    return None
