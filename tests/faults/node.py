"""One process of a cluster with failpoints: `python -m tests.faults.node SERVICE ...`, arguments as for `baton`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

import cli.main
from cli.services import Service
from router.placement import Choice
from tests.faults.points import ARMED_ENV, Ends, Failpoint, Failpoints
from tests.faults.questions import FETCH_DECODE_MARK, FETCH_MARK

FETCHED_TOKEN_S: Final = 6e-4
"""What computing a token is believed to take where a fetch is struck: as long as it does take there."""
FETCHED_FROM: Final = {FETCH_MARK: Service.PREFILL, FETCH_DECODE_MARK: Service.DECODE}
"""By the first token of a prompt, which nodes own what is fetched of it."""


class Marks:
    """What the wrapped methods know of each request: the first token of its prompt, its router, and the node at the
    other end."""

    def __init__(self, own_name: str) -> None:
        self.own_name = own_name
        self.of_request: dict[str, int] = {}
        self.peer_of_request: dict[str, str] = {}
        self.router_of_request: dict[str, str] = {}
        self.name_of_writer: dict[int, str] = {}

    def note(self, request: str, prompt: Sequence[int], router: int) -> None:
        self.of_request[request] = prompt[0]
        self.router_of_request[request] = str(router)

    def at_receiver(self, request: str) -> Ends:
        """A request that is kept has no node at the other end."""
        writer = self.peer_of_request.get(request, self.own_name)
        return Ends(writer=writer, receiver=self.own_name, router=self.router_of_request.get(request, ""))


def wrap_prefill(points: Failpoints, marks: Marks) -> None:
    from kvtransfer.writer import WriterPeer
    from prefill_node.node import PrefillNode, StepSink

    real_enqueue, real_layer_done, real_seal = PrefillNode._enqueue, StepSink.layer_done, WriterPeer._seal_now

    def enqueue(self: PrefillNode, job: Any) -> Any:
        marks.note(job.request.key.request, job.request.prompt, job.request.router)
        return real_enqueue(self, job)

    def reach(point: Failpoint, handoff: Any) -> None:
        request = handoff.key.request
        if handoff.is_fetch:
            return
        router = marks.router_of_request[request]
        ends = Ends(writer=marks.own_name, receiver=handoff.peer.address.name, router=router)
        points.reach(point, mark=marks.of_request[request], request=request, ends=ends)

    def layer_done(self: StepSink, layer: int) -> None:
        real_layer_done(self, layer)
        for writes in self.writes:
            reach(Failpoint.LAYER, writes.handoff)

    def seal_now(self: WriterPeer, handoff: Any) -> None:
        if handoff.is_fetch:
            reach_fetch(points, marks, Failpoint.FETCH_SEAL, handoff)
        real_seal(self, handoff)
        reach(Failpoint.SEALED, handoff)

    _replace(PrefillNode, "_enqueue", enqueue)
    _replace(StepSink, "layer_done", layer_done)
    _replace(WriterPeer, "_seal_now", seal_now)
    _wrap_owning(points, marks)
    _wrap_fetching(points, marks)


def reach_fetch(points: Failpoints, marks: Marks, point: Failpoint, handoff: Any) -> None:
    """On the owner."""
    key = handoff.key.request
    ends = Ends(writer=marks.own_name, receiver=handoff.peer.address.name, router="")
    points.reach(point, mark=marks.of_request.get(key, -1), request=key, ends=ends)


def _wrap_owning(points: Failpoints, marks: Marks) -> None:
    import kvtransfer.writer
    from cachestore.prefix_cache import TOKEN_BYTES, unpack_tokens
    from kvtransfer.writer import StepWrites
    from node.fetching import FetchOwner

    real_serve, real_layers_done = FetchOwner._serve, StepWrites.layers_done

    async def serve(self: FetchOwner, request: Any, receiver: Any) -> Any:
        if request.tokens:
            marks.note(request.key.request, unpack_tokens(request.tokens[:TOKEN_BYTES]), 0)
        return await real_serve(self, request, receiver)

    def layers_done(self: StepWrites, first: int, end: int) -> None:
        real_layers_done(self, first, end)
        if self.handoff.is_fetch:
            reach_fetch(points, marks, Failpoint.FETCH_LAYER, self.handoff)

    vars(kvtransfer.writer)["POST_BYTES_MAX"] = 1  # a layer at a time, so that there is a point between two
    _replace(FetchOwner, "_serve", serve)
    _replace(StepWrites, "layers_done", layers_done)


def _wrap_fetching(points: Failpoints, marks: Marks) -> None:
    from baton.ids import GrantId
    from baton.wire import key_from_proto
    from node.computing_cost import ComputingCost
    from node.fetch_costs import FetchCosts
    from node.fetching import Fetches
    from node.sources import Gatherer

    real_reserve, real_commit, real_gather = Fetches.reserve, Fetches.commit, Gatherer.gather

    def reach(point: Failpoint, fetch: Any) -> None:
        ends = Ends(writer=fetch.owner.name, receiver=marks.own_name, router="")
        points.reach(point, mark=fetch.prompt.tokens[0], request=fetch.key.request, ends=ends)

    def reserve(self: Fetches, request: Any, pair: Any) -> Any:
        reply = real_reserve(self, request, pair)
        fetch = self._under_way.get(key_from_proto(request.key))
        if fetch is not None and reply.WhichOneof("answer") == "granted":
            reach(Failpoint.FETCH_GRANTED, fetch)
        return reply

    async def commit(self: Fetches, request: Any, pair: Any) -> bool:
        fetch = self._granted.get(GrantId(request.grant))
        if fetch is not None:
            reach(Failpoint.FETCH_COMMIT_SENT, fetch)
        return await real_commit(self, request, pair)

    async def gather(self: Gatherer, prompt: Any) -> Any:
        if prompt.tokens and prompt.tokens[0] in FETCHED_FROM:
            # A step of the mock engine takes a time whatever its tokens: none seems to be worth fetching.
            self._computing = ComputingCost(fixed_s=0.0, token_s=FETCHED_TOKEN_S)
        return await real_gather(self, prompt)

    _replace(Fetches, "reserve", reserve)
    _replace(Fetches, "commit", commit)
    _replace(Gatherer, "gather", gather)
    _replace(FetchCosts, "measured", lambda _self, *_of: None)  # one that was stopped is asked again


def wrap_decode(points: Failpoints, marks: Marks) -> None:
    _wrap_owning(points, marks)
    wrap_decode_half(points, marks)


def wrap_decode_half(points: Failpoints, marks: Marks) -> None:
    _wrap_receiving(points, marks)
    _wrap_landing(points, marks)
    _wrap_running(points, marks)
    _wrap_taking_over(points, marks)


def wrap_mixed(points: Failpoints, marks: Marks) -> None:
    """Both halves. A request that is kept is only seen to decode."""
    wrap_prefill(points, marks)
    wrap_decode_half(points, marks)


def _wrap_receiving(points: Failpoints, marks: Marks) -> None:
    from decode_node.service import ReceiverService

    real_connect, real_reserve, real_commit = (
        ReceiverService.Connect,
        ReceiverService.Reserve,
        ReceiverService.Commit,
    )

    async def connect(self: ReceiverService, request: Any, context: Any) -> Any:
        marks.name_of_writer[request.header.sender] = request.writer_name
        return await real_connect(self, request, context)

    def reach(point: Failpoint, request: str) -> None:
        points.reach(point, mark=marks.of_request[request], request=request, ends=marks.at_receiver(request))

    async def reserve(self: ReceiverService, request: Any, context: Any) -> Any:
        key = request.key.request
        if request.HasField("fetch_blocks"):
            return await real_reserve(self, request, context)
        marks.note(key, request.prompt, request.router)
        marks.peer_of_request[key] = marks.name_of_writer[request.header.sender]
        reach(Failpoint.RESERVE_SENT, key)
        reply = await real_reserve(self, request, context)
        if reply.WhichOneof("answer") == "granted":
            reach(Failpoint.RESERVED, key)
        return reply

    async def commit(self: ReceiverService, request: Any, context: Any) -> Any:
        job = self._node._jobs.get(request.grant)
        if job is not None:
            reach(Failpoint.COMMIT_SENT, job.key.request)
        return await real_commit(self, request, context)

    _replace(ReceiverService, "Connect", connect)
    _replace(ReceiverService, "Reserve", reserve)
    _replace(ReceiverService, "Commit", commit)


def _wrap_landing(points: Failpoints, marks: Marks) -> None:
    from kvtransfer.receiver import Receiver

    real_seal_landed = Receiver.seal_landed

    def seal_landed(self: Receiver, pair: Any, seal: Any) -> None:
        grant = self.grants._grants.get(seal.grant)
        request = "" if grant is None else grant.key.request
        mark, ends = marks.of_request.get(request, -1), marks.at_receiver(request)
        if grant is not None and points.reach(Failpoint.LANDED, mark=mark, request=request, ends=ends):
            checks, layout = self.checks, self._layout
            region = checks._thread.region
            assert isinstance(region, memoryview)
            region[layout.offset(layout.num_layers - 1, grant.blocks[1], checks._num_blocks) + 5] ^= 0x10
        real_seal_landed(self, pair, seal)

    _replace(Receiver, "seal_landed", seal_landed)


def _wrap_running(points: Failpoints, marks: Marks) -> None:
    from decode_node.node import DecodeNode

    real_committed, real_step_ended = DecodeNode.committed, DecodeNode.step_ended

    def reach(point: Failpoint, request: str) -> None:
        points.reach(point, mark=marks.of_request[request], request=request, ends=marks.at_receiver(request))

    def committed(self: DecodeNode, key: Any, grant: Any) -> None:
        real_committed(self, key, grant)
        reach(Failpoint.COMMITTED, key.request)

    def step_ended(self: DecodeNode, sink: Any, events: list[Any], *, is_timed: bool) -> None:
        real_step_ended(self, sink, events, is_timed=is_timed)
        for event in events:
            if event.token is not None:
                reach(Failpoint.DECODING if event.finish is None else Failpoint.FINISHED, event.seq.key.request)

    _replace(DecodeNode, "committed", committed)
    _replace(DecodeNode, "step_ended", step_ended)


def _wrap_taking_over(points: Failpoints, marks: Marks) -> None:
    from decode_node.service import DecodeService

    real_take_over = DecodeService.TakeOver

    async def take_over(self: DecodeService, request: Any, context: Any) -> Any:
        if request.forget:
            return await real_take_over(self, request, context)
        key = request.key.request
        marks.router_of_request[key] = str(request.header.sender)
        mark, ends = marks.of_request.get(key, -1), marks.at_receiver(key)
        points.reach(Failpoint.TAKE_OVER, mark=mark, request=key, ends=ends)
        reply = await real_take_over(self, request, context)
        points.reach(Failpoint.TAKEN_OVER, mark=mark, request=key, ends=ends)
        return reply

    _replace(DecodeService, "TakeOver", take_over)


def wrap_router(points: Failpoints, marks: Marks) -> None:
    """A call is known by its secret here, whatever ids its attempts have."""
    from router.node import RouterNode
    from router.resume import ResumeToken

    real_run = RouterNode.run
    real_forget = RouterNode.forget

    def reach(point: Failpoint, call: str) -> None:
        ends = Ends(writer="", receiver="", router=marks.own_name)
        points.reach(point, mark=marks.of_request.get(call, -1), request=call, ends=ends)

    async def run(self: RouterNode, request: Any, call: Any, sink: Any) -> None:
        if call.resume is not None and request is not None and request.token_ids.ids:
            secret = call.resume.secret.hex()
            marks.of_request[secret] = request.token_ids.ids[0]
            if call.resume.place is not None:
                reach(Failpoint.ATTACH, secret)
        await real_run(self, request, call, sink)

    async def forget(self: RouterNode, token: ResumeToken, *rest: Any, **others: Any) -> Any:
        reach(Failpoint.FORGET, token.secret.hex())
        return await real_forget(self, token, *rest, **others)

    _replace(RouterNode, "run", run)
    _replace(RouterNode, "forget", forget)
    _wrap_placing()


def _wrap_placing() -> None:
    """A prompt that is to be fetched goes to a prefill node without it, and is fetched from nodes of one kind."""
    from router.placement import Placement

    real_pick = Placement.pick

    def pick(self: Placement, tokens: Any, salt: bytes, *, among: Any = None, no_owners: Any = ()) -> Choice:
        among = self.ready if among is None else among
        choice: Choice = real_pick(self, tokens, salt, among=among, no_owners=no_owners)
        service = FETCHED_FROM.get(tokens[0])
        if service is None:
            return choice
        others = among & np.array([record.name != choice.record.name for record in self.records])
        if others.any() and not _fetched_from(service, choice).owners:
            other = _fetched_from(service, real_pick(self, tokens, salt, among=others, no_owners=no_owners))
            return choice if not other.owners else other
        return _fetched_from(service, choice)

    _replace(Placement, "pick", pick)


def _fetched_from(service: Service, choice: Choice) -> Choice:
    """Nodes of both kinds have it."""
    owners = tuple(owner for owner in choice.owners if owner.name.startswith(service.value))
    return replace(choice, owners=owners)


def _replace(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    assert callable(getattr(owner, name)), f"{owner.__name__}.{name} is not what it was"
    setattr(owner, name, wrapper)


_WRAP: Final[dict[str, Callable[[Failpoints, Marks], None]]] = {
    Service.ROUTER.value: wrap_router,
    Service.PREFILL.value: wrap_prefill,
    Service.DECODE.value: wrap_decode,
    Service.MIXED.value: wrap_mixed,
}


def main(arguments: Sequence[str]) -> int:
    wrap = _WRAP.get(arguments[0])
    if wrap is not None:
        own_name = arguments[arguments.index("--name") + 1]
        wrap(Failpoints(Path(os.environ[ARMED_ENV]), own_name=own_name), Marks(own_name))
    return cli.main.run(list(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
