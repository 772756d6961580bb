"""The calls of one router to prefill nodes: one for each attempt, from its placement to the commit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection

from batonpb import common_pb2, prefill_pb2, prefill_pb2_grpc

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, RequestKey
from baton.log import get_log
from baton.rpc_client import Channels, begun, rpc_errors
from baton.tracing import call_metadata
from baton.wire import NodeRecord
from router.decode_streams import DecodeStreams
from router.job import Job, Try
from router.prefill_nodes import PrefillNodes

log = get_log("router")


class PrefillCalls:
    """Lives on the router's loop."""

    def __init__(
        self,
        *,
        own: Incarnation,
        nodes: PrefillNodes,
        channels: Channels,
        streams: DecodeStreams,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        """`streams` is where the tokens of a request come from once a decode node has granted."""
        self._own = own
        self._nodes = nodes
        self._channels = channels
        self._streams = streams
        self._loop = loop
        self._rng = rng
        self._running: Counter[str] = Counter()
        """By endpoint, endpoints without one included."""

    async def run(self, job: Job, attempt: Try) -> None:
        """Place the attempt and make its call, which fills its inbox. Raises nothing: what goes wrong is the attempt's
        failure."""
        inbox = attempt.inbox
        try:
            record, placed = self._nodes.place(job, inbox.key, silent=self._streams.silent())
            job.stats.prefill_node = record.name
            job.nodes[record.name] = None
            self._running[record.endpoint] += 1
            try:
                await self._call(job, attempt, record)
            except BatonError as error:
                if error.reason is Reason.DATA_CORRUPT:
                    job.observed.corrupt(record.name, job.stats.decode_node, error.metadata.get("transport", ""))
                inbox.fail(self._nodes.failed(job, record, error))
            finally:
                self._running[record.endpoint] -= 1
                placed()
        except BatonError as error:
            inbox.fail(error)
        except Exception:
            # A bug of ours ends this request, and no other.
            log.exception("prefill call broke off", request=job.id)
            inbox.fail(BatonError(Reason.INTERNAL, "Internal error of the router; its log has the details."))

    def use(self, endpoint: str) -> bool:
        """Whether one of them goes there."""
        return self._running[endpoint] > 0

    def forget(self, present: Collection[str]) -> list[str]:
        """Endpoints that are not `present` any more and have no call: nobody needs their channels."""
        idle = [endpoint for endpoint in self._running.keys() - present if self._running[endpoint] == 0]
        for endpoint in idle:
            del self._running[endpoint]
        return idle

    async def _call(self, job: Job, attempt: Try, record: NodeRecord) -> None:
        stub = prefill_pb2_grpc.PrefillStub(self._channels.get(record.endpoint))
        with rpc_errors(record.name):
            events = stub.Prefill(
                self._request(job, attempt.inbox.key, record),
                timeout=job.deadline_s - self._loop.time(),
                metadata=call_metadata(request_id=job.client_id, traceparent=job.trace.child(self._rng)),
            )
            if await begun(events):  # the node says that it has it, before it is its turn
                attempt.queued_s = self._loop.time()
            async for event in events:
                self._take(job, attempt, event)

    def _take(self, job: Job, attempt: Try, event: prefill_pb2.PrefillEvent) -> None:
        stats, inbox = job.stats, attempt.inbox
        kind = event.WhichOneof("event")
        if kind == "granted":
            attempt.granted = True
            granted = event.granted
            if granted.decode_node and attempt.subscription is None:
                attempt.subscription = self._streams.get(
                    granted.decode_node, granted.decode_endpoint, Incarnation(granted.decode_incarnation)
                )
                attempt.subscription.users += 1
                inbox.lost_before = attempt.subscription.out_of_reach
                attempt.subscription.add(inbox)
            stats.decode_node = event.granted.decode_node
            if granted.decode_node:
                job.nodes[granted.decode_node] = None
        elif kind == "first_token":  # behind `granted`, always
            stats.prompt_tokens_cached = min(event.first_token.prompt_tokens_cached, stats.prompt_tokens)
            has_logprobs = event.first_token.HasField("logprobs")
            inbox.put(
                inbox.first_index, [event.first_token.token], [event.first_token.logprobs] if has_logprobs else []
            )
            if event.first_token.HasField("finish"):
                stats.decode_node = ""
                inbox.end(event.first_token.finish)
        elif kind == "handed_off":
            done = event.handed_off
            stats.transport = done.transport
            stats.blocks_written, stats.blocks_skipped = done.blocks_written, done.blocks_skipped
            stats.bytes_written = done.bytes_written
            stats.prompt_tokens_skipped = min(done.blocks_skipped * job.block_size, stats.prompt_tokens)
            stats.handoff_exposed_ms = done.handoff_exposed_ms

    def _request(self, job: Job, key: RequestKey, record: NodeRecord) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            header=common_pb2.Header(sender=self._own, receiver=record.incarnation),
            key=common_pb2.RequestKey(request=key.request, attempt=key.attempt),
            prompt=job.checked.prompt,
            output=job.output,
            sampling=job.checked.sampling,
            router=self._own,
            cache_salt=job.checked.cache_salt,
            avoid_decode=job.avoid_decode | self._streams.out_of_reach(),
        )
