"""The pins of several routers on the same nodes: leases, names that two routers use, and calls that make no sense."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import grpc.aio
import pytest
from batonpb import common_pb2, pins_pb2, pins_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Code, InvalidField, Reason
from baton.ids import Incarnation
from baton.rpc import ChannelLimits, Channels, rpc_errors
from baton.wire import NodeRecord
from router.config import PinKeeperConfig, PinnedPrefix
from router.pins import PinKeeper
from tests.support.cluster_harness import CALL_S_MAX, assert_conserved, error_of, mock_spec, random_prompt, wait_for
from tests.support.inprocess_cluster import InProcessCluster, inprocess
from tests.support.operators import as_operator

SIZE = 16
NODES = ("decode-0", "prefill-0")
A, B = random_prompt(random.Random(1), 2 * SIZE), random_prompt(random.Random(2), 3 * SIZE)


class SetClock(Clock):
    """The machine's clock, but the wall clock of a router whose machine is off by a constant."""

    def __init__(self, off_s: float) -> None:
        self._off_s = off_s

    def wall_s(self) -> float:
        return super().wall_s() + self._off_s


class Routers:
    """Pin keepers of routers that are not there otherwise, towards the nodes of a cluster."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster
        self._channels = Channels(limits=ChannelLimits())
        self._running: list[asyncio.Task[None]] = []
        self.warmed: list[tuple[tuple[int, ...], str | None]] = []

    def keeper(self, incarnation: int, *, off_s: float = 0.0, nodes: Sequence[str] = NODES, **config: Any) -> PinKeeper:
        return PinKeeper(
            config=PinKeeperConfig(**config),
            incarnation=Incarnation(incarnation),
            nodes=lambda: [self.record(name) for name in nodes],
            channels=self._channels,
            clock=SetClock(off_s),
            warm=self._warm,
        )

    def record(self, name: str) -> NodeRecord:
        return self._cluster.runtimes[name].record()

    async def _warm(self, tokens: Sequence[int], salt: str | None) -> None:
        self.warmed.append((tuple(tokens), salt))
        if len(self.warmed) == 1:
            raise BatonError(Reason.DECODE_FULL, "No room at the first try.")

    def run(self, keeper: PinKeeper) -> None:
        self._running.append(asyncio.create_task(keeper.run()))

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await self._channels.close()

    async def here(self) -> dict[str, list[tuple[str, int]]]:
        """By node: name and blocks of each pin."""
        statuses = await self._cluster.statuses()
        return {name: [(p.name, p.blocks) for p in statuses[name].prefixes.pins] for name in NODES}

    async def until(self, pins: list[tuple[str, int]], what: str) -> None:
        async def holds() -> bool:
            return await self.here() == dict.fromkeys(NODES, pins)

        await wait_for(holds, what)


@asynccontextmanager
async def two_nodes() -> AsyncIterator[tuple[InProcessCluster, Routers]]:
    async with inprocess(mock_spec(blocks=40)) as cluster:
        routers = Routers(cluster)
        try:
            yield cluster, routers
        finally:
            await routers.close()
        await assert_conserved(cluster)


def prefix(name: str, tokens: Sequence[int] = A, **fields: Any) -> PinnedPrefix:
    return PinnedPrefix(name=name, token_ids=tuple(tokens), **fields)


def test_a_router_that_is_gone_leaves_nothing() -> None:
    """Its pins are leases: renewed while it runs, over soon after it has stopped."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            keeper = routers.keeper(1, lease_ms=600)
            await keeper.pin(prefix("a"), A, warm=False)
            renewing = asyncio.create_task(keeper.run())
            statuses = [await routers.here() for _ in range(3)]
            assert statuses == [{name: [("a", 2)] for name in NODES}] * 3

            lefts: list[int] = []

            async def renewed() -> bool:
                """The lease left has grown again, twice."""
                found = await routers._cluster.statuses()
                lefts.append(found["decode-0"].prefixes.pins[0].lease_left_ms)
                return sum(later > sooner for sooner, later in pairwise(lefts)) >= 2

            await wait_for(renewed, "two renewals")
            renewing.cancel()
            await asyncio.wait([renewing])
            await routers.until([], "the lease to end")

    asyncio.run(scenario())


def test_a_pin_with_a_time_ends_by_itself() -> None:
    """On the router and on the nodes, though the router goes on renewing its others."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            keeper = routers.keeper(1, lease_ms=60_000)
            routers.run(keeper)
            await keeper.pin(prefix("a", ttl_ms=300), A, warm=False)
            await keeper.pin(prefix("b", B), B, warm=False)
            await routers.until([("b", 3)], "the first pin to end")
            assert [pin.name for pin in keeper.pins()] == ["b"]

    asyncio.run(scenario())


def test_two_routers_with_the_same_configuration_agree() -> None:
    """The same name and tokens from both: one pin on each node; it stays until both have let go."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            first, second = routers.keeper(1), routers.keeper(2)
            await first.pin(prefix("a"), A, warm=False)
            await second.pin(prefix("a"), A, warm=False)
            assert await routers.here() == {name: [("a", 2)] for name in NODES}
            assert await second.unpin("a")
            assert await routers.here() == {name: [] for name in NODES}
            routers.run(first)
            first.follow_directory()  # it still has it, and leases it again at its next renewal
            await first.pin(prefix("a"), A, warm=False)
            assert await routers.here() == {name: [("a", 2)] for name in NODES}

    asyncio.run(scenario())


@pytest.mark.parametrize("off_s", [3_600.0, 0.0])
def test_the_later_pin_of_a_name_wins(off_s: float) -> None:
    """Another router pins another prefix by the same name: the nodes take the later one, though the first router's
    clock may be an hour ahead, and tell the first router so at its next renewal, which gives its own up."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            first, second = routers.keeper(1, off_s=off_s), routers.keeper(2)
            await first.pin(prefix("a"), A, warm=False)
            await second.pin(prefix("a", B), B, warm=False)
            assert await routers.here() == {name: [("a", 3)] for name in NODES}
            routers.run(first)
            first.add(prefix("b", B), B, warm=False)
            await routers.until([("a", 3), ("b", 3)], "the first router's renewal")
            assert [pin.name for pin in first.pins()] == ["b"]
            assert await second.unpin("a")
            assert await routers.here() == {name: [("b", 3)] for name in NODES}

    asyncio.run(scenario())


def test_a_configured_pin_waits_while_a_later_one_has_its_name() -> None:
    """The nodes keep the operator's; the router says so, keeps its own, and has it on the nodes after the unpin."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            first, second = routers.keeper(1, lease_ms=900), routers.keeper(2, off_s=1.0)
            kept = first.add(prefix("a"), A, from_config=True, warm=False)
            await second.pin(prefix("a", B), B, warm=False)
            routers.run(first)

            async def both_refuse() -> bool:
                return [problem.reason for problem in kept.problems.values()] == [Reason.NAME_IN_USE] * 2

            await wait_for(both_refuse, "both nodes to refuse")
            assert await routers.here() == {name: [("a", 3)] for name in NODES}
            assert await second.unpin("a")
            await routers.until([("a", 2)], "the configured pin")

    asyncio.run(scenario())


def test_a_node_out_of_reach_does_not_hold_the_others_up() -> None:
    """One of the nodes does not answer: the pin is on the other one, and the router says which lacks it."""

    async def scenario() -> None:
        async with two_nodes() as (cluster, routers):
            gone = routers.record("decode-0")
            await cluster.stop_node("decode-0")
            keeper = PinKeeper(
                config=PinKeeperConfig(call_ms_max=500),
                incarnation=Incarnation(5),
                nodes=lambda: [gone, routers.record("prefill-0")],
                channels=routers._channels,
                clock=Clock(),
                warm=routers._warm,
            )
            pin = await keeper.pin(prefix("a"), A, warm=False)
            whys = {on.node: (on.blocks, i in pin.problems) for i, on in pin.on_nodes.items()}
            assert whys == {"decode-0": (0, True), "prefill-0": (2, False)}
            assert await keeper.unpin("a")

    asyncio.run(scenario())


def test_a_channel_that_is_dropped_during_a_call_ends_that_call_only() -> None:
    """The router drops the channel to a node that leaves while the keeper waits for the node's answer. gRPC ends the
    call as if its task was cancelled: the pin is on the other node all the same, and later pins too."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            called: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
            silent = await asyncio.start_server(lambda _reader, writer: called.put_nowait(writer), "127.0.0.1")
            host, port = silent.sockets[0].getsockname()
            leaving = replace(routers.record("decode-0"), endpoint=f"{host}:{port}")
            nodes = [leaving, routers.record("prefill-0")]
            keeper = PinKeeper(
                config=PinKeeperConfig(call_ms_max=60_000),
                incarnation=Incarnation(5),
                nodes=lambda: nodes,
                channels=routers._channels,
                clock=Clock(),
                warm=routers._warm,
            )
            pinning = asyncio.create_task(keeper.pin(prefix("a"), A, warm=False))
            connection = await called.get()
            nodes.remove(leaving)
            await routers._channels.drop(leaving.endpoint)
            pin = await pinning
            whys = {on.node: pin.problems[i].reason if i in pin.problems else None for i, on in pin.on_nodes.items()}
            assert whys == {"decode-0": Reason.PEER_UNREACHABLE, "prefill-0": None}
            await keeper.pin(prefix("b", B), B, warm=False)
            assert (await routers.here())["prefill-0"] == [("a", 2), ("b", 3)]
            connection.close()
            silent.close()
            await silent.wait_closed()

    asyncio.run(scenario())


def test_leases_are_renewed_while_a_pin_waits_to_be_warmed() -> None:
    """There is no room to compute it for longer than a lease lasts: it stays pinned, as do the others."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            keeper, begun = routers.keeper(1, lease_ms=600), asyncio.Event()

            async def never(_tokens: Sequence[int], _salt: str | None) -> None:
                begun.set()
                await asyncio.Event().wait()

            keeper._warm = never
            routers.run(keeper)
            await keeper.pin(prefix("a"), A, warm=True)
            await begun.wait()
            lefts: list[int] = []

            async def renewed() -> bool:
                """The lease left has grown again, twice."""
                (pin,) = (await routers._cluster.statuses())["decode-0"].prefixes.pins
                lefts.append(pin.lease_left_ms)
                return sum(later > sooner for sooner, later in pairwise(lefts)) >= 2

            await wait_for(renewed, "two renewals")

    asyncio.run(scenario())


def test_warming_is_tried_again() -> None:
    """The first try finds no room; the second one works, and there is no third."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            keeper = routers.keeper(1, lease_ms=300)
            routers.run(keeper)
            await keeper.pin(prefix("a", cache_salt="acme"), A, warm=True)

            async def twice() -> bool:
                return len(routers.warmed) == 2

            await wait_for(twice, "the second try")
            assert routers.warmed == [(tuple(A), "acme")] * 2
            assert [pin.warm_tries_left for pin in keeper.pins()] == [0]

    asyncio.run(scenario())


def test_the_routers_own_limit_and_a_refusal_keep_what_was_there() -> None:
    """One pin more than it may keep; and a replacement that no node takes leaves the pin of that name as it was."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            keeper = routers.keeper(1, count_max=1)
            await keeper.pin(prefix("a"), A, warm=False)
            error = await error_of(keeper.pin(prefix("b"), A, warm=False))
            assert error.reason is Reason.PINS_FULL
            long = random_prompt(random.Random(3), 21 * SIZE)
            error = await error_of(keeper.pin(prefix("a", long), long, warm=False))
            assert error.reason is Reason.PINS_FULL
            assert [(pin.name, pin.tokens) for pin in keeper.pins()] == [("a", tuple(A))]
            assert await routers.here() == {name: [("a", 2)] for name in NODES}

    asyncio.run(scenario())


def hold(**fields: Any) -> pins_pb2.HoldPinRequest:
    return pins_pb2.HoldPinRequest(**{"name": "a", "tokens": A, "lease_ms": 1_000, "version": 1, **fields})


BAD_CALLS: dict[str, tuple[dict[str, Any], Reason, str | None]] = {
    "no-name": ({"name": ""}, Reason.BAD_FIELD, "name"),
    "long-name": ({"name": "x" * 64}, Reason.BAD_FIELD, "name"),
    "no-tokens": ({"tokens": []}, Reason.BAD_FIELD, "tokens"),
    "no-block": ({"tokens": A[: SIZE - 1]}, Reason.BAD_FIELD, "tokens"),
    "token-id": ({"tokens": [*A, 1_000]}, Reason.TOKEN_OUT_OF_RANGE, "tokens"),
    "context": ({"tokens": [1] * 4096}, Reason.PROMPT_TOO_LONG, "tokens"),
    "region": ({"tokens": [1] * 21 * SIZE}, Reason.PINS_FULL, None),
    "salt": ({"cache_salt": b"x" * 257}, Reason.BAD_FIELD, "cache_salt"),
    "no-lease": ({"lease_ms": 0}, Reason.BAD_FIELD, "lease_ms"),
    "long-lease": ({"lease_ms": 1 << 40}, Reason.BAD_FIELD, "lease_ms"),
}


def test_a_bad_pin_changes_nothing_on_a_node() -> None:
    """Each refused by both nodes with reason and field, and one for another process with INCARNATION_MISMATCH."""

    async def scenario() -> None:
        async with two_nodes() as (_, routers):
            for name in NODES:
                record = routers.record(name)
                stub = pins_pb2_grpc.NodePinsStub(routers._channels.get(record.endpoint))

                async def call(stub: Any, receiver: int, fields: dict[str, Any]) -> None:
                    header = common_pb2.Header(sender=7, receiver=receiver)
                    with rpc_errors("node"):
                        await stub.HoldPin(hold(**fields, header=header), timeout=CALL_S_MAX)

                for case, (fields, reason, field) in BAD_CALLS.items():
                    error = await error_of(call(stub, record.incarnation, fields))
                    assert (error.reason, error.field) == (reason, field), (case, error)
                error = await error_of(call(stub, record.incarnation ^ 1, {}))
                assert error.reason is Reason.INCARNATION_MISMATCH
            assert await routers.here() == {name: [] for name in NODES}

    asyncio.run(scenario())


def test_a_router_refuses_a_bad_pin_itself() -> None:
    """Nothing to pin, two prefixes, an unknown token, a salt or a time out of range: no node is asked."""

    async def scenario() -> None:
        async with inprocess(mock_spec(blocks=40)) as cluster:
            async with grpc.aio.insecure_channel(cluster.router_others["admin"]) as channel:
                stub = pins_pb2_grpc.PinsStub(channel)

                async def ask(**fields: Any) -> BatonError:
                    async def call() -> None:
                        with rpc_errors("router"):
                            await stub.Pin(pins_pb2.PinRequest(**fields), timeout=CALL_S_MAX, metadata=as_operator())

                    return await error_of(call())

                ids = {"ids": A}
                cases: list[tuple[dict[str, Any], Reason, str]] = [
                    ({"name": "a"}, Reason.BAD_FIELD, "prefix"),
                    ({"name": "", "token_ids": ids}, Reason.BAD_FIELD, "name"),
                    ({"name": "a", "token_ids": {}}, Reason.BAD_FIELD, "prefix"),
                    ({"name": "a", "text": ""}, Reason.BAD_FIELD, "prefix"),
                    ({"name": "a", "text": "sea"}, Reason.NO_TOKENIZER, "text"),
                    ({"name": "a", "system": "sea"}, Reason.NO_TOKENIZER, "text"),
                    ({"name": "a", "token_ids": {"ids": [1_000]}}, Reason.TOKEN_OUT_OF_RANGE, "token_ids"),
                    ({"name": "a", "token_ids": {"ids": [1] * 4096}}, Reason.PROMPT_TOO_LONG, "token_ids"),
                    ({"name": "a", "token_ids": ids, "cache_salt": ""}, Reason.BAD_FIELD, "cache_salt"),
                    ({"name": "a", "token_ids": ids, "ttl_ms": 0}, Reason.BAD_FIELD, "ttl_ms"),
                    ({"name": "a", "token_ids": ids, "ttl_ms": 1 << 60}, Reason.BAD_FIELD, "ttl_ms"),
                ]
                for fields, reason, field in cases:
                    error = await ask(**fields)
                    assert (error.reason, error.field) == (reason, field), (fields, error)
                    assert error.message.endswith("."), error.message
                assert not (
                    await stub.ListPins(pins_pb2.ListPinsRequest(), timeout=CALL_S_MAX, metadata=as_operator())
                ).pins
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"name": "a"}]', "exactly one"),
        ('[{"name": "a", "text": "x", "system": "y"}]', "exactly one"),
        ('[{"name": "a/b", "text": "x"}]', "no name of a pin"),
        ('[{"name": "a", "text": "x", "colour": "red"}]', "colour"),
        ('[{"name": "a", "text": "x"}, {"name": "a", "text": "y"}]', "different names"),
        ("[5]", "pinned"),
    ],
)
def test_a_wrong_configuration_is_told(text: str, words: str) -> None:
    """Before the router starts, with the key that is wrong."""

    async def scenario() -> None:
        with pytest.raises(BatonError) as caught:
            async with inprocess(mock_spec(router_flags={"pinned_prefixes": text})):
                pass
        assert caught.value.reason is Reason.BAD_CONFIG
        assert words in caught.value.message

    asyncio.run(scenario())


def test_a_configured_text_needs_a_tokenizer() -> None:
    """The router does not start, and says what it lacks."""

    async def scenario() -> None:
        flags = {"pinned_prefixes": '[{"name": "a", "text": "the sea"}]'}
        with pytest.raises(BatonError) as caught:
            async with inprocess(mock_spec(router_flags=flags)):
                pass
        assert (caught.value.reason, caught.value.code) == (Reason.NO_TOKENIZER, Code.FAILED_PRECONDITION)
        assert "'a'" in caught.value.message

    asyncio.run(scenario())


def test_the_checks_of_a_prefix() -> None:
    """Every field out of its range, as the configuration reports it."""
    wrong: dict[str, Callable[[], PinnedPrefix]] = {
        "name": lambda: prefix("-"),
        "token_ids": lambda: prefix("a", [1 << 32]),
        "cache_salt": lambda: prefix("a", cache_salt="x" * 257),
        "ttl_ms": lambda: prefix("a", ttl_ms=-1),
        "prefix": lambda: prefix("a", []),
    }
    for field, make in wrong.items():
        with pytest.raises(InvalidField) as caught:
            make()
        assert caught.value.field == field
