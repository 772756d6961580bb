"""API keys: their file, who is let in, what each may use. Pure: no clock, no files, no router."""

from __future__ import annotations

import secrets
import tomllib
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Code, Reason
from baton.ids import RequestId
from router.keys import (
    ENDED_EPOCH,
    KEYS_MAX,
    LEFT_MS,
    Admission,
    ApiKey,
    Bucket,
    KeyBook,
    KeyUse,
    Limit,
    authorization_of,
    digest_of,
    new_key,
    parse_keys,
)
from router.request import Priority, own_cache_salt

BLIND = b"blind"
HASH = "0" * 64


def made(name: str = "a", **entry: Any) -> tuple[str, ApiKey]:
    """A key and its entry."""
    key, text = new_key(secrets.token_urlsafe(32), {"name": name, **entry})
    (parsed,) = parse_keys(text.encode(), source="test")
    return key, parsed


def used(**limits: Any) -> KeyUse:
    return KeyUse(ApiKey(name="a", sha256=HASH, **limits), 0.0)


def refusal(use: KeyUse, now_s: float) -> BatonError:
    with pytest.raises(BatonError) as caught:
        use.admit(now_s, spread=0.0)
    return caught.value


# The file.


def test_a_new_key_is_in_the_file_as_its_hash() -> None:
    """The entry has all that was asked for and nothing of the key; no two keys are alike."""
    key, entry = made(
        "team-a", concurrency=4, requests_per_minute=60, tokens_per_minute=1000, priority="low",
        cache_salt='s"\\\n\u00e9', special_tokens=True,
    )  # fmt: skip
    assert (entry.name, entry.sha256) == ("team-a", digest_of(key))
    assert (entry.concurrency, entry.requests_per_minute, entry.tokens_per_minute) == (4, 60, 1000)
    assert (entry.priority_class, entry.cache_salt, entry.special_tokens) == (Priority.LOW, 's"\\\n\u00e9', True)
    assert key.startswith("baton-") and len(key) == 49
    assert made()[0] != made()[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 entries"),
        ("keys = 3", "keys: Input should be a valid tuple"),
        ("[[keys]\nname = 'a'", "not TOML: TOMLDecodeError (at line 1, column 7)"),
        ("[[keys]]\nname = 'a'\n", "keys[0][sha256]: Field required"),
        (f"[[keys]]\nname = 'a b'\nsha256 = '{HASH}'\n", "keys[0]: name must be 1 to 63"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nconcurrency = {'1' * 5000}\n", "not TOML: ValueError."),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HASH[:-1]}'\n", "64 hexadecimal digits"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nconcurrency = 0\n", "concurrency must be positive"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\npriority = 'urgent'\n", "keys[0][priority]"),
        (
            f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\nkey = 'baton-secret'\n",
            "keys[0][a name that is not known]: Unexpected keyword",
        ),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n" * 2, "2 of its entries have the same name, a"),
        (f"[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n[[keys]]\nname = 'b'\nsha256 = '{HASH}'\n", "same sha256"),
        (f"more = 1\n[[keys]]\nname = 'a'\nsha256 = '{HASH}'\n", "something else"),
        ("".join(f"[[keys]]\nname = 'a{i}'\nsha256 = '{i:064x}'\n" for i in range(KEYS_MAX + 1)), "1 to 2048"),
        ("#" * (4 << 20) + "#", "longer than"),
    ],
)
def test_a_broken_file_is_refused_whole(text: str, problem: str) -> None:
    """The error says where, and quotes nothing: a key may stand there."""
    with pytest.raises(BatonError) as caught:
        parse_keys(text.encode(), source="keys.toml")
    assert caught.value.reason is Reason.BAD_CONFIG
    assert problem in caught.value.message and "keys.toml" in caught.value.message
    assert "secret" not in caught.value.message


# Who is let in.


def test_a_key_is_found_by_its_text_alone() -> None:
    """In any case of the scheme's name, with spaces around, as text or bytes."""
    (key, entry), (other, _) = made("a"), made("b")
    book = KeyBook([entry], blind=BLIND, now_s=0.0)
    for header in (f"Bearer {key}", f"bearer  {key} ", f"BEARER {key}".encode()):
        assert book.find(header).key is entry
    for header in (f"Bearer {other}", f"Bearer {key}x", f"Bearer {key[:-1]}", f"Bearer {entry.sha256}"):
        with pytest.raises(BatonError, match="not a key of this cluster") as caught:
            book.find(header)
        assert (caught.value.reason, caught.value.code) == (Reason.INVALID_API_KEY, Code.UNAUTHENTICATED)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (None, "has none"),
        ("", "has none"),
        ("Bearer", "does not say 'Bearer KEY'"),
        ("Basic abc", "does not say 'Bearer KEY'"),
        (b"Bearer \xff\xfe", "not a key"),
    ],
)
def test_what_is_missing_and_what_is_wrong_have_words_of_their_own(header: str | bytes | None, why: str) -> None:
    with pytest.raises(BatonError, match=why) as caught:
        KeyBook([made()[1]], blind=BLIND, now_s=0.0).find(header)
    assert caught.value.reason is Reason.INVALID_API_KEY


def test_two_keys_are_none() -> None:
    """Whichever of them is good: nobody knows which one a proxy before us has looked at."""
    one = ("authorization", "Bearer a")
    assert authorization_of([("a", "b"), one]) == "Bearer a"
    assert authorization_of(None) is None
    for second in (one, ("authorization", b"Bearer b")):
        with pytest.raises(BatonError, match="several headers") as caught:
            authorization_of([one, second])
        assert caught.value.reason is Reason.INVALID_API_KEY


def test_a_key_that_somebody_thought_up_is_none() -> None:
    """Its hash stands in the file, but it has not the form of ours: whoever guesses words finds nothing."""
    entry = ApiKey(name="a", sha256=digest_of("letmein"))
    with pytest.raises(BatonError, match="not a key"):
        KeyBook([entry], blind=BLIND, now_s=0.0).find("Bearer letmein")


# What each may use.


def test_requests_a_minute() -> None:
    """Two at once, then one every 30 s; the refusal says when, and that time is enough."""
    use = used(requests_per_minute=2)
    use.admit(0.0, spread=0.0)
    use.admit(0.0, spread=0.0)
    error = refusal(use, 10.0)
    assert (error.reason, error.code) == (Reason.RATE_LIMIT_EXCEEDED, Code.RESOURCE_EXHAUSTED)
    assert (error.retry_after_ms, error.metadata) == (20_001, {"limit": "requests"})
    assert use.headers(10.0) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "50s",
    }
    use.admit(30.001, spread=0.0)
    assert (use.requests, use.refused) == (3, {Limit.REQUESTS: 1})


def test_an_answer_that_its_client_has_left_counts_while_it_goes_on() -> None:
    """One answer at a time. Its client leaves it and asks for another: refused, until the node has ended the one that
    was left, or the client has come back for it. Coming back itself is free, unless the answer is computed anew."""
    use = used(concurrency=1)
    first = use.admit(0.0, spread=0.0)
    use.leave(RequestId("one"), 0, 0.0)
    first.end()
    assert refusal(use, LEFT_MS / 1000 - 0.001).metadata == {"limit": "concurrency"}
    again = use.admit(1.0, spread=0.0, attaches=True)
    with pytest.raises(BatonError) as anew:
        again.take_prompt(0, 5, 1.0)
    assert anew.value.reason is Reason.RATE_LIMIT_EXCEEDED
    use.come_back(RequestId("one"), 1, 1.0)
    again.take_prompt(0, 5, 1.0)
    again.end()
    use.admit(1.0, spread=0.0).end()
    use.leave(RequestId("two"), 0, 2.0)
    use.admit(2.0 + LEFT_MS / 1000, spread=0.0).end()


def test_what_two_workers_tell_of_a_client_comes_in_any_order() -> None:
    """It leaves its answer at one worker, takes it up at the other one, and leaves it there too. What the first worker
    says late counts no more, what the second one says does; and nothing that is said late counts of an answer that the
    client has ended."""
    use, one = used(concurrency=1), RequestId("one")
    use.come_back(one, 1, 0.0)
    use.leave(one, 0, 0.1)
    use.admit(0.1, spread=0.0).end()
    use.leave(one, 1, 0.2)
    use.come_back(one, 1, 0.3)  # a third worker, which the client has left since
    assert refusal(use, 0.3).metadata == {"limit": "concurrency"}
    use.come_back(one, ENDED_EPOCH, 0.4)
    use.leave(one, 2, 0.5)
    use.admit(0.5, spread=0.0).end()
    use.come_back(RequestId("two"), 1, 0.4 + LEFT_MS / 1000)
    assert list(use._came_back) == ["two"]  # nothing is kept for longer


def test_calls_that_end_answers_have_a_rate_of_their_own() -> None:
    """Two a minute, as many as may begin some, and they take nothing from those."""
    use = used(requests_per_minute=2)
    for _ in range(2):
        use.admit(0.0, spread=0.0).end()
        use.end_answers(0.0)
    with pytest.raises(BatonError) as caught:
        use.end_answers(0.0)
    assert (caught.value.reason, caught.value.retry_after_ms) == (Reason.RATE_LIMIT_EXCEEDED, 30_001)
    assert (use.requests, use.refused) == (2, {Limit.REQUESTS: 1})
    use.end_answers(30.001)
    used(concurrency=1).end_answers(0.0)


def test_answers_at_the_same_time() -> None:
    """One more is refused until one has ended, and a call for more than may ever be is refused for good."""
    use = used(concurrency=2)
    first = use.admit(0.0, spread=0.0)
    with pytest.raises(BatonError) as never:
        first.widen(3)
    assert (never.value.reason, never.value.field) == (Reason.PERMISSION_DENIED, "n")
    first.widen(2)
    error = refusal(use, 0.0)
    assert (error.retry_after_ms, error.metadata) == (1000, {"limit": "concurrency"})
    first.end()
    first.end()
    assert use.running == 0
    second, third = use.admit(0.0, spread=0.0), use.admit(0.0, spread=0.0)
    with pytest.raises(BatonError, match="2 answers under way"):
        third.widen(2)
    second.end()
    third.end()
    assert use.running == 0


def test_an_answer_overdraws_and_the_next_request_waits() -> None:
    """A prompt of 40 fits into 60 tokens; its answer of 50 goes on to its end; the debt of 30 is paid after 31 s."""
    use = used(tokens_per_minute=60)
    use.admit(0.0, spread=0.0)
    use.take_prompt(40, 0.0)
    use.take_output(50, 0.0)
    assert use.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    assert use.headers(0.0)["x-ratelimit-reset-tokens"] == "1m30s"
    assert refusal(use, 0.0).retry_after_ms == 31_001
    use.admit(31.5, spread=0.0)
    with pytest.raises(BatonError, match="this needs 20") as caught:
        use.take_prompt(20, 31.5)
    assert caught.value.metadata == {"limit": "tokens"}
    assert (use.prompt_tokens, use.output_tokens) == (40, 50)


def test_a_prompt_of_more_tokens_than_a_minute_has_is_refused_for_good() -> None:
    with pytest.raises(BatonError, match="can never be taken") as caught:
        used(tokens_per_minute=60).take_prompt(61, 0.0)
    assert (caught.value.reason, caught.value.code) == (Reason.PERMISSION_DENIED, Code.PERMISSION_DENIED)


def test_prompts_of_one_call_are_waited_for_together() -> None:
    """Two of 40 come while 60 tokens are left: the second is refused until there is room for both, and then the same
    call is taken. Two of 60 never are."""
    use, now_s = used(tokens_per_minute=100), 0.0
    use.take_output(40, now_s)
    calls = [use.admit(0.0, spread=0.0) for _ in range(3)]
    calls[0].take_prompt(0, 40, now_s)
    with pytest.raises(BatonError) as caught:
        calls[0].take_prompt(1, 40, now_s)
    now_s = (caught.value.retry_after_ms or 0) / 1000
    assert now_s == pytest.approx(36.0, abs=0.01)
    for prompt in range(2):
        calls[1].take_prompt(prompt, 40, now_s)
    now_s += 60.0
    calls[2].take_prompt(0, 60, now_s)
    with pytest.raises(BatonError, match="can never be taken"):
        calls[2].take_prompt(1, 60, now_s)


@given(
    per_minute=st.integers(1, 1_000),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 400), st.integers(0, 600)), max_size=60),
)
def test_no_time_that_ends_with_an_admission_has_more_than_a_bucket_and_the_rate(
    per_minute: int, steps: list[tuple[float, int, int]]
) -> None:
    """Prompts that are taken, and answers however long: from any moment to any admission. Waiting as told is enough."""
    use, now_s = used(tokens_per_minute=per_minute), 0.0
    taken: list[tuple[float, int]] = []
    for pause_s, prompt, output in steps:
        now_s += pause_s
        try:
            use.take_prompt(prompt, now_s)
        except BatonError as error:
            if prompt > per_minute:
                continue
            now_s += (error.retry_after_ms or 0) / 1000
            use.take_prompt(prompt, now_s)
        taken.append((now_s, prompt))
        total = 0
        for at_s, tokens in reversed(taken):
            total += tokens
            assert total <= per_minute * (1 + (now_s - at_s) / 60) + 1e-3
        use.take_output(output, now_s)
        taken.append((now_s, output))


@given(
    per_minute=st.integers(1, 1_000),
    sizes=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 1_000)), max_size=20),
)
def test_a_bucket_never_holds_more_than_a_minute_nor_forgets_what_is_missing(
    per_minute: int, sizes: list[tuple[float, int]]
) -> None:
    """Whatever the file makes of its size meanwhile."""
    bucket, now_s = Bucket(per_minute, 0.0), 0.0
    bucket.take(per_minute // 2, now_s)
    for pause_s, size in sizes:
        now_s += pause_s
        missing = bucket.per_minute - bucket.level(now_s)
        bucket.resize(size, now_s)
        assert bucket.level(now_s) == pytest.approx(size - missing)
        assert bucket.level(now_s + 1e6) == size


@given(st.lists(st.sampled_from(["admit", "widen", "end", "reload", "remove"]), max_size=60), st.randoms())
def test_what_is_under_way_is_counted_right_through_reloads(steps: list[str], rng: Any) -> None:
    """`running` is the answers of the calls that have not ended, never below zero nor above the limit; a reload keeps
    it, a key that is gone and comes back begins anew and old calls end where they began."""
    entry = ApiKey(name="a", sha256=HASH, concurrency=5)
    book = KeyBook([entry], blind=BLIND, now_s=0.0)
    use = next(iter(book.uses()))
    calls: list[tuple[Admission, int]] = []
    for step in steps:
        with suppress(BatonError):
            if step == "admit":
                calls.append((use.admit(0.0, spread=0.0), 1))
            elif step == "widen" and calls:
                i, answers = rng.randrange(len(calls)), rng.randrange(1, 7)
                admission, before = calls[i]
                admission.widen(answers)
                calls[i] = admission, max(before, answers)
            elif step == "end" and calls:
                calls.pop(rng.randrange(len(calls)))[0].end()
        if step == "reload":
            book.replace([ApiKey(name="a", sha256=f"{rng.getrandbits(256):064x}", concurrency=5)], 0.0)
            assert list(book.uses()) == [use]
        elif step == "remove":
            book.replace([], 0.0)
            book.replace([entry], 0.0)
            (use,) = book.uses()
        own = sum(answers for admission, answers in calls if admission.use is use)
        assert use.running == own <= 5


def test_a_reload_changes_limits_and_hashes_and_keeps_counters() -> None:
    """The old key is none from then on; the new one goes on where it was; half the rate, the same missing."""
    (old, entry), (new, renewed) = made("a", requests_per_minute=4), made("a", requests_per_minute=2)
    book = KeyBook([entry], blind=BLIND, now_s=0.0)
    use = book.find(f"Bearer {old}")
    call = use.admit(0.0, spread=0.0)
    book.replace([renewed], 0.0)
    with pytest.raises(BatonError):
        book.find(f"Bearer {old}")
    assert book.find(f"Bearer {new}") is use
    assert use.running == 1
    assert use.headers(0.0)["x-ratelimit-remaining-requests"] == "1"
    book.replace([], 0.0)
    call.end()
    assert use.running == 0


def test_a_key_is_found_by_name_as_long_as_it_is_there() -> None:
    """One that is gone is refused as one that never was."""
    book = KeyBook([made("a")[1]], blind=BLIND, now_s=0.0)
    assert book.use_of("a") is book.uses()[0]
    book.replace([made("b")[1]], 0.0)
    with pytest.raises(BatonError, match="no longer one"):
        book.use_of("a")


# Whose cache.


def test_salts_of_keys_and_of_requests_never_meet() -> None:
    """Without keys a request's salt is as it is. With keys it is told apart by the key's, and none that a client can
    spell is the one of a key."""
    assert own_cache_salt(None, b"") == b""
    assert own_cache_salt(None, b"x") == b"x"
    assert own_cache_salt("", b"") == b""
    assert own_cache_salt("k", b"") == b"k"
    salts = [own_cache_salt(key, asked) for key in ("", "k", "kx", "x") for asked in (b"", b"k", b"x", b"kx")]
    assert len(set(salts)) == len(salts)
    assert all(salt[0] == 0xFF for salt in salts if len(salt) > 2)


def test_the_entry_of_a_new_key_is_toml() -> None:
    """What `baton key new` prints can be put into a file as it is."""
    _, text = new_key("a" * 43, {"name": "a", "special_tokens": False})
    assert list(tomllib.loads(text)["keys"][0]) == ["name", "special_tokens", "sha256"]
