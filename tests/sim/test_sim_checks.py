"""The simulator's own checkers: what is wrong is seen, at once, and by whom it was meant to be seen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2

from baton.ids import BlockId, GrantId, RequestId
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import GrantState
from router.resume import Place, ResumeToken, tokens_crc
from tests.sim.books import LedgerWatch
from tests.sim.engine import ATTEMPTS, reference
from tests.sim.profiles import BLOCK_SIZE, OUTPUT_TOKENS_MAX
from tests.sim.reader import Question, Reader
from tests.sim.tally import Result, Tally

GRANT = GrantId(b"g" * 16)


class Watched:
    """A ledger of six blocks in a process that grants, and what its watch has said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.grants: dict[GrantId, Any] = {}
        self.touched: dict[LedgerWatch, None] = {}
        receiver = SimpleNamespace(grants=SimpleNamespace(_grants=self.grants))
        process: Any = SimpleNamespace(
            name="decode-0",
            alive=True,
            receiver=receiver,
            cluster=SimpleNamespace(violation=self.said.append),
            loop=SimpleNamespace(world=SimpleNamespace(touched=self.touched)),
        )
        self.ledger = Ledger(6)
        self.watch = LedgerWatch(self.ledger, process)

    def step(self) -> list[str]:
        """The callback is over: what is said of it."""
        for watch in self.touched:
            watch.look()
        self.touched.clear()
        said, self.said[:] = list(self.said), []
        return said

    def grant(self, state: GrantState) -> list[BlockId]:
        """Two blocks of a writer, by the ledger and by the grants."""
        blocks = self.ledger.take(2)
        self.ledger.give_writer(blocks, GRANT)
        self.grants[GRANT] = SimpleNamespace(state=state, blocks=tuple(blocks))
        return blocks


def test_a_request_from_its_grant_to_its_end_is_in_order() -> None:
    """Taken, given to a writer, promised, committed, indexed, dropped, evicted: nothing to say after any step."""
    w = Watched()
    blocks = w.grant(GrantState.RESERVED)
    w.ledger.promise(GRANT, 3)
    assert w.step() == []
    w.ledger.writer_gone(blocks, GRANT)
    w.grants[GRANT].state = GrantState.COMMITTED
    assert w.step() == []
    blocks += w.ledger.take(1, promise=GRANT)
    w.ledger.mark_cached(blocks[0])
    assert w.step() == []
    w.ledger.unpromise(GRANT)
    w.ledger.drop(blocks)
    assert w.step() == []
    w.ledger.evict(blocks[0])
    assert w.step() == []
    assert w.watch.free == set(range(6)) and w.watch.promised == 0


def _freed_while_written(w: Watched) -> None:
    w.ledger._free.append(w.grant(GrantState.WRITING)[0])


def _freed_twice(w: Watched) -> None:
    w.ledger._put_free(BlockId(3))


def _lost(w: Watched) -> None:
    w.ledger._holds[w.ledger.take(1)[0]] = 0


def _promised_too_much(w: Watched) -> None:
    w.ledger.take(4)
    w.ledger._promises[GRANT] = 3


def _writer_kept(w: Watched) -> None:
    w.grant(GrantState.RELEASED)


def _writer_let_go_early(w: Watched) -> None:
    blocks = w.grant(GrantState.REVOKING)
    assert w.step() == []
    w.ledger.writer_gone(blocks, GRANT)


def _quarantined_for_nobody(w: Watched) -> None:
    w.ledger._quarantined[w.ledger.take(1)[0]] = True


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (_freed_while_written, "in the free list: True"),
        (_freed_twice, "block 3 is twice in the free list"),
        (_lost, "in the free list: False"),
        (_promised_too_much, "3 blocks promised, 2 could be given"),
        (_writer_kept, "whose grant is namespace(state=<GrantState.RELEASED"),
        (_writer_let_go_early, "is gone, whose grant is GrantState.REVOKING"),
        (_quarantined_for_nobody, "quarantined, and has no writer"),
    ],
)
def test_what_is_wrong_with_a_block_is_said_after_the_same_step(break_it: Callable[[Watched], None], says: str) -> None:
    """Each mistake in a node's books is told once the callback that made it is over."""
    w = Watched()
    break_it(w)
    said = w.step()
    assert any(says in line for line in said), said


def test_changes_that_cannot_be_watched_are_refused() -> None:
    """A ledger that one day changes its books in another way breaks the simulation instead of going unwatched."""
    w = Watched()
    changes: tuple[Callable[[], None], ...] = (
        lambda: w.ledger._free.extend([BlockId(1)]),
        lambda: w.ledger._holds.clear(),
        lambda: w.ledger._promises.update({GRANT: 1}),
    )
    for change in changes:
        with pytest.raises(AssertionError, match="not watched"):
            change()


PROMPT = tuple(range(1, 60))


def _answer(attempts: list[int]) -> list[int]:
    return reference(PROMPT, 0, attempts, BLOCK_SIZE)


def _right(_question: Question, attempts: list[int], attempt: int) -> list[int]:
    return _answer(attempts + [attempt] * (OUTPUT_TOKENS_MAX - len(attempts)))


def _read(parts: list[tuple[int, list[int]]], count: int = 32) -> Reader:
    question = Question(prompt=PROMPT, output_tokens=count, seed=0)
    reader = Reader(question=question, right=_right)
    reader.take(inference_pb2.GenerateEvent(started=inference_pb2.Started()))
    for first_index, ids in parts:
        tokens = inference_pb2.Tokens(first_index=first_index, ids=ids)
        reader.take(inference_pb2.GenerateEvent(tokens=tokens))
    return reader


def test_an_answer_of_one_attempt_or_of_rising_ones_is_right() -> None:
    """Whole from one attempt; begun by the first one and ended by the fourth, in parts of any size."""
    one = _answer([0] * 32)
    assert _read([(0, one)]).wrong == ""
    several = _answer([0] * 7 + [3] * 25)
    reader = _read([(0, several[:5]), (5, several[5:9]), (9, several[9:])])
    assert reader.wrong == "" and reader.attempts == 2
    finished = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, stats={"output_tokens": 32})
    reader.take(inference_pb2.GenerateEvent(finished=finished))
    assert reader.wrong == "" and reader.finished


def test_a_mixed_repeated_or_wrong_answer_is_found() -> None:
    """A token of an attempt that is over, an index twice, one left out, a wrong token; without log-probabilities."""
    back = _answer([0] * 4 + [1] * 4 + [0] * 24)
    assert "is of attempt 0, the one before it of attempt 1" in _read([(0, back)]).wrong
    one = _answer([0] * 32)
    assert "token index 2 where 3 is next" in _read([(0, one[:3]), (2, one[2:])]).wrong
    assert "token index 4 where 3 is next" in _read([(0, one[:3]), (4, one[4:])]).wrong
    assert "by definition" in _read([(0, [*one[:3], one[3] + ATTEMPTS])]).wrong
    assert "by definition" in _read([(0, [*one[:3], one[4]])]).wrong


RUNS = ("11" * 16, "22" * 16)


def _attached(parts: list[tuple[str, int, list[int]]], *, place: int | None = None) -> Reader:
    """A resumable request whose parts come from these runs, each by a call of its own where the run changes. The last
    place counts `place` tokens, where that is said."""
    reader = Reader(question=Question(prompt=PROMPT, output_tokens=32, seed=0, resumable=True), right=_right)
    run, had = "", list[int]()
    for number, (new_run, first_index, ids) in enumerate(parts):
        if new_run != run:
            run, reader = new_run, reader.fork()
            reader.take(_event(run, had, started=inference_pb2.Started()))
        had += ids
        count = len(had) if place is None or number < len(parts) - 1 else place
        reader.take(_event(run, had[:count], tokens=inference_pb2.Tokens(first_index=first_index, ids=ids)))
        if reader.wrong:
            break
    return reader


def _event(run: str, had: list[int], **event: Any) -> inference_pb2.GenerateEvent:
    place = Place(request=RequestId(run), tokens=len(had), crc=tokens_crc(had))
    token = ResumeToken(secret=b"s" * 16, seed=0, digest=0, places=(place,))
    return inference_pb2.GenerateEvent(resume_token=token.encode(), **event)


def test_an_answer_over_several_calls_is_one_answer() -> None:
    """The first attempt of another run goes on behind the second one of the first run: each index once, in order."""
    one, other = RUNS
    ids = _answer([0] * 3 + [1] * 5 + [0] * 24)
    reader = _attached([(one, 0, ids[:5]), (one, 5, ids[5:8]), (other, 8, ids[8:])])
    assert reader.wrong == "" and reader.runs == RUNS and len(reader.tokens) == 32


def test_what_is_wrong_with_an_answer_over_several_calls_is_found() -> None:
    """Tokens twice or left out after an attach, a run that is back, a lower attempt in one run, a wrong place."""
    one, other = RUNS
    ids = _answer([0] * 32)
    assert "token index 3 where 5 is next" in _attached([(one, 0, ids[:5]), (other, 3, ids[3:])]).wrong
    assert "token index 6 where 5 is next" in _attached([(one, 0, ids[:5]), (other, 6, ids[6:])]).wrong
    back = [(one, 0, ids[:5]), (other, 5, ids[5:9]), (one, 9, ids[9:])]
    assert "a run that another has followed is back" in _attached(back).wrong
    lower = _answer([1] * 5 + [0] * 27)
    assert "is of attempt 0, the one before it of attempt 1" in _attached([(one, 0, lower)]).wrong
    assert "its place says" in _attached([(one, 0, ids[:5])], place=4).wrong
    plain = _read([(0, ids)])
    plain.take(_event(one, ids, finished=inference_pb2.Finished()))
    assert "with the resume token" in plain.wrong


def test_runs_are_added_up() -> None:
    """The sum of two runs, the second with a violation: that is what the long run's record is made of."""

    def result(seed: int, violations: list[str]) -> Result:
        return Result(
            seed=seed,
            profile="small",
            digest="0",
            requests=10,
            complete=6,
            lost={"PEER_UNREACHABLE of the way to router-0": 2},
            refused=1,
            left=1,
            tokens=200,
            attempts_later=1,
            faults={"crash": 3},
            deaths=3,
            callbacks=1000,
            simulated_s=2.0,
            wall_s=1.0,
            cpu_s=0.5,
            violations=violations,
        )

    tally = Tally()
    tally.add(result(1, []))
    tally.add(result(2, ["late write"]))
    reported = tally.reported(wall_s=1.0)
    assert "2 runs (2 small); 20 requests: 12 complete (2 of several attempts), 4 ended by an error" in reported
    assert "4 PEER_UNREACHABLE of the way to router, 2 refused" in reported
    assert "6 faults (crash 6), 6 deaths" in reported
    assert "1 violations; 20 requests a second of one core (1 s), 20 a second in all (1 s)" in reported
