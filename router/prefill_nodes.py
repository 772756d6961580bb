"""The prefill nodes that one router knows: which of them a request goes to, and the call for each attempt."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from batonpb import common_pb2, prefill_pb2, prefill_pb2_grpc

from baton.drain import refused_by
from baton.errors import REGION_BLOCKS_KEY, BatonError, Reason, bad_field
from baton.ids import Incarnation, RequestKey
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.rpc import begun, rpc_errors
from baton.tracing import call_metadata
from baton.wire import ModelInfo, NodeRecord, key_to_proto
from cachestore.holder_index import HolderIndex
from router.decode_streams import DecodeStreams
from router.job import Inbox, Job, internal_error
from router.line import Place, priority_to_proto
from router.placement import Choice, Mask, Placement, may_hold
from router.retries import ASK_ANOTHER

NOT_READY_RETRY_MS: Final = 1_000
UNREACHED_MS: Final = 2_500
"""How long a node that did not answer a call is asked only where no other is left. The directory drops a dead one in
about this time; one that lives is asked again by then, though it has nothing new to report."""
FULL_BEFORE_ANOTHER: Final = 4
"""Refusals in a row, for want of room on decode nodes, before the request is sent by way of another prefill node: its
own has what is cached of the prompt, but another one may reach more decode nodes."""


class PrefillNodes:
    """Lives on the router's loop."""

    def __init__(self, index: HolderIndex, now_s: Callable[[], float]) -> None:
        """`index` says who has which blocks."""
        self._known: Sequence[NodeRecord] = ()
        self.ready: list[NodeRecord] = []
        """Those that take requests."""
        self.placement = Placement(index, now_s)
        self._drained: dict[Incarnation, int] = {}
        """Processes that refused work, each with the sequence of its record at that time."""
        self._unreached: dict[Incarnation, float] = {}
        """Processes that did not answer a call, each with the time until which others are preferred."""
        self._most_tokens: dict[str, int] = {}
        """By fingerprint, what the largest region ever seen holds: its node may be on its way back."""

    def model(self) -> ModelInfo:
        """The model that the cluster serves. Raises BatonError NO_PREFILL_NODE."""
        for record in self.ready:
            assert record.model is not None
            return record.model
        raise _not_ready(f"No prefill node is ready ({len(self._known)} known). Start one, or wait for one to come up.")

    def place(
        self, job: Job, key: RequestKey, *, now_s: float, silent: Collection[Incarnation] = ()
    ) -> tuple[Choice, Callable[[], None]]:
        """Where the next attempt goes, and what to call when that has ended. `silent` are processes that do not answer:
        they, and those that have just failed to, are asked only once the others have all failed the request.

        Raises BatonError NO_PREFILL_NODE; where no region is large enough, PROMPT_TOO_LONG or, in the middle of an
        answer, NOT_RESUMABLE.
        """
        model = self.model()
        job.block_size = model.block_size
        left = self._fit(job, model)
        if left is not self.placement.ready and not left.any():
            raise self._no_region(job, model)
        if job.avoid:
            untried = self._without(left, job.avoid)
            if untried.any():
                left = untried
            else:
                job.avoid.clear()
        if self._unreached:
            self._unreached = {i: until_s for i, until_s in self._unreached.items() if now_s < until_s}
        no_answer = {*silent, *self._unreached}
        if no_answer:
            answering = self._without(left, no_answer)
            left = answering if answering.any() else left
        choice = self.placement.pick(
            (*job.checked.prompt, *job.output), job.checked.cache_salt, among=left, no_owners=no_answer
        )
        return choice, self.placement.sent(choice, key)

    def untried(self, job: Job) -> bool:
        """Whether there is one that has not failed this request since all had."""
        return bool(self.ready) and bool(self._without(self._fit(job, self.model()), job.avoid).any())

    def reached(self, record: NodeRecord) -> None:
        """The node has answered a call."""
        self._unreached.pop(record.incarnation, None)

    def failed(self, job: Job, record: NodeRecord, error: BatonError, *, now_s: float) -> BatonError:
        """The attempt at this node has failed. Returns the error to judge the request by, mostly the same one."""
        if error.reason is Reason.PEER_UNREACHABLE and not error.metadata:  # a node says it of others, with details
            self._unreached[record.incarnation] = now_s + UNREACHED_MS / 1000
        job.full_in_a_row = job.full_in_a_row + 1 if error.reason is Reason.DECODE_FULL else 0
        if job.full_in_a_row == FULL_BEFORE_ANOTHER:
            job.full_in_a_row = 0
            job.avoid.add(record.incarnation)
        if refused_by(error, record.incarnation):
            self._drained[record.incarnation] = record.sequence  # its own answer counts until a later record differs
        if error.reason in ASK_ANOTHER:
            job.avoid.add(record.incarnation)
        if error.reason is not Reason.PROMPT_TOO_LONG:
            return error
        if REGION_BLOCKS_KEY in error.metadata:
            job.too_small.add(record.incarnation)  # its own answer counts more than its record
            assert record.model is not None, record.name
            if self._held_elsewhere(job, record.model):
                return _not_ready(f"{error.message} Another prefill node may have room for them.")
            return _not_resumable(job, error.message) if job.output else error
        if not job.output:
            return error
        # A decode node says so. One has held it, so others may: it may be on its way back.
        text = f"No known decode node can hold prompt and answer. {error.message}"
        return _not_ready(text, Reason.NO_DECODE_NODE)

    def _fit(self, job: Job, model: ModelInfo) -> Mask:
        """Of the rows of `placement`, those that may take the request."""
        placement = self.placement
        serving, roomy = placement.serving(model.fingerprint), placement.may_hold(job.tokens)
        fit = self._without(serving if serving is roomy else serving & roomy, job.too_small)  # mostly one array
        if not self._drained:
            return fit
        sequence_of = placement.sequence
        drained = self._without(fit, [i for i, sequence in self._drained.items() if sequence_of(i) == sequence])
        return drained if drained.any() else fit

    def _without(self, rows: Mask, incarnations: Collection[Incarnation]) -> Mask:
        if not incarnations:
            return rows
        rows = rows.copy()
        rows[self.placement.slots(incarnations)] = False
        return rows

    def _held_elsewhere(self, job: Job, model: ModelInfo) -> list[NodeRecord]:
        """Those that may hold the request, ready or not."""
        return [r for r in self._of_model(model) if r.incarnation not in job.too_small and may_hold(r, job.tokens)]

    def _of_model(self, model: ModelInfo) -> list[NodeRecord]:
        """All that are known but for those of another model."""
        return [r for r in self._known if r.model is None or r.model.fingerprint == model.fingerprint]

    def _no_region(self, job: Job, model: ModelInfo) -> BatonError:
        """No ready node holds the request: the error says to wait for one that does, or that there is none."""
        waits_for = self._held_elsewhere(job, model)
        if waits_for:
            names = ", ".join(sorted(record.name for record in waits_for))
            return _not_ready(f"No ready prefill node can hold {job.tokens} tokens; {names} may, once ready.")
        if not job.too_small and job.tokens <= self._most_tokens.get(model.fingerprint, 0):
            return _not_ready(f"No known prefill node can hold {job.tokens} tokens; one that has left could.")
        most = max(record.load.blocks.total for record in self._of_model(model))
        pins = ", less what pins and padding keep" if job.too_small else ""
        need = model.blocks_for(job.tokens)
        rooms = f"need {need} blocks; the largest region of a prefill node has {most}{pins}."
        if job.output:
            return _not_resumable(job, f"They {rooms}")
        return bad_field("prompt", f"The prompt's {job.tokens} tokens {rooms}", reason=Reason.PROMPT_TOO_LONG)

    def follow(self, records: Sequence[NodeRecord], serving: Sequence[NodeRecord] = ()) -> None:
        """What the directory says: all prefill nodes, with their latest reports, and all that may have KV."""
        self._known = records
        self.ready = [r for r in records if r.lifecycle is Lifecycle.READY and r.model is not None]
        self.placement.update(records, serving)
        for record in records:
            if (model := record.model) is not None:
                tokens = model.tokens_in(record.load.blocks.total)
                self._most_tokens[model.fingerprint] = max(self._most_tokens.get(model.fingerprint, 0), tokens)
        sequences = {record.incarnation: record.sequence for record in records}
        self._drained = {i: sequence for i, sequence in self._drained.items() if sequences.get(i) == sequence}


def _not_ready(text: str, reason: Reason = Reason.NO_PREFILL_NODE) -> BatonError:
    return BatonError(reason, text, retry_after_ms=NOT_READY_RETRY_MS)


def _not_resumable(job: Job, why: str) -> BatonError:
    return BatonError(
        Reason.NOT_RESUMABLE,
        f"The node that wrote this answer could not go on after {len(job.output)} tokens, and prompt and answer so "
        f"far, {job.tokens} tokens, fit nowhere to be taken up. {why} Ask for a shorter answer, or give a prefill node "
        "as large a region (engine.num_blocks) as decode nodes have.",
    )


log = get_log("router")


class PrefillCalls:
    """Lives on the router's loop."""

    def __init__(
        self, nodes: PrefillNodes, streams: DecodeStreams, rng: random.Random, *, placed: Callable[[Place], None]
    ) -> None:
        """`streams` is where the tokens of a request come from once a decode node has granted; `placed` is called
        then."""
        self._nodes = nodes
        self._streams = streams
        self._rng = rng
        self._placed = placed
        self._loop = asyncio.get_running_loop()
        self._running: Counter[str] = Counter()
        """By endpoint, endpoints without one included."""
        self._stubs: dict[str, tuple[Any, prefill_pb2_grpc.PrefillStub]] = {}
        """By endpoint, each with its channel."""

    async def run(self, job: Job, inbox: Inbox) -> None:
        """Place the attempt and make its call, which fills its inbox. Raises nothing: errors fail the inbox."""
        try:
            choice, placed = self._nodes.place(job, inbox.key, now_s=self._loop.time(), silent=self._streams.silent())
            record = choice.record
            job.stats.prefill_node = record.name
            job.nodes[record.name] = None
            self._running[record.endpoint] += 1
            try:
                await self._call(job, inbox, choice)
            except BatonError as error:
                if error.reason is Reason.DATA_CORRUPT:
                    job.observed.corrupt(record.name, job.stats.decode_node, error.metadata.get("transport", ""))
                inbox.fail(self._nodes.failed(job, record, error, now_s=self._loop.time()))
            finally:
                self._running[record.endpoint] -= 1
                placed()
        except BatonError as error:
            inbox.fail(error)
        except Exception:
            # A bug of ours ends this request, and no other.
            log.exception("prefill call broke off", request=job.id)
            inbox.fail(internal_error())

    def use(self, endpoint: str) -> bool:
        """Whether one of them goes there."""
        return self._running[endpoint] > 0

    def forget(self, present: Collection[str]) -> list[str]:
        """Endpoints that are not `present` any more and have no call: nobody needs their channels."""
        idle = [endpoint for endpoint in self._running.keys() - present if self._running[endpoint] == 0]
        for endpoint in idle:
            del self._running[endpoint]
            self._stubs.pop(endpoint, None)
        return idle

    def _stub(self, endpoint: str) -> prefill_pb2_grpc.PrefillStub:
        channel = self._streams.channels.get(endpoint)
        known, stub = self._stubs.get(endpoint, (None, None))
        if stub is None or known is not channel:
            stub = prefill_pb2_grpc.PrefillStub(channel)
            self._stubs[endpoint] = channel, stub
        return stub

    async def _call(self, job: Job, inbox: Inbox, choice: Choice) -> None:
        record = choice.record
        stub = self._stub(record.endpoint)
        own = self._streams.own
        request = prefill_pb2.PrefillRequest(
            header=common_pb2.Header(sender=own, receiver=record.incarnation),
            key=key_to_proto(inbox.key),
            prompt=job.checked.prompt,
            output=job.output,
            sampling=job.checked.sampling,
            router=own,
            cache_salt=job.checked.cache_salt,
            avoid_decode=job.avoid_decode | self._streams.out_of_reach(),
            resumable=job.for_another_router(),
            whole=job.call.whole and not job.checked.stop,  # a stop string ends it here, and there too late
            priority=priority_to_proto(job.call.priority),
            owners=[
                common_pb2.Owner(
                    name=owner.name, endpoint=owner.endpoint, incarnation=owner.incarnation, blocks=owner.blocks
                )
                for owner in choice.owners
            ],
        )
        with rpc_errors(record.name):
            events = stub.Prefill(
                request,
                timeout=job.call.deadline_s - self._loop.time(),
                metadata=call_metadata(request_id=job.call.id, traceparent=job.call.trace.child(self._rng)),
            )
            if await begun(events):  # the node says that it has it, before it is its turn
                inbox.queued_s = self._loop.time()
                self._nodes.reached(record)
            messages = aiter(events)
            async for event in messages:
                if self._take(job, inbox, event):
                    await messages.aclose()
                    await events.code()  # cheaper than to read on; a call that is dropped before is cancelled
                    break

    def _take(self, job: Job, inbox: Inbox, event: prefill_pb2.PrefillEvent) -> bool:
        """Whether it is the last one."""
        stats = job.stats
        kind = event.WhichOneof("event")
        if kind == "granted":
            granted, inbox.granted = event.granted, True
            self._placed(job.place)
            stats.decode_node = granted.decode_node
            if granted.decode_node and not inbox.decode:
                job.nodes[granted.decode_node] = None
                stream = self._streams.get(
                    granted.decode_node, granted.decode_endpoint, Incarnation(granted.decode_incarnation)
                )
                inbox.decode = stream.incarnation
                stream.users += 1
                inbox.lost_before = stream.out_of_reach
                stream.add(inbox)
        elif kind == "first_token":  # behind `granted`, always
            return _take_first(job, inbox, event.first_token)
        elif kind == "handed_off":
            done, inbox.committed = event.handed_off, True
            if done.HasField("first_token"):
                _take_first(job, inbox, done.first_token)
            stats.transport = done.transport
            stats.blocks_written, stats.blocks_skipped = done.blocks_written, done.blocks_skipped
            stats.bytes_written = done.bytes_written
            stats.prompt_tokens_skipped = min(done.blocks_skipped * job.block_size, stats.prompt_tokens)
            stats.handoff_exposed_ms = done.handoff_exposed_ms
            return True
        return False


def _take_first(job: Job, inbox: Inbox, first: prefill_pb2.FirstToken) -> bool:
    """Whether the answer ends with it."""
    job.stats.prompt_tokens_cached = min(first.prompt_tokens_cached, job.stats.prompt_tokens)
    job.stats.sources.CopyFrom(first.sources)
    job.prompt_logprobs = first.prompt_logprobs
    inbox.put(inbox.first_index, [first.token], [first.logprobs] if first.HasField("logprobs") else [])
    if not first.HasField("finish"):
        return False
    job.stats.decode_node = ""
    inbox.end(first.finish)
    return True
