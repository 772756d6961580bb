"""Pinned prefixes of this router: kept here, leased to every prefill and decode node, and leased again when one joins.

Two routers may have a pin of one name. The nodes keep the newer one: an operator's pin always is; of two configured
ones the routers' wall clocks decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from batonpb import common_pb2, pins_pb2, pins_pb2_grpc

from baton.clock import Clock, wait_s
from baton.errors import BatonError, InvalidField, Reason, bad_field
from baton.ids import Incarnation
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.rpc import Channels, rpc_errors
from baton.tasks import Tasks
from baton.wire import ModelInfo, NodeRecord, Role
from router.config import PinKeeperConfig, PinnedPrefix
from router.prompts import PromptEncoder
from router.request import check_prompt

log = get_log("pins")

RENEWALS_PER_LEASE: Final = 3
WARM_TRIES_MAX: Final = 3
_SERVING: Final = frozenset({Lifecycle.READY, Lifecycle.CORDONED})
_UNREACHED: Final = frozenset({Reason.PEER_UNREACHABLE, Reason.DEADLINE, Reason.CANCELLED, Reason.INCARNATION_MISMATCH})
"""Says nothing about the pin itself: the next renewal tries again."""


@dataclass(slots=True, eq=False, kw_only=True)
class KeptPin:
    """One pin, and what each node last said of it."""

    prefix: PinnedPrefix
    tokens: tuple[int, ...]
    version: int
    expires_s: float | None
    from_config: bool
    warm_tries_left: int
    on_nodes: dict[Incarnation, pins_pb2.PinOnNode] = field(default_factory=dict)
    problems: dict[Incarnation, BatonError] = field(default_factory=dict)
    """Of those that have not taken it."""

    @property
    def name(self) -> str:
        return self.prefix.name

    def ttl_left_ms(self, now_s: float) -> int | None:
        return None if self.expires_s is None else int(max(0.0, self.expires_s - now_s) * 1e3)

    def heard(self, record: NodeRecord, answer: pins_pb2.HoldPinReply | BatonError) -> None:
        """The node has taken it, or not."""
        if isinstance(answer, BatonError):
            self.problems[record.incarnation] = answer
            on_node = pins_pb2.PinOnNode(node=record.name, problem=answer.message)
        else:
            self.problems.pop(record.incarnation, None)
            on_node = pins_pb2.PinOnNode(node=record.name, blocks=answer.blocks, blocks_pinned=answer.blocks_pinned)
        self.on_nodes[record.incarnation] = on_node


class PinKeeper:
    """Mutable; on the router's loop. `run` renews until it is cancelled."""

    def __init__(
        self,
        *,
        config: PinKeeperConfig,
        incarnation: Incarnation,
        nodes: Callable[[], Sequence[NodeRecord]],
        channels: Channels,
        clock: Clock,
        warm: Callable[[Sequence[int], str | None], Awaitable[None]],
    ) -> None:
        """`nodes` gives the records known now. `warm` computes a prompt under a salt, so that it is cached; it raises
        BatonError."""
        self._config = config
        self._incarnation = incarnation
        self._nodes = nodes
        self._channels = channels
        self._clock = clock
        self._warm = warm
        self._pins: dict[str, KeptPin] = {}
        self._locks: dict[Incarnation, asyncio.Lock] = {}
        """One call to a node at a time: a Hold must not overtake the Drop after it."""
        self._wake = asyncio.Event()
        self._version_last = 0

    def pins(self) -> list[KeptPin]:
        """By name; overdue ones are gone."""
        self._expire()
        return [self._pins[name] for name in sorted(self._pins)]

    def describe(self, pin: KeptPin) -> pins_pb2.PinnedPrefix:
        on_nodes = sorted(pin.on_nodes.values(), key=lambda on_node: on_node.node)
        return pins_pb2.PinnedPrefix(
            name=pin.name,
            tokens=len(pin.tokens),
            has_cache_salt=pin.prefix.cache_salt is not None,
            ttl_left_ms=pin.ttl_left_ms(self._clock.monotonic_s()),
            from_config=pin.from_config,
            nodes=on_nodes,
        )

    def add(self, prefix: PinnedPrefix, tokens: Sequence[int], *, from_config: bool = False, warm: bool) -> KeptPin:
        """Keep a pin; nodes hear of it at the next turn of `run`. Raises BatonError PINS_FULL."""
        old = self._pins.get(prefix.name)
        if old is None and len(self._pins) >= self._config.count_max:
            raise BatonError(
                Reason.PINS_FULL,
                f"This router keeps {len(self._pins)} pins, its limit (pins.count_max). Unpin one first.",
            )
        # Rises even where the clock does not: the nodes take the later of two as the newer one.
        self._version_last = max(int(self._clock.wall_s() * 1e3), self._version_last + 1)
        pin = self._pins[prefix.name] = KeptPin(
            prefix=prefix,
            tokens=tuple(tokens),
            version=self._version_last,
            expires_s=None if prefix.ttl_ms is None else self._clock.monotonic_s() + prefix.ttl_ms / 1e3,
            from_config=from_config,
            warm_tries_left=WARM_TRIES_MAX if warm else 0,
        )
        self._wake.set()
        return pin

    async def pin(self, prefix: PinnedPrefix, tokens: Sequence[int], *, warm: bool) -> KeptPin:
        """Keep a pin and lease it to all nodes now; one of the same name is replaced.

        Raises BatonError where this router's limit is reached, or where no node takes the pin and one says why. The pin
        that had the name then stays.
        """
        self._expire()
        old = self._pins.get(prefix.name)
        pin = self.add(prefix, tokens, warm=warm)
        await asyncio.gather(*(self._hold(pin, record, insist=True) for record in self._reachable()))
        refusals = [problem for problem in pin.problems.values() if problem.reason not in _UNREACHED]
        if refusals and pin.problems.keys() == pin.on_nodes.keys():
            if self._pins.get(prefix.name) is pin:
                del self._pins[prefix.name]
                if old is not None:
                    self._pins[prefix.name] = old
            raise refusals[0]
        return pin

    async def unpin(self, name: str) -> bool:
        """Drop a pin here and on all nodes; whether anybody had it. Idempotent."""
        pin = self._pins.pop(name, None)
        version = max(int(self._clock.wall_s() * 1e3), self._version_last, pin.version if pin is not None else 0)
        dropped = await asyncio.gather(*(self._drop(name, version, record) for record in self._reachable()))
        return pin is not None or any(dropped)

    def follow_directory(self) -> None:
        """The known nodes have changed: one that has just come gets the pins at once."""
        present = {record.incarnation for record in self._reachable()}
        for incarnation in [i for i, lock in self._locks.items() if i not in present and not lock.locked()]:
            del self._locks[incarnation]
        for pin in self._pins.values():
            for incarnation in pin.on_nodes.keys() - present:
                del pin.on_nodes[incarnation]
                pin.problems.pop(incarnation, None)
            if not present <= pin.on_nodes.keys():
                self._wake.set()

    async def run(self) -> None:
        """Lease and renew, until cancelled."""
        warming = Tasks(asyncio.get_running_loop(), log, broken="warming pins broke off")
        try:
            while True:
                await wait_s(self._clock, self._wake, self._config.lease_ms / 1e3 / RENEWALS_PER_LEASE)
                self._wake.clear()
                self._expire()
                await asyncio.gather(*(self._hold_all(record) for record in self._reachable()))
                if not warming and self._serves_both:
                    # Beside the renewals: it may wait for room for longer than a lease lasts.
                    warming.spawn(self._warm_all())
        finally:
            await warming.cancel()

    async def _hold_all(self, record: NodeRecord) -> None:
        for pin in list(self._pins.values()):
            await self._hold(pin, record)
            problem = pin.problems.get(record.incarnation)
            if problem is not None and problem.reason in _UNREACHED:
                return

    async def _hold(self, pin: KeptPin, record: NodeRecord, *, insist: bool = False) -> None:
        """Lease one pin to one node, which answers into `pin`. `insist`: it replaces a newer one of its name."""
        async with self._lock(record):
            if self._pins.get(pin.name) is not pin:
                return
            try:
                reply = await self._call_hold(pin, record)
                if reply.superseded_by and insist:
                    self._version_last = pin.version = max(pin.version, reply.superseded_by + 1)
                    reply = await self._call_hold(pin, record)
            except BatonError as error:
                known = pin.problems.get(record.incarnation)
                if known is None or known.reason is not error.reason:
                    log.warning("pin not taken", pin=pin.name, node=record.name, problem=error.message)
                pin.heard(record, error)
                return
            if not reply.superseded_by:
                pin.heard(record, reply)
                return
            log.info("another router has replaced a pin", pin=pin.name, node=record.name)
            text = "Another router has since pinned another prefix by this name."
            pin.heard(record, BatonError(Reason.NAME_IN_USE, text))
            if not pin.from_config and self._pins.get(pin.name) is pin:
                del self._pins[pin.name]

    async def _call_hold(self, pin: KeptPin, record: NodeRecord) -> pins_pb2.HoldPinReply:
        ttl_left_ms = pin.ttl_left_ms(self._clock.monotonic_s())
        lease_ms = self._config.lease_ms if ttl_left_ms is None else min(self._config.lease_ms, ttl_left_ms)
        request = pins_pb2.HoldPinRequest(
            header=self._header(record),
            name=pin.name,
            tokens=pin.tokens,
            cache_salt=(pin.prefix.cache_salt or "").encode(),
            lease_ms=max(1, lease_ms),
            version=pin.version,
        )
        with self._calls(record) as stub:
            reply: pins_pb2.HoldPinReply = await stub.HoldPin(request, timeout=self._config.call_ms_max / 1e3)
        return reply

    async def _drop(self, name: str, version: int, record: NodeRecord) -> bool:
        """Whether the node had it. One that cannot be reached keeps the pin until its lease is over."""
        request = pins_pb2.DropPinRequest(header=self._header(record), name=name, version=version)
        async with self._lock(record):
            try:
                with self._calls(record) as stub:
                    reply: pins_pb2.DropPinReply = await stub.DropPin(request, timeout=self._config.call_ms_max / 1e3)
            except BatonError as error:
                log.warning("unpin unanswered", pin=name, node=record.name, problem=error.message)
                return False
        return reply.known

    @contextmanager
    def _calls(self, record: NodeRecord) -> Iterator[Any]:
        """Calls to a node: `rpc_errors`, and PEER_UNREACHABLE where their channel is closed meanwhile.

        The channels are the router's, which drops those to nodes that have left; gRPC ends the calls on them as if
        their task was cancelled.
        """
        try:
            with rpc_errors(record.name):
                yield pins_pb2_grpc.NodePinsStub(self._channels.get(record.endpoint))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise BatonError(Reason.PEER_UNREACHABLE, f"{record.name} has left the cluster.") from None

    async def _warm_all(self) -> None:
        for pin in list(self._pins.values()):
            if not pin.warm_tries_left or self._pins.get(pin.name) is not pin:
                continue
            pin.warm_tries_left -= 1
            try:
                await self._warm(pin.tokens, pin.prefix.cache_salt)
            except BatonError as error:
                log.warning("pin not warmed up", pin=pin.name, problem=error.message, tries_left=pin.warm_tries_left)
                continue
            pin.warm_tries_left = 0
            self._wake.set()  # the nodes are asked again, so that `list` shows what they have now

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for name in [n for n, pin in self._pins.items() if pin.expires_s is not None and pin.expires_s <= now_s]:
            del self._pins[name]  # the nodes' leases end with it

    @property
    def _serves_both(self) -> bool:
        roles = {record.role for record in self._reachable()}
        return all(any(role.serves(half) for role in roles) for half in (Role.PREFILL, Role.DECODE))

    def _reachable(self) -> list[NodeRecord]:
        return [r for r in self._nodes() if r.role is not Role.ROUTER and r.lifecycle in _SERVING]

    def _lock(self, record: NodeRecord) -> asyncio.Lock:
        return self._locks.setdefault(record.incarnation, asyncio.Lock())

    def _header(self, record: NodeRecord) -> common_pb2.Header:
        return common_pb2.Header(sender=self._incarnation, receiver=record.incarnation)


class PinsService(pins_pb2_grpc.PinsServicer):
    """baton.v1.Pins, for operators."""

    def __init__(self, keeper: PinKeeper, prompts: PromptEncoder, *, model: Callable[[], ModelInfo]) -> None:
        self._keeper = keeper
        self._prompts = prompts
        self._model = model

    async def Pin(self, request: pins_pb2.PinRequest, context: Any) -> pins_pb2.PinReply:
        prefix = _prefix(request)
        tokens = await asyncio.to_thread(self._prompts.encode_pin, prefix)
        check_prompt(tokens, self._model(), field="token_ids")  # before any node is asked
        pin = await self._keeper.pin(prefix, tokens, warm=request.warm)
        return pins_pb2.PinReply(pin=self._keeper.describe(pin))

    async def Unpin(self, request: pins_pb2.UnpinRequest, context: Any) -> pins_pb2.UnpinReply:
        return pins_pb2.UnpinReply(known=await self._keeper.unpin(request.name))

    async def ListPins(self, request: pins_pb2.ListPinsRequest, context: Any) -> pins_pb2.ListPinsReply:
        return pins_pb2.ListPinsReply(pins=[self._keeper.describe(pin) for pin in self._keeper.pins()])


def _prefix(request: pins_pb2.PinRequest) -> PinnedPrefix:
    """Raises BatonError BAD_FIELD."""
    kind = request.WhichOneof("prefix")
    try:
        return PinnedPrefix(
            name=request.name,
            text=request.text if kind == "text" else None,
            token_ids=tuple(request.token_ids.ids) if kind == "token_ids" else None,
            system=request.system if kind == "system" else None,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            ttl_ms=request.ttl_ms if request.HasField("ttl_ms") else None,
        )
    except InvalidField as error:
        raise bad_field(error.field, f"{error.field}: {error.args[0]}.") from error
