"""What a mixed node keeps: by the prompt's uncached part, the decode nodes known, and what they answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidField, Reason
from prefill_node.local_policy import NOT_THERE, TAKES_NONE_NOW, LocalFallback, LocalPolicy, falls_back, is_kept

policies = st.builds(LocalPolicy, handoff_tokens_min=st.integers(0, 500), fallback=st.sampled_from(list(LocalFallback)))
answers = st.frozensets(st.sampled_from(list(Reason)), min_size=1)


def policy(minimum: int = 100, fallback: LocalFallback = LocalFallback.UNREACHABLE) -> LocalPolicy:
    return LocalPolicy(handoff_tokens_min=minimum, fallback=fallback)


@pytest.mark.parametrize("fallback", LocalFallback)
@pytest.mark.parametrize(
    ("prompt", "cached", "kept"),
    [(99, 0, True), (100, 0, False), (164, 64, False), (163, 64, True), (1_000, 912, True), (1_000, 896, False)],
)
def test_what_is_cached_does_not_count(prompt: int, cached: int, kept: bool, fallback: LocalFallback) -> None:
    """Under 100 uncached tokens a prompt runs here, at 100 it is handed over, while there is a decode node."""
    found = is_kept(policy(fallback=fallback), prompt_tokens=prompt, cached_tokens=cached, decode_nodes=1)
    assert found is kept


def test_a_minimum_of_zero_keeps_nothing() -> None:
    """Even a prompt of one token is handed over, while there is a decode node."""
    assert not is_kept(policy(0), prompt_tokens=1, cached_tokens=0, decode_nodes=1)


@pytest.mark.parametrize(
    ("fallback", "kept"),
    [(LocalFallback.NEVER, False), (LocalFallback.UNREACHABLE, True), (LocalFallback.FULL, True)],
)
def test_nobody_to_ask(fallback: LocalFallback, kept: bool) -> None:
    """No decode node is known: the policy alone says whether a long prompt runs here."""
    assert is_kept(policy(fallback=fallback), prompt_tokens=900, cached_tokens=0, decode_nodes=0) is kept
    assert falls_back(policy(fallback=fallback), {Reason.NO_DECODE_NODE}) is kept


@pytest.mark.parametrize(
    ("refusals", "unreachable", "full"),
    [
        ({Reason.PEER_UNREACHABLE}, True, True),
        ({Reason.DEADLINE, Reason.NODE_DRAINING, Reason.INCARNATION_MISMATCH}, True, True),
        ({Reason.INCOMPATIBLE_NODE, Reason.PROMPT_TOO_LONG}, True, True),
        ({Reason.DECODE_FULL}, False, True),
        ({Reason.PEER_UNREACHABLE, Reason.DECODE_FULL}, False, True),
        ({Reason.PAIR_FENCING}, False, True),
        ({Reason.INTERNAL, Reason.PEER_UNREACHABLE}, False, False),
    ],
)
def test_what_the_answers_mean(refusals: set[Reason], unreachable: bool, full: bool) -> None:
    """One full node among dead ones is somebody to come back to; a bug's answer is no reason to keep anything."""
    assert falls_back(policy(fallback=LocalFallback.UNREACHABLE), refusals) is unreachable
    assert falls_back(policy(fallback=LocalFallback.FULL), refusals) is full


@given(policy=policies, refusals=answers, prompt=st.integers(1, 1_000), cached=st.integers(0, 999))
def test_each_policy_keeps_what_the_stricter_one_keeps(
    policy: LocalPolicy, refusals: frozenset[Reason], prompt: int, cached: int
) -> None:
    """never <= unreachable <= full, for every prompt and every set of answers; and never falls back on nothing."""
    cached = min(cached, prompt - 1)
    order = [LocalPolicy(handoff_tokens_min=policy.handoff_tokens_min, fallback=f) for f in LocalFallback]
    for nodes in (0, 1):
        kept = [is_kept(p, prompt_tokens=prompt, cached_tokens=cached, decode_nodes=nodes) for p in order]
        assert kept == sorted(kept)
    back = [falls_back(p, refusals) for p in order]
    assert back == sorted(back)
    assert back == [False, refusals <= NOT_THERE, refusals <= NOT_THERE | TAKES_NONE_NOW]


def test_a_minimum_below_zero_is_refused() -> None:
    """With the field's own name, for the configuration to show."""
    with pytest.raises(InvalidField, match="handoff_tokens_min must not be negative, not -1"):
        policy(-1)
