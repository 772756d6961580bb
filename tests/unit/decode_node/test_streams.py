"""Who has which answer of a decode node, in any order of what routers say, and what each gets of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from batonpb import common_pb2, decode_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Reason
from baton.ids import Attempt, Incarnation, RequestId, RequestKey
from decode_node.streams import BATCH_BYTES_MAX, WHOLE_TOKENS_MAX, RequestOutput, Subscription, TokenStreams

ORPHAN_MS = 1_000
ROUTERS = [Incarnation(number) for number in (11, 12, 13)]
REQUESTS = 3
OPS = ("open", "append", "end", "fail", "subscribe", "break", "read", "lose", "leave", "take over", "done", "wait")


@dataclass(slots=True, kw_only=True)
class Has:
    """What a router believes to have of a request."""

    epoch: int
    began: int
    ids: list[int] = field(default_factory=list)
    ended: bool = False


class World:
    """Streams of a node, and routers that read them, are late, and break off."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.streams = TokenStreams(lambda: self.now_s)
        self.outputs: dict[RequestKey, RequestOutput] = {}
        self.subscriptions: dict[Incarnation, Subscription] = {}
        self.called: dict[Incarnation, dict[int, tuple[RequestKey, int]]] = {}
        """What each router's stream calls requests, each with its epoch."""
        self.have: dict[Incarnation, dict[RequestKey, Has]] = {router: {} for router in ROUTERS}
        self.opened = 0
        self.attempts = [0] * REQUESTS
        """A node refuses the key of an attempt that was taken over, and the router has a new one."""

    def play(self, what: str, request: int, router: Incarnation, epochs_back: int) -> None:
        key = RequestKey(request=RequestId(f"r{request}"), attempt=Attempt(self.attempts[request]))
        output = self.outputs.get(key)
        if what in ("subscribe", "break", "read", "lose"):
            self.on_stream(what, router, packed=epochs_back > 0)
        elif what == "wait":
            self.now_s += ORPHAN_MS / 2_000
        elif output is None:
            if what == "open":
                self.open(key, router)
        elif what == "append":
            output.append(len(output.tokens), None)
        elif what in ("end", "fail"):
            finish = common_pb2.FINISH_REASON_STOP if what == "end" else None
            output.end(finish=finish, error=None if finish else "failed")
        elif what == "take over":
            self.streams.take_over(output, router)
            self.have[router][key] = Has(epoch=output.epoch, began=0)
        elif what in ("leave", "done"):
            self.say(what, output, router, max(0, output.epoch - epochs_back))
        if output is not None and output.forgotten.is_set():
            self.forget(output)
            self.attempts[request] += output.epoch > 0

    def open(self, key: RequestKey, router: Incarnation) -> None:
        first = self.opened % 3
        self.opened += 1
        output = RequestOutput(key=key, router=router, tokens=list(range(first)), first_index=first)
        self.outputs[key] = output
        self.have[router][key] = Has(epoch=0, began=first)
        self.streams.open(output)

    def say(self, what: str, output: RequestOutput, router: Incarnation, epoch: int) -> None:
        """As `DecodeNode.leave` and `DecodeNode.done` take it."""
        if not output.heeds(router, epoch):
            return
        self.have[router].pop(output.key, None)
        if what == "leave":
            self.streams.leave(output)
        else:
            output.forgotten.set()

    def forget(self, output: RequestOutput) -> None:
        self.streams.close(output)
        del self.outputs[output.key]
        for have in self.have.values():
            have.pop(output.key, None)

    def on_stream(self, what: str, router: Incarnation, *, packed: bool = True) -> None:
        mine = self.subscriptions.get(router)
        if what == "subscribe":
            self.subscribe(router, packed=packed)
        elif mine is not None and what == "break":
            self.streams.detach(self.subscriptions.pop(router))
        elif mine is not None and what == "lose":  # what was sent last does not arrive
            self.streams.collect(mine)
            self.streams.detach(self.subscriptions.pop(router))
        elif mine is not None:
            self.take(router, self.streams.collect(mine))

    def subscribe(self, router: Incarnation, *, packed: bool = True) -> None:
        """As `DecodeService.Subscribe` does it. An older stream is found out about later, or never."""
        self.called[router] = {}
        lost, cursors = [], {}
        for key, has in self.have[router].items():
            output = self.outputs.get(key)
            if output is not None and output.heeds(router, has.epoch):
                cursors[key] = has.began + len(has.ids)
            else:
                lost.append((key, has.epoch, True))
        self.subscriptions[router] = self.streams.attach(router, cursors, lost, packed=packed)

    def take(self, router: Incarnation, batch: decode_pb2.TokenBatch) -> None:
        """Each index comes once and in order, from where the router began, and only to the router that has it. So it is
        in arrays, by numbers that were told before and are never another's; who does not understand them gets none."""
        packed, called = self.subscriptions[router].packed, self.called[router]
        assert packed or not (batch.numbers or any(message.number for message in batch.requests))
        for message in batch.requests:
            key = RequestKey(request=RequestId(message.key.request), attempt=Attempt(message.key.attempt))
            has = self.have[router].get(key)
            if message.error_reason == Reason.TAKEN_OVER.value:
                output = self.outputs.get(key)
                assert output is None or not output.heeds(router, message.key.epoch)
                if has is not None and has.epoch == message.key.epoch:
                    del self.have[router][key]
                continue
            assert has is not None and self.outputs[key].heeds(router, has.epoch)
            assert message.key.epoch == has.epoch and not (has.ended and message.ids)
            assert message.first_index == has.began + len(has.ids)
            has.ids.extend(message.ids)
            has.ended = message.HasField("finish") or message.HasField("error")
            if packed:
                assert message.number
                assert called.setdefault(message.number, (key, has.epoch)) == (key, has.epoch)
        for number, index, token in zip(batch.numbers, batch.indices, batch.tokens, strict=True):
            key, epoch = called[number]
            has = self.have[router][key]
            assert self.outputs[key].heeds(router, epoch) and epoch == has.epoch and not has.ended
            assert index == has.began + len(has.ids)
            has.ids.append(token)

    def check(self) -> None:
        streams = self.streams
        for output in self.outputs.values():
            owners = [router for router, of in streams._of_router.items() if output.key in of]
            assert owners == ([] if output.left else [output.router])
        assert set(streams._of_router) == {output.router for output in self.outputs.values() if not output.left}
        assert set(streams._away_since_s) == set(streams._of_router) - set(self.subscriptions)
        assert len(streams) == len(self.outputs)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(OPS),
            st.integers(0, REQUESTS - 1),
            st.sampled_from(ROUTERS),
            st.integers(0, 2),
        ),
        min_size=10,
        max_size=60,
    )
)
@settings(max_examples=100)
def test_whatever_routers_say_each_answer_has_one_owner(steps: list[tuple[str, int, Incarnation, int]]) -> None:
    """Answers begin, grow, end and fail; routers subscribe (and understand arrays, or not), read, lose a message with
    their stream, leave, take over and acknowledge, by the epoch by which they have a request or by an older one. At
    each step an answer has one router or none, and each router gets each index once, in order, from where it began.
    At last who has lost a request knows, every owner has all of its answers, those that nobody has or reads are
    orphans, and when all are forgotten nothing is left."""
    world = World()
    for request, router in enumerate(ROUTERS):
        world.subscribe(router)
        world.play("open", request, router, 0)
        world.play("append", request, router, 0)
        world.on_stream("read", router)
    for step in steps:
        world.play(*step)
        world.check()
    for router in ROUTERS:
        if router in world.subscriptions:
            world.on_stream("read", router)
            assert all(world.outputs[key].heeds(router, has.epoch) for key, has in world.have[router].items())
        world.subscribe(router)
        world.on_stream("read", router)
    for output in world.outputs.values():
        if not output.left:
            has = world.have[output.router][output.key]
            assert has.ids == output.tokens[has.began :] and has.ended is output.ended.is_set()
    world.now_s += ORPHAN_MS / 1_000
    running = {key for key, output in world.outputs.items() if output.finish is None}
    left = {key for key in running if world.outputs[key].left}
    assert {output.key for output in world.streams.orphans(orphan_ms=ORPHAN_MS, resume_ms=10 * ORPHAN_MS)} == left
    for router in ROUTERS:
        world.on_stream("break", router)
    world.now_s += ORPHAN_MS / 1_000
    assert {output.key for output in world.streams.orphans(orphan_ms=ORPHAN_MS, resume_ms=10 * ORPHAN_MS)} == running
    for output in list(world.outputs.values()):
        world.forget(output)
    world.check()
    assert not world.streams._outputs and not world.streams._of_router and not world.streams._away_since_s


def test_tokens_before_those_drawn_here_come_without_log_probabilities() -> None:
    """The attempt began behind two tokens. The router that takes it over gets these in a message of their own, then
    those that were drawn here, each with its log-probabilities."""
    streams = TokenStreams(lambda: 0.0)
    key = RequestKey(request=RequestId("one"), attempt=Attempt(3))
    output = RequestOutput(key=key, router=ROUTERS[0], tokens=[1, 2], first_index=2)
    streams.open(output)
    for token in (3, 4):
        output.append(token, common_pb2.TokenLogprobs(logprob=-token))
    (first,) = streams.collect(streams.attach(ROUTERS[0], {})).requests
    assert (first.first_index, list(first.ids), len(first.logprobs)) == (2, [3, 4], 2)
    streams.take_over(output, ROUTERS[1])
    earlier, drawn = streams.collect(streams.attach(ROUTERS[1], {})).requests
    assert (earlier.first_index, list(earlier.ids), len(earlier.logprobs)) == (0, [1, 2], 0)
    assert (drawn.first_index, list(drawn.ids), [each.logprob for each in drawn.logprobs]) == (2, [3, 4], [-3, -4])
    assert earlier.key == drawn.key == common_pb2.RequestKey(request="one", attempt=3, epoch=1)
    again = streams.collect(streams.attach(ROUTERS[1], {key: 1})).requests
    assert [(each.first_index, list(each.ids), len(each.logprobs)) for each in again] == [(1, [2], 0), (2, [3, 4], 2)]


def test_one_plain_token_of_a_request_that_has_a_number_comes_in_arrays() -> None:
    """The first message of a request says its number. Then a step's plain tokens are three arrays; two tokens at once,
    log-probabilities and the end are messages. Another stream, and another epoch, give other numbers."""
    streams = TokenStreams(lambda: 0.0)
    keys = [RequestKey(request=RequestId(name), attempt=Attempt(0)) for name in "abc"]
    first, second, scored = outputs = [RequestOutput(key=key, router=ROUTERS[0]) for key in keys]
    for output in outputs:
        streams.open(output)
        output.append(7, common_pb2.TokenLogprobs(logprob=-1) if output is scored else None)
    mine = streams.attach(ROUTERS[0], {}, packed=True)
    batch = streams.collect(mine)
    assert [(each.key.request, each.number) for each in batch.requests] == [("a", 1), ("b", 2), ("c", 3)]
    assert not batch.numbers
    for output in outputs:
        output.append(8, common_pb2.TokenLogprobs(logprob=-2) if output is scored else None)
    batch = streams.collect(mine)
    assert [(list(each.ids), each.key.request) for each in batch.requests] == [([8], "c")]
    assert (list(batch.numbers), list(batch.indices), list(batch.tokens)) == ([1, 2], [1, 1], [8, 8])
    for token in (9, 10):
        first.append(token, None)
    second.append(11, None)
    second.end(finish=common_pb2.FINISH_REASON_LENGTH)
    batch = streams.collect(mine)
    said = [(each.number, each.first_index, list(each.ids)) for each in batch.requests]
    assert said == [(1, 2, [9, 10]), (2, 2, [11])]
    assert not batch.numbers
    streams.take_over(first, ROUTERS[0])
    (whole,) = streams.collect(mine).requests
    assert (whole.number, whole.key.epoch, list(whole.ids)) == (4, 1, [7, 8, 9, 10])
    first.append(12, None)
    assert list(streams.collect(mine).numbers) == [4]
    again = streams.attach(ROUTERS[0], {keys[0]: 4, keys[1]: 3, keys[2]: 2}, packed=True)
    (message,) = [each for each in streams.collect(again).requests if each.key.request == "a"]
    assert message.number and (message.key.epoch, message.first_index, list(message.ids)) == (1, 4, [12])


def test_only_outputs_with_news_are_looked_at() -> None:
    """Of a thousand answers one grows: a step looks at that one. Nothing is looked at again once it is sent or is
    another's."""
    streams = TokenStreams(lambda: 0.0)
    outputs = [
        RequestOutput(key=RequestKey(request=RequestId(str(number)), attempt=Attempt(0)), router=ROUTERS[0])
        for number in range(1_000)
    ]
    mine = streams.attach(ROUTERS[0], {}, packed=True)
    for output in outputs:
        streams.open(output)
    streams.collect(mine)
    outputs[500].append(1, None)
    assert mine.fresh == [outputs[500]]
    streams.collect(mine)
    outputs[501].append(1, None)
    streams.leave(outputs[501])
    assert not streams.collect(mine).requests
    assert not mine.fresh


def test_a_router_that_takes_over_has_its_own_time_to_come() -> None:
    """A router without a stream has had another answer for long. One that it takes over now is no orphan before the
    whole time has passed since then; nor is one that is left now."""
    now_s = 0.0
    streams = TokenStreams(lambda: now_s)
    outputs = [
        RequestOutput(key=RequestKey(request=RequestId(name), attempt=Attempt(0)), router=router)
        for name, router in (("a", ROUTERS[0]), ("b", ROUTERS[1]), ("c", ROUTERS[1]))
    ]
    for output in outputs:
        streams.open(output)
    streams.attach(ROUTERS[1], {})
    now_s = 0.9
    streams.take_over(outputs[1], ROUTERS[0])
    streams.leave(outputs[2])
    now_s = 1.1
    assert streams.orphans(orphan_ms=ORPHAN_MS, resume_ms=10 * ORPHAN_MS) == [outputs[0]]
    now_s = 2.0
    assert streams.orphans(orphan_ms=ORPHAN_MS, resume_ms=10 * ORPHAN_MS) == outputs


def test_the_finished_answer_of_a_router_that_is_away_is_kept_for_as_long_as_its_client_may_come_back() -> None:
    """Two answers are finished, one of them resumable, and their router has no stream. The resumable one is kept for
    `resume_ms`; the other one waits for its router."""
    now_s = 0.0
    streams = TokenStreams(lambda: now_s)
    outputs = [
        RequestOutput(
            key=RequestKey(request=RequestId(name), attempt=Attempt(0)), router=ROUTERS[0], resumable=resumable
        )
        for name, resumable in (("a", common_pb2.Resumable(tag=b"a")), ("b", None))
    ]
    for output in outputs:
        streams.open(output)
        output.end(finish=common_pb2.FINISH_REASON_LENGTH)
    now_s = 2.9
    assert streams.orphans(orphan_ms=1_000, resume_ms=3_000) == []
    now_s = 3.0
    assert streams.orphans(orphan_ms=1_000, resume_ms=3_000) == outputs[:1]


def test_finished_answers_that_nobody_has_are_bounded_in_bytes() -> None:
    """Five answers of 4,000 bytes, the second of which goes on and the fourth of which its router still has. Of the
    others the newest that fit are kept."""
    streams = TokenStreams(lambda: 0.0)
    outputs = [
        RequestOutput(key=RequestKey(request=RequestId(name), attempt=Attempt(0)), router=ROUTERS[0], tokens=[1] * 100)
        for name in "abcde"
    ]
    for output in outputs:
        streams.open(output)
        assert output.bytes == 4_000
        if output is not outputs[1]:
            output.end(finish=common_pb2.FINISH_REASON_LENGTH)
        if output is not outputs[3]:
            streams.leave(output)
    streams.drop_left(8_000)
    assert [output.forgotten.is_set() for output in outputs] == [True, False, False, False, False]
    streams.drop_left(7_999)
    assert [output.forgotten.is_set() for output in outputs] == [True, False, True, False, False]


def test_an_answer_that_has_ended_does_not_grow() -> None:
    """The router has seen its end in the text while the next token was being drawn. That one is dropped."""
    output = RequestOutput(key=RequestKey(request=RequestId("one"), attempt=Attempt(0)), router=ROUTERS[0], tokens=[1])
    output.end(finish=common_pb2.FINISH_REASON_STOP)
    output.append(2, None)
    assert output.tokens == [1]


@pytest.mark.parametrize("left_first", [False, True])
@pytest.mark.parametrize("finish", [None, common_pb2.FINISH_REASON_LENGTH])
def test_a_failed_answer_that_nobody_has_is_of_no_use(left_first: bool, finish: common_pb2.FinishReason | None) -> None:
    """It fails, and is left before or after that: it is forgotten at once. One that has finished is kept."""
    streams = TokenStreams(lambda: 0.0)
    output = RequestOutput(key=RequestKey(request=RequestId("one"), attempt=Attempt(0)), router=ROUTERS[0])
    streams.open(output)
    if left_first:
        streams.leave(output)
    output.end(finish=finish, error=None if finish else "failed")
    if not left_first:
        assert not output.forgotten.is_set(), "its router is to learn of it"
        streams.leave(output)
    assert output.forgotten.is_set() is (finish is None)


@pytest.mark.parametrize("top", [None, 20])
def test_answers_that_come_whole_take_several_messages(top: int | None) -> None:
    """Many long answers are taken over at once, some with all log-probabilities that may be asked for: no message is as
    large as a peer refuses, each index comes once, and each end comes last."""
    streams, length, began = TokenStreams(lambda: 0.0), 20_000, 7_000
    logprobs = common_pb2.TokenLogprobs(logprob=-1.5, top_ids=[120_000] * (top or 0), top_logprobs=[-2.5] * (top or 0))
    keys = [RequestKey(request=RequestId(f"r{number}"), attempt=Attempt(0)) for number in range(8)]
    for key in keys:
        output = RequestOutput(key=key, router=ROUTERS[0], tokens=[120_000] * began, first_index=began)
        for _ in range(length - began):
            output.append(120_000, logprobs if top is not None else None)
        streams.open(output)
        streams.take_over(output, ROUTERS[1])
        output.end(finish=common_pb2.FINISH_REASON_STOP)
    mine, had, ended = streams.attach(ROUTERS[1], {}), dict.fromkeys((key.request for key in keys), 0), []
    while mine.news.is_set():
        mine.news.clear()
        batch = streams.collect(mine)
        assert batch.ByteSize() <= BATCH_BYTES_MAX + 1_000
        for message in batch.requests:
            assert message.first_index == had[RequestId(message.key.request)]
            had[RequestId(message.key.request)] += len(message.ids)
            assert len(message.logprobs) == (len(message.ids) if top and message.first_index >= began else 0)
            if message.HasField("finish"):
                assert had[RequestId(message.key.request)] == length
                ended.append(message.key.request)
    assert set(had.values()) == {length}
    assert sorted(ended) == sorted(had)


def test_an_answer_that_its_client_gets_in_one_piece_makes_few_messages() -> None:
    """Four answers have begun, one of them for a client that reads along. Then its tokens alone wake the stream. The
    others' make a message where so many wait that no more are to be lost with the node, or with an end; half as many go
    with others' messages."""
    streams = TokenStreams(lambda: 0.0)
    keys = [RequestKey(request=RequestId(f"r{i}"), attempt=Attempt(0)) for i in range(4)]
    read, *others = outputs = [RequestOutput(key=key, router=ROUTERS[0], whole=i > 0) for i, key in enumerate(keys)]
    mine = streams.attach(ROUTERS[0], {}, packed=True)
    for output in outputs:
        streams.open(output)
        output.append(0, None)
    assert mine.news.is_set()
    assert [message.key.request for message in streams.collect(mine).requests] == ["r0"]

    def said() -> list[tuple[int, int]]:
        """Number and index of each token that comes now."""
        mine.news.clear()
        batch = streams.collect(mine)
        singles = [*zip(batch.numbers, batch.indices, strict=True)]
        return sorted(singles + [(m.number, m.first_index + i) for m in batch.requests for i in range(len(m.ids))])

    mine.news.clear()
    read.append(1, None)
    assert mine.news.is_set()
    assert said() == [(1, 1)]
    for index in range(1, WHOLE_TOKENS_MAX):
        assert not mine.news.is_set()
        others[0].append(index, None)
        if index < WHOLE_TOKENS_MAX // 2 - 1:
            others[1].append(index, None)
    assert mine.news.is_set()
    assert said() == [(2, index) for index in range(WHOLE_TOKENS_MAX)]
    others[1].append(WHOLE_TOKENS_MAX // 2 - 1, None)
    assert not mine.news.is_set()
    read.append(2, None)
    assert said() == [(1, 2), *((3, index) for index in range(WHOLE_TOKENS_MAX // 2))]
    assert not mine.news.is_set()
    others[2].end(finish=common_pb2.FINISH_REASON_LENGTH)
    assert mine.news.is_set()
    assert said() == [(4, 0)]
