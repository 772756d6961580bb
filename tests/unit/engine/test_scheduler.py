"""The exact batches of each scheduling situation. The runner is played by hand: token 7 is drawn every time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import Attempt, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.scheduler import EngineFullError, Scheduler, SchedulerConfig, Sequence, SequenceMode
from engine.types import SamplingParams

SIZE = 4
CONTEXT = 64


class Bench:
    """A scheduler over 64 blocks of four."""

    def __init__(
        self, tokens: int = 8, sequences: int = 4, waiting: int = 8, num_blocks: int = 64, **limits: int
    ) -> None:
        self.ledger = Ledger(num_blocks)
        self.blocks = BlockManager(self.ledger, SIZE, b"model")
        config = SchedulerConfig(tokens_per_step_max=tokens, sequences_max=sequences, waiting_max=waiting, **limits)
        self.scheduler = Scheduler(config, self.blocks)
        self.seqs: dict[str, Sequence] = {}

    def sequence(
        self,
        name: str,
        prompt_len: int,
        *,
        output: int = 0,
        computed: int = 0,
        resumed: bool = False,
        max_tokens: int = 16,
        mode: SequenceMode = SequenceMode.COMPLETE,
    ) -> Sequence:
        key = RequestKey(request=RequestId(name), attempt=Attempt(0))
        known = prompt_len + output
        held = self.blocks.blocks_for(computed if resumed else known)
        growth = growth_blocks(
            prompt_len=prompt_len,
            known_len=known,
            max_tokens=max_tokens,
            context_len_max=CONTEXT,
            block_size=SIZE,
            blocks_held=held,
        )
        complete = mode is SequenceMode.COMPLETE
        table = self.blocks.admit([], held, promise_key=key if complete else None, promise=growth if complete else 0)
        self.seqs[name] = Sequence(
            key=key,
            params=SamplingParams(temperature=0, top_k=0, top_p=1, seed=1, max_tokens=max_tokens),
            tokens=[7] * known,
            prompt_len=prompt_len,
            computed=computed,
            block_table=table,
            promise_key=key,
            mode=mode,
        )
        return self.seqs[name]

    def submit(self, name: str, prompt_len: int, *, computed: int = 0, output: int = 0) -> None:
        self.scheduler.submit(self.sequence(name, prompt_len, computed=computed, output=output))

    def resume(self, name: str, prompt_len: int) -> None:
        self.scheduler.resume(self.sequence(name, prompt_len, output=1, computed=prompt_len, resumed=True))

    def step(self) -> list[tuple[str, int, int, bool]] | None:
        """One step, played: (request, start, stop, sample) of each slice."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        for piece in batch.slices:
            seq = self.seqs[piece.key.request]
            assert len(piece.block_table) * SIZE >= piece.stop
            assert piece.output_index == len(piece.tokens) - seq.prompt_len
            seq.computed = piece.stop
            if piece.sample:
                seq.tokens.append(7)
        return [(str(p.key.request), p.start, p.stop, p.sample) for p in batch.slices]


def test_nothing_to_do() -> None:
    """An empty scheduler has no batch."""
    bench = Bench()
    assert bench.step() is None
    assert (bench.scheduler.running, bench.scheduler.waiting) == (0, 0)


def test_a_prompt_is_cut_at_the_budget_and_then_decodes() -> None:
    """Twenty tokens under a budget of eight: 8, 8, 4, then one at a time."""
    bench = Bench()
    bench.submit("a", 20)
    assert bench.step() == [("a", 0, 8, False)]
    assert bench.step() == [("a", 8, 16, False)]
    assert bench.step() == [("a", 16, 20, True)]
    assert bench.step() == [("a", 20, 21, True)]
    assert bench.step() == [("a", 21, 22, True)]


def test_running_sequences_come_first_and_prompts_fill_the_rest() -> None:
    """One decodes while two prompts arrive: its token, the first prompt, and as much of the second as fits."""
    bench = Bench()
    bench.submit("a", 3)
    assert bench.step() == [("a", 0, 3, True)]
    bench.submit("b", 4)
    bench.submit("c", 10)
    assert bench.step() == [("a", 3, 4, True), ("b", 0, 4, True), ("c", 0, 3, False)]
    assert bench.step() == [("a", 4, 5, True), ("b", 4, 5, True), ("c", 3, 9, False)]
    assert bench.step() == [("a", 5, 6, True), ("b", 5, 6, True), ("c", 9, 10, True)]


def test_a_prompt_begun_is_first_in_line() -> None:
    """A short prompt arrives while a long one is half way: the long one goes on."""
    bench = Bench()
    bench.submit("long", 12)
    assert bench.step() == [("long", 0, 8, False)]
    bench.submit("short", 2)
    bench.submit("next", 9)
    assert bench.step() == [("long", 8, 12, True), ("short", 0, 2, True), ("next", 0, 2, False)]


def test_a_prefix_hit_starts_behind_it() -> None:
    """Eight of ten tokens are in the cache."""
    bench = Bench()
    bench.submit("a", 10, computed=8)
    assert bench.step() == [("a", 8, 10, True)]


def test_a_retry_prefills_prompt_and_output_and_draws_the_next_index() -> None:
    """Three prompt tokens, four output tokens received by the client: seven are computed, index four is drawn."""
    bench = Bench()
    bench.submit("a", 3, output=4)
    batch = bench.scheduler.schedule()
    assert batch is not None
    (piece,) = batch.slices
    assert (piece.start, piece.stop, piece.sample, piece.output_index) == (0, 7, True, 4)


def test_no_more_than_sequences_max_run() -> None:
    """Two may run: the third prompt waits until one leaves, although the budget would take it."""
    bench = Bench(sequences=2)
    for name in "abc":
        bench.submit(name, 2)
    assert bench.step() == [("a", 0, 2, True), ("b", 0, 2, True)]
    assert bench.step() == [("a", 2, 3, True), ("b", 2, 3, True)]
    assert (bench.scheduler.running, bench.scheduler.waiting) == (2, 1)
    bench.scheduler.remove(bench.seqs["a"])
    assert bench.step() == [("b", 3, 4, True), ("c", 0, 2, True)]


def test_resumed_sequences_go_before_prompts_and_a_prompt_begun_keeps_its_place() -> None:
    """Two may run and one is a prompt half done: one resumed sequence joins, the other and a new prompt wait."""
    bench = Bench(sequences=2)
    bench.submit("long", 20)
    assert bench.step() == [("long", 0, 8, False)]
    bench.submit("new", 1)
    bench.resume("r", 5)
    bench.resume("s", 5)
    assert bench.step() == [("r", 5, 6, True), ("long", 8, 15, False)]
    assert bench.step() == [("r", 6, 7, True), ("long", 15, 20, True)]
    bench.scheduler.remove(bench.seqs["long"])
    assert bench.step() == [("r", 7, 8, True), ("s", 5, 6, True)]
    bench.scheduler.remove(bench.seqs["r"])
    assert bench.step() == [("s", 6, 7, True), ("new", 0, 1, True)]


def test_a_budget_used_up_by_running_sequences_delays_prompts_only() -> None:
    """Budget three, three decode after each other: the prompt of the third is begun with the one token left."""
    bench = Bench(tokens=3, sequences=3)
    bench.submit("a", 1)
    bench.submit("b", 1)
    assert bench.step() == [("a", 0, 1, True), ("b", 0, 1, True)]
    bench.submit("c", 3)
    bench.submit("d", 1)
    assert bench.step() == [("a", 1, 2, True), ("b", 1, 2, True), ("c", 0, 1, False)]
    assert bench.step() == [("a", 2, 3, True), ("b", 2, 3, True), ("c", 1, 2, False)]
    assert bench.step() == [("a", 3, 4, True), ("b", 3, 4, True), ("c", 2, 3, True)]
    assert bench.step() == [("a", 4, 5, True), ("b", 4, 5, True), ("c", 3, 4, True)]


def test_growth_is_drawn_from_the_promise_at_the_block_boundary() -> None:
    """A prompt of four fills its block; the next token's KV needs a second one, four tokens later a third."""
    bench = Bench()
    bench.submit("a", 4)
    seq = bench.seqs["a"]
    drawn = []
    for _ in range(6):
        bench.step()
        drawn.append((len(seq.block_table), bench.ledger.promise_left(seq.key)))
    assert drawn == [(1, 4), (2, 3), (2, 3), (2, 3), (2, 3), (3, 2)]
    bench.ledger.check()


def test_resume_at_a_block_boundary_draws_before_it_writes() -> None:
    """Four tokens in the region fill the only block; the fifth, known, is written to a new one."""
    bench = Bench()
    bench.resume("a", 4)
    assert len(bench.seqs["a"].block_table) == 1
    assert bench.step() == [("a", 4, 5, True)]
    assert len(bench.seqs["a"].block_table) == 2


def test_one_too_many_is_refused_and_nothing_changes() -> None:
    """Two may wait."""
    bench = Bench(waiting=2)
    bench.submit("a", 1)
    bench.resume("b", 1)
    with pytest.raises(EngineFullError, match=r"2 sequences are waiting already \(waiting_max\)"):
        bench.submit("c", 1)
    with pytest.raises(EngineFullError):
        bench.resume("d", 1)
    assert bench.scheduler.find(bench.seqs["c"].key) is None
    assert bench.step() == [("b", 1, 2, True), ("a", 0, 1, True)]


def test_remove_wherever_it_is() -> None:
    """Waiting, begun, resumed and running sequences are removed; what is left is scheduled as if they had not been."""
    bench = Bench(sequences=2)
    bench.submit("run", 1)
    bench.step()
    bench.submit("begun", 20)
    bench.step()
    bench.submit("waits", 1)
    bench.resume("resumed", 1)
    bench.submit("stays", 2)
    for name in ("run", "begun", "waits", "resumed"):
        seq = bench.seqs[name]
        assert bench.scheduler.find(seq.key) is seq
        bench.scheduler.remove(seq)
        assert bench.scheduler.find(seq.key) is None
    assert (bench.scheduler.running, bench.scheduler.waiting) == (0, 1)
    assert bench.step() == [("stays", 0, 2, True)]
    with pytest.raises(AssertionError):
        bench.scheduler.remove(bench.seqs["run"])


def test_a_batch_copies_nothing() -> None:
    """A step costs the same however long its sequences are: it reads their own tokens and tables."""
    bench = Bench()
    bench.submit("a", 3)
    batch = bench.scheduler.schedule()
    assert batch is not None
    seq = bench.seqs["a"]
    assert batch.slices[0].tokens is seq.tokens
    assert batch.slices[0].block_table is seq.block_table


def test_misuse_is_our_bug() -> None:
    """Twice the same key, too few blocks, blocks not held, no promise."""
    bench = Bench()
    bench.submit("a", 3)
    with pytest.raises(AssertionError, match="in the engine already"):
        bench.scheduler.submit(bench.seqs["a"])
    few = bench.sequence("few", 5)
    few.block_table = few.block_table[:1]
    with pytest.raises(AssertionError):
        bench.scheduler.submit(few)
    loose = bench.sequence("loose", 5)
    bench.ledger.drop(loose.block_table[1:])
    with pytest.raises(AssertionError, match="not held"):
        bench.scheduler.submit(loose)
    bare = bench.sequence("bare", 5)
    bench.ledger.unpromise(bare.key)
    with pytest.raises(AssertionError, match="no promise"):
        bench.scheduler.submit(bare)


def test_a_prompt_is_bypassed_so_often_and_no_more() -> None:
    """One place, taken; a prompt waits, and sequences that come to decode have gone before it until there were two.
    Then the place is the prompt's, and the others are next."""
    bench = Bench(sequences=1, bypasses_max=2)
    bench.resume("first", 4)
    bench.step()
    bench.submit("prompt", 4)
    order = []
    for n in range(5):
        bench.resume(f"later-{n}", 4)
    for last in ("first", "later-0", "later-1", "prompt", "later-2"):
        seq = bench.seqs[last]
        bench.scheduler.remove(seq)
        order += [name for name, *_ in bench.step() or []]
    assert order == ["later-0", "later-1", "prompt", "later-2", "later-3"]


def test_rows_of_scores_are_limited() -> None:
    """Two rows: the third prompt's last token waits, what comes before it is computed; nobody else goes ahead of it."""
    bench = Bench(tokens=20, logits_rows_max=2)
    for name in ("a", "b", "c", "d"):
        bench.submit(name, 4)
    assert bench.step() == [("a", 0, 4, True), ("b", 0, 4, True), ("c", 0, 3, False)]
    assert bench.step() == [("a", 4, 5, True), ("b", 4, 5, True)]
    bench.scheduler.remove(bench.seqs["a"])
    assert bench.step() == [("b", 5, 6, True), ("c", 3, 4, True), ("d", 0, 3, False)]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"logits_rows_max": 0}, "rows_max is 0"),
        ({"logits_rows_max": 5}, "logits_rows_max is 5; must be from 1 to 4"),
        ({"bypasses_max": 0}, "bypasses_max is 0"),
    ],
)
def test_further_limits_are_validated(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bench(**limits)


@pytest.mark.parametrize(
    ("tokens", "sequences", "waiting", "message"),
    [
        (0, 1, 1, "tokens_per_step_max is 0"),
        (1, 0, 1, "sequences_max is 0"),
        (1, 1, 0, "waiting_max is 0"),
        (3, 4, 1, r"sequences_max is 4; must not exceed tokens_per_step_max \(3\)"),
    ],
)
def test_limits_are_validated(tokens: int, sequences: int, waiting: int, message: str) -> None:
    """The message names the limit and its value."""
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(tokens_per_step_max=tokens, sequences_max=sequences, waiting_max=waiting)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_course_of_events(data: st.DataObject) -> None:
    """Random arrivals and departures: each step obeys the budget and the limits of running sequences and of rows, every
    running sequence gets its token, a prompt's pieces follow each other without gap, prompts begin in order, and no
    block is lost."""
    sequences = data.draw(st.integers(1, 4))
    tokens = data.draw(st.integers(sequences, 12))
    rows = data.draw(st.integers(1, sequences))
    bypasses = data.draw(st.integers(1, 3))
    bench = Bench(
        tokens=tokens, sequences=sequences, waiting=6, num_blocks=48, logits_rows_max=rows, bypasses_max=bypasses
    )
    begun: list[int] = []
    live: dict[str, Sequence] = {}
    names = iter(range(1_000))
    for _ in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["submit", "resume", "remove", "step", "step", "step"]))
        if kind in ("submit", "resume") and bench.scheduler.waiting < 6 and bench.ledger.available >= 14:
            name = str(next(names))
            length = data.draw(st.integers(1, 20))
            if kind == "submit":
                bench.submit(name, length)
            else:
                bench.resume(name, length)
            live[name] = bench.seqs[name]
        elif kind == "remove" and live:
            seq = live.pop(data.draw(st.sampled_from(sorted(live))))
            bench.scheduler.remove(seq)
            bench.blocks.release(seq.block_table)
            bench.ledger.unpromise(seq.key)
        elif kind == "step":
            before = {name: (seq.computed, len(seq.tokens)) for name, seq in live.items()}
            decoding = [n for n, seq in live.items() if seq.output_count and seq.computed > seq.prompt_len]
            batch = bench.step() or []
            assert bool(batch) == bool(live)
            assert sum(stop - start for _, start, stop, _ in batch) <= tokens
            assert bench.scheduler.running <= sequences
            assert len(batch) <= sequences
            assert sum(sample for *_, sample in batch) <= rows
            begun += [int(name) for name, start, *_ in batch if start == 0]
            assert begun == sorted(begun)
            for name, start, stop, sample in batch:
                assert start == before[name][0]
                assert sample == (stop == before[name][1])
            assert set(decoding) <= {name for name, *_ in batch}
            for name in [n for n, seq in live.items() if seq.output_count >= 16]:
                seq = live.pop(name)
                bench.scheduler.remove(seq)
                bench.blocks.release(seq.block_table)
                bench.ledger.unpromise(seq.key)
        bench.ledger.check()
    for seq in live.values():
        bench.scheduler.remove(seq)
        bench.blocks.release(seq.block_table)
        bench.ledger.unpromise(seq.key)
    counts = bench.ledger.check()
    assert (counts.free + counts.cached, counts.promised) == (48, 0)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_place_is_kept_for_a_prompt_that_was_bypassed_so_often(data: st.DataObject) -> None:
    """Sequences come to decode and leave, and now and then a prompt comes, long or short. More than `bypasses_max`
    later ones start before the prompt that is next in line only as long as there is a place beside theirs."""
    sequences = data.draw(st.integers(1, 3))
    bypasses = data.draw(st.integers(1, 3))
    bench = Bench(tokens=sequences + 1, sequences=sequences, waiting=1_000, num_blocks=1_000, bypasses_max=bypasses)
    bypassed: dict[str, int] = {}
    """Of each prompt that is not begun, in order of arrival."""
    later: dict[str, set[str]] = {}
    """Sequences that came to decode and have not started: the prompts that were there before."""
    decoding: list[str] = []
    for step in range(data.draw(st.integers(5, 15))):
        if data.draw(st.booleans()):
            bench.submit(f"prompt-{step}", data.draw(st.sampled_from([1, 30])))
            bypassed[f"prompt-{step}"] = 0
        for number in range(data.draw(st.integers(0, 2))):
            bench.resume(f"later-{step}-{number}", 4)
            later[f"later-{step}-{number}"] = set(bypassed)
        for _ in range(min(len(decoding), data.draw(st.integers(0, 2)))):
            bench.scheduler.remove(bench.seqs[decoding.pop(0)])
        first = next(iter(bypassed), None)
        names = [name for name, *_ in bench.step() or []]
        for name in names:
            bypassed.pop(name, None)
        started = [name for name in names if name in later]
        for name in started:
            for prompt in later.pop(name) & set(bypassed):
                bypassed[prompt] += 1
        decoding = [
            name for name in names if bench.seqs[name].output_count and bench.scheduler.find(bench.seqs[name].key)
        ]
        if started and first in bypassed and bypassed[first] > bypasses:
            assert bench.scheduler.running + 1 <= sequences


def test_a_begun_prompt_lets_later_ones_past_the_next_while_a_place_is_kept() -> None:
    """The exception to the bound: a long prompt is half done, and the next one cannot begin before it ends. Of three
    places one sequence after the other has the second, and the third stays the waiting prompt's."""
    bench = Bench(tokens=4, sequences=3, bypasses_max=1)
    bench.submit("long", 12)
    bench.step()
    bench.submit("waits", 1)
    for name in ("a", "b", "c"):
        bench.resume(name, 4)
    assert bench.step() == [("a", 4, 5, True), ("long", 4, 7, False)]
    bench.scheduler.remove(bench.seqs["a"])
    assert bench.step() == [("b", 4, 5, True), ("long", 7, 10, False)]
    assert bench.step() == [("b", 5, 6, True), ("long", 10, 12, True), ("waits", 0, 1, True)]


def test_a_prompt_that_waits_for_a_row_has_the_next_one() -> None:
    """One row of scores, and it is taken: a prompt is computed but for its last token. Sequences come to decode without
    end; the next row is the prompt's all the same, since they could otherwise go before it for ever."""
    bench = Bench(tokens=20, logits_rows_max=1)
    bench.resume("first", 4)
    bench.submit("prompt", 4)
    assert bench.step() == [("first", 4, 5, True), ("prompt", 0, 3, False)]
    bench.resume("later-0", 4)
    bench.resume("later-1", 4)
    assert bench.step() == [("first", 5, 6, True)]
    bench.scheduler.remove(bench.seqs["first"])
    assert bench.step() == [("prompt", 3, 4, True)]
    bench.scheduler.remove(bench.seqs["prompt"])
    assert bench.step() == [("later-0", 4, 5, True)]
