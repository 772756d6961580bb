"""router.resume: whatever a client has of an answer, it gets the rest, each token and each character once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from batonpb import common_pb2, inference_pb2, resume_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId
from router.request import CheckedRequest
from router.resume import (
    RESUMABLE_ANSWERS_MAX,
    TOKEN_CHARS_MAX,
    Place,
    Places,
    Resume,
    ResumeToken,
    Unseen,
    check_same,
    request_digest,
    tag,
    tokens_crc,
)
from router.text import AnswerText
from tests.unit.router.test_text import CODEC, VOCAB

ID = RequestId("0123456789abcdef" * 2)
SECRET = bytes(range(16))
FIRST = (ID, Attempt(0), Incarnation(7))
NOTHING = Place()
HTTP = resume_pb2.HttpCall(id="mine", created_unix_s=1_700_000_000, chat=True, n=2)
Event = inference_pb2.GenerateEvent


def events_of(ids: Sequence[int], sizes: Sequence[int], stops: Sequence[str]) -> list[Event]:
    """All events of an answer of these tokens, in batches of these sizes over and over."""
    sampling = common_pb2.SamplingSpec(max_tokens=len(ids), logprobs=0)
    text = AnswerText(CODEC, CheckedRequest(prompt=(1,), sampling=sampling, stop=tuple(stops), include_stop=False))
    made, start, turn = [], 0, 0
    while start < len(ids) and not text.found:
        batch = ids[start : start + sizes[turn % len(sizes)]]
        taken, new = text.push(batch)
        logprobs = [common_pb2.TokenLogprobs(logprob=-start - i) for i in range(taken)]
        made.append(
            Event(tokens=inference_pb2.Tokens(first_index=start, ids=batch[:taken], text=new, logprobs=logprobs))
        )
        start, turn = start + taken, turn + 1
    if rest := text.flush():
        made.append(Event(tokens=inference_pb2.Tokens(first_index=text.tokens, text=rest)))
    return [*made, Event(finished=inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP))]


def for_client(unseen: Unseen, event: Event) -> Event | None:
    """What the client gets of it."""
    if event.HasField("tokens"):
        all_ = event.tokens
        if (known := unseen.take(all_.first_index, all_.ids, all_.text)) is None:
            return None
        seen, chars = known
        new = inference_pb2.Tokens(
            first_index=all_.first_index + seen,
            ids=all_.ids[seen:],
            text=all_.text[chars:],
            logprobs=all_.logprobs[seen:],
        )
        return Event(tokens=new)
    return event if event.HasField("started") or unseen.end() else None


def served(events: Sequence[Event], had: Place = NOTHING, *, attempt: int = 0) -> Iterator[tuple[Event, Place]]:
    """What a client that has `had` gets, and the place behind each event."""
    unseen = Unseen(had)
    for event in events:
        if (new := for_client(unseen, event)) is not None:
            yield new, unseen.place(ID, Attempt(attempt), Incarnation(7))


def put_together(events: Sequence[Event]) -> tuple[list[int], str, list[float], list[int]]:
    ids: list[int] = []
    for event in events:
        if event.HasField("tokens"):
            assert event.tokens.first_index == len(ids)
            ids += event.tokens.ids
    texts = "".join(event.tokens.text for event in events)
    logprobs = [each.logprob for event in events for each in event.tokens.logprobs]
    return ids, texts, logprobs, [i for i, event in enumerate(events) if event.HasField("finished")]


sizes_lists = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(
    ids=st.lists(st.integers(0, VOCAB - 1), max_size=40)
    | st.text("ab🦊", max_size=20).map(lambda text: list(CODEC.encode(text))),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(sizes_lists, min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 50), min_size=3, max_size=3),
)
def test_an_answer_cut_anywhere_and_taken_up_is_the_whole_answer(
    ids: list[int], stops: list[str], sizes: list[list[int]], cuts: list[int]
) -> None:
    """A client loses its connection three times, inside a character and a held-back stop string too, and each time the
    answer comes from index 0 in other batches: put together, it has exactly what a client without trouble has."""
    whole = put_together(events_of(ids, sizes[0], stops))
    got: list[Event] = []
    place = Place()
    for attempt, (cut, batches) in enumerate(zip([*cuts, 99], sizes, strict=True)):
        for event, behind in list(served(events_of(ids, batches, stops), place, attempt=attempt))[:cut]:
            got.append(event)
            place = ResumeToken.decode(Resume(secret=SECRET, seed=1, digest=2).token(behind).encode()).places[0]
    *together, ends = put_together(got)
    assert (*together,) == whole[:3]
    assert ends == [len(got) - 1]
    assert (place.tokens, place.chars, place.finished) == (len(whole[0]), len(whole[1]), True)


def test_a_client_that_has_all_gets_nothing_again() -> None:
    """It had read the end when its connection was lost."""
    events = events_of(list(CODEC.encode("abc")), [2], [])
    *_, (_, end) = served(events)
    assert list(served(events, end)) == []


def test_tokens_may_be_there_before_the_finished_event_is() -> None:
    """Cut between the last token and the end: only what the end brings is sent."""
    ids = list(CODEC.encode("ok🦊"))[:-1]
    events = events_of(ids, [9], [])
    (_, behind), *rest = served(events)
    assert [event.tokens.text for event, _ in served(events, behind)] == ["�", ""]
    assert [event for event, _ in served(events, behind)] == [event for event, _ in rest]


@pytest.mark.parametrize("other", [[1, 9, 3, 4], [1, 2]], ids=["another token", "ends earlier"])
def test_an_answer_that_comes_out_otherwise_is_refused(other: list[int]) -> None:
    """Computed again, the answer differs in what the client has: it is told so, and gets not one token of it."""
    (_, behind), *_ = served(events_of([1, 2, 3, 4], [3], []))
    with pytest.raises(BatonError) as raised:
        next(served(events_of(other, [4], []), behind))
    assert raised.value.reason is Reason.NOT_RESUMABLE


def test_the_place_of_a_client_stays_until_it_gets_more() -> None:
    """It attaches and loses its connection again before the first new token: it has what it had."""
    had = Place(request=ID, tokens=3, chars=3, crc=tokens_crc([1, 2, 3]))
    unseen = Unseen(had)
    for_client(unseen, events_of([1, 2, 3], [2], [])[0])
    assert unseen.place(*FIRST) == replace(had, decode=Incarnation(7))


places = st.builds(
    Place,
    request=st.binary(min_size=16, max_size=16).map(lambda raw: RequestId(raw.hex())) | st.just(RequestId("")),
    attempt=st.integers(0, 2**32 - 1).map(Attempt),
    decode=st.integers(0, 2**64 - 1).map(Incarnation),
    tokens=st.integers(0, 2**32 - 1),
    chars=st.integers(0, 2**32 - 1),
    crc=st.integers(0, 2**32 - 1),
    finished=st.booleans(),
)


@given(st.lists(places, min_size=1, max_size=RESUMABLE_ANSWERS_MAX), st.integers(0, 2**64 - 1))
def test_a_token_says_what_it_was_made_of(chosen: list[Place], number: int) -> None:
    """It goes into a header: letters, digits, - and _, not many."""
    token = ResumeToken(secret=SECRET, seed=number, digest=number ^ 1, places=tuple(chosen))
    text = token.encode()
    assert len(text) <= TOKEN_CHARS_MAX
    assert text.replace("-", "").replace("_", "").isalnum()
    assert ResumeToken.decode(text) == token
    assert text not in repr(token)
    assert str(SECRET) not in repr(token)


@given(st.text(max_size=40) | st.binary(max_size=60).map(lambda raw: raw.hex()) | st.just("A" * (TOKEN_CHARS_MAX + 1)))
def test_anything_else_is_refused_by_its_field(text: str) -> None:
    """Clients send anything; the error does not repeat it."""
    with pytest.raises(BatonError) as raised:
        ResumeToken.decode(text, field="Last-Event-ID")
    assert (raised.value.reason, raised.value.field) == (Reason.BAD_FIELD, "Last-Event-ID")


def test_places_of_several_answers_become_one_token() -> None:
    """Two answers, of which the second has begun: the token has a place for each."""
    resume = Resume(secret=SECRET, seed=1, digest=2)
    second = Place(request=ID, tokens=1, chars=1, crc=3)
    both = Places(replace(resume.token(Place(), Place()), http=HTTP))
    for behind in (second, replace(second, finished=True)):
        both.follow(1, behind, text_offset=4, prompt_tokens=5)
        noted = replace(behind, text_offset=4, prompt_tokens=5 if behind.finished else 0)
        assert ResumeToken.decode(both.token()) == replace(resume.token(Place(), noted), http=HTTP)


def test_what_chunks_say_is_checked() -> None:
    """The id goes into headers and logs, and answers are divided by prompts: a token that says nonsense is none."""
    token = replace(Resume(secret=SECRET, seed=1, digest=2).token(Place(), Place()), http=HTTP)
    assert ResumeToken.decode(token.encode()) == token
    for wrong in ({"id": ""}, {"id": "a\r\nb: c"}, {"n": 0}, {"n": 3}):
        http = resume_pb2.HttpCall()
        http.CopyFrom(HTTP)
        for name, value in wrong.items():
            setattr(http, name, value)
        with pytest.raises(BatonError) as raised:
            ResumeToken.decode(replace(token, http=http).encode(), field="Last-Event-ID")
        assert (raised.value.reason, raised.value.field) == (Reason.BAD_FIELD, "Last-Event-ID")


def test_whoever_goes_on_with_an_answer_knows_whether_its_text_has_special_tokens() -> None:
    """Of an HTTP chat that is split, over gRPC too: places count its characters."""
    for reading in (None, resume_pb2.AnswerReading()):
        http = resume_pb2.HttpCall(id="mine", n=1, reading=reading)
        token = replace(Resume(secret=SECRET, seed=1, digest=2).token(Place()), http=http)
        assert Resume.attach(ResumeToken.decode(token.encode())).reading == reading


def test_only_the_key_that_began_it_has_the_tag() -> None:
    """Another key's, and one whose name runs into the secret's end, are others."""
    assert len({tag(SECRET, None), tag(SECRET, "a"), tag(SECRET, "b"), tag(SECRET[:-1], "\x0f")}) == 4
    assert Resume(secret=SECRET, seed=1, digest=2).tag(None) == tag(SECRET, "")


def test_ids_that_a_client_says_must_be_those_that_were_sent() -> None:
    """One more, or another one, is refused; none are fine."""
    token = Resume(secret=SECRET, seed=1, digest=2).token(Place(request=ID, tokens=2, crc=tokens_crc([5, 6])))
    assert Resume.attach(token, said=[5, 6]).said == (5, 6)
    assert Resume.attach(token).said == ()
    for said in ([5], [5, 7], [5, 6, 7]):
        with pytest.raises(BatonError) as raised:
            Resume.attach(token, said=said)
        assert (raised.value.reason, raised.value.field) == (Reason.BAD_FIELD, "output")


def test_a_repeated_request_must_be_the_same() -> None:
    """The seed may have been drawn by the router, so it does not count; everything else does."""
    request = inference_pb2.GenerateRequest(text="a", sampling=inference_pb2.Sampling(temperature=0))
    request.sampling.logit_bias.update({1: 2.0, 3: 4.0})
    token = ResumeToken(secret=SECRET, seed=1, digest=request_digest([request], 1), places=(Place(),))
    again = inference_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.sampling.seed = 5
    again.resumable = True
    check_same(token, [again], field="resume_token")
    others = [inference_pb2.GenerateRequest() for _ in range(4)]
    for other in others:
        other.CopyFrom(request)
    others[0].text = "b"
    others[1].sampling.stop.append("a")
    others[2].token_ids.ids.append(1)
    others[3].cache_salt = "a"
    for other, answers in [*((other, 1) for other in others), (request, 2)]:
        with pytest.raises(BatonError) as raised:
            check_same(token, [other], answers, field="resume_token")
        assert (raised.value.reason, raised.value.field) == (Reason.BAD_FIELD, "resume_token")
