"""router.request: what a client may ask, and the error that names what is wrong with it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Code, Reason
from baton.wire import ModelInfo
from engine.model_config import TEMPERATURE_MAX, SamplingDefaults
from router.request import NEUTRAL, STOP_STRINGS_MAX, STOP_TOKEN_IDS_MAX, CheckedRequest, check_request

MODEL = ModelInfo(
    name="tiny",
    fingerprint="f",
    vocab_size=100,
    context_len_max=50,
    eos_token_ids=(1,),
    layout_hash="l",
    block_size=16,
    protocol_min=1,
    protocol_max=1,
)


def check(
    prompt: Sequence[int] | str | None = (5, 6, 7),
    *,
    model: str | None = None,
    tokenizer: bool = True,
    randomness: int = 0,
    defaults: SamplingDefaults = NEUTRAL,
    resumable: bool = False,
    **sampling: Any,
) -> CheckedRequest:
    request = inference_pb2.GenerateRequest(
        sampling=inference_pb2.Sampling(**sampling), model=model, resumable=resumable
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    return check_request(
        request,
        model=MODEL,
        prompt=[ord(each) if isinstance(each, str) else each for each in prompt or ()],
        has_tokenizer=tokenizer,
        answer_tokens=lambda _prompt_tokens: 20,
        rng=random.Random(randomness),
        defaults=defaults,
    )


def refused(*args: Any, **kwargs: Any) -> BatonError:
    with pytest.raises(BatonError) as caught:
        check(*args, **kwargs)
    return caught.value


def test_what_is_left_out_gets_its_default() -> None:
    """Temperature 1, no filter, the router's limit, no stop token; the seed is drawn at random."""
    checked = check(randomness=3)
    assert checked.prompt == (5, 6, 7)
    sampling = checked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (1.0, 0, 1.0, 20)
    assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([], False)
    assert sampling.seed == random.Random(3).getrandbits(64)
    assert sampling.seed != check(randomness=4).sampling.seed


def test_the_model_says_what_the_client_does_not() -> None:
    """A model with defaults of its own: a request that names nothing gets them all, one that names neutral ones (zeros
    among them) gets these."""
    model = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.5)
    sampling = check(defaults=model).sampling
    named = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    assert named == (0.6, 20, 0.95, 0.1, 1.5)
    off = check(defaults=model, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=1).sampling
    assert off == check(temperature=0.0, seed=1).sampling


def test_what_is_set_is_kept_zero_too() -> None:
    """Zero is a value of its own: greedy, and the seed 0, are not the defaults."""
    checked = check(
        temperature=0.0, top_k=9, top_p=0.25, seed=0, max_tokens=7, stop_token_ids=[9, 3, 9], ignore_eos=True
    )
    sampling = checked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 9, 0.25, 0)
    assert (sampling.max_tokens, list(sampling.stop_token_ids), sampling.ignore_eos) == (7, [3, 9], True)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": TEMPERATURE_MAX},
        {"top_k": 100},
        {"top_p": 1.0},
        {"top_p": 5e-324},
        {"seed": 2**64 - 1},
        {"max_tokens": 1},
        {"max_tokens": 2**32 - 1},
        {"stop_token_ids": list(range(STOP_TOKEN_IDS_MAX))},
        {"stop_token_ids": [99]},
        {"stop_token_ids": [7] * STOP_TOKEN_IDS_MAX},
    ],
)
def test_the_ends_of_each_range_are_allowed(sampling: dict[str, Any]) -> None:
    """The largest and smallest values pass unchanged (max_tokens is cut, repeated stop tokens count once)."""
    spec = check(**sampling).sampling
    for name, value in sampling.items():
        if name == "max_tokens":
            assert spec.max_tokens == min(value, 47)
        elif name == "stop_token_ids":
            assert list(spec.stop_token_ids) == sorted(set(value))
        else:
            assert getattr(spec, name) == value


@pytest.mark.parametrize(
    ("name", "value", "reported"),
    [
        ("temperature", -0.1, "from 0 (greedy) to 100"),
        ("temperature", 100.1, "from 0 (greedy) to 100"),
        ("temperature", math.nan, "from 0 (greedy) to 100"),
        ("temperature", math.inf, "from 0 (greedy) to 100"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", -1.0, "above 0 and at most 1"),
        ("top_p", 1.0001, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("top_k", 101, "at most the vocabulary of 100"),
        ("max_tokens", 0, "at least 1"),
        ("stop_token_ids", [100], "below the vocabulary of 100"),
        ("stop_token_ids", list(range(STOP_TOKEN_IDS_MAX + 1)), f"at most {STOP_TOKEN_IDS_MAX} ids long"),
        ("stop_token_ids", [7] * (STOP_TOKEN_IDS_MAX + 1), f"at most {STOP_TOKEN_IDS_MAX} ids long"),
        ("stop", ["a"] * (STOP_STRINGS_MAX + 1), f"at most {STOP_STRINGS_MAX} strings long"),
    ],
)
def test_each_sampling_field_out_of_range_is_named(name: str, value: Any, reported: str) -> None:
    """The error has the field's path, its value and what is allowed."""
    error = refused(**{name: value})
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, Reason.SAMPLING_OUT_OF_RANGE)
    assert error.field == f"sampling.{name}"
    assert error.message.startswith(f"{name} is ")
    assert reported in error.message
    if not isinstance(value, list):
        assert f" {value};" in error.message


@pytest.mark.parametrize(
    ("length", "asked", "given"), [(3, 40, 40), (3, 47, 47), (3, 48, 47), (49, 10, 1), (40, None, 10)]
)
def test_max_tokens_is_cut_to_what_the_context_leaves(length: int, asked: int | None, given: int) -> None:
    """A context of 50 tokens holds prompt and answer; the default is cut too."""
    sampling: dict[str, Any] = {} if asked is None else {"max_tokens": asked}
    assert check([2] * length, **sampling).sampling.max_tokens == given


@pytest.mark.parametrize(("prompt", "field"), [(None, "prompt"), ((), "token_ids"), ("", "text")])
def test_an_empty_prompt_is_refused(prompt: Any, field: str) -> None:
    """No prompt, no ids, or a text of no tokens."""
    error = refused(prompt)
    assert (error.code, error.reason, error.field) == (Code.INVALID_ARGUMENT, Reason.EMPTY_PROMPT, field)


class Unread(Sequence[int]):
    """Ids that nobody may look at."""

    def __len__(self) -> int:
        return 4 << 20

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(index)


def test_the_length_of_a_prompt_is_checked_before_its_tokens_are_read() -> None:
    """A message of the largest size costs as little as one of a few bytes."""
    asked = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
    with pytest.raises(BatonError, match="4194304 tokens"):
        check_request(
            asked,
            model=MODEL,
            prompt=Unread(),
            has_tokenizer=True,
            answer_tokens=lambda _: 10,
            rng=random.Random(1),
        )


@pytest.mark.parametrize(("prompt", "field"), [([2] * 50, "token_ids"), ([2] * 51, "token_ids"), ("!" * 50, "text")])
def test_a_prompt_that_leaves_no_room_is_refused(prompt: Any, field: str) -> None:
    """A prompt of the whole context: no output token fits. The error has both numbers."""
    error = refused(prompt)
    assert (error.code, error.reason, error.field) == (Code.INVALID_ARGUMENT, Reason.PROMPT_TOO_LONG, field)
    assert f"has {len(prompt)} tokens" in error.message
    assert "maximum context length is 50 tokens" in error.message
    assert len(check([2] * 49).prompt) == 49


@pytest.mark.parametrize("token", [100, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    """The first such token is named with its place; the last id of the vocabulary is fine."""
    error = refused([3, token, 4, token])
    assert (error.code, error.reason, error.field) == (Code.INVALID_ARGUMENT, Reason.TOKEN_OUT_OF_RANGE, "token_ids")
    assert f"Token id {token} at position 1 is outside the vocabulary of 100" in error.message
    assert check([0, 99]).prompt == (0, 99)


def test_text_is_encoded_and_checked_like_ids() -> None:
    """Text becomes tokens once; a tokenizer whose ids the model does not have is an error of the text field."""
    assert check("!?").prompt == (33, 63)
    error = refused("é")
    assert (error.reason, error.field) == (Reason.TOKEN_OUT_OF_RANGE, "text")


def test_text_without_a_tokenizer_is_refused() -> None:
    """The error says what to do; ids are served all the same."""
    error = refused("hello", tokenizer=False)
    assert (error.code, error.reason, error.field) == (Code.FAILED_PRECONDITION, Reason.NO_TOKENIZER, "text")
    assert "--model" in error.message
    assert check([5], tokenizer=False).prompt == (5,)


def test_scores_of_a_prompt_and_a_router_that_may_change() -> None:
    """Another router would not have them: refused, rather than left out of the end that it writes."""
    assert check(prompt_logprobs=0).sampling.prompt_logprobs == 0
    assert refused(prompt_logprobs=0, resumable=True).field == "sampling.prompt_logprobs"


def test_another_model_is_not_found() -> None:
    """A name that the cluster does not serve, even an empty one; the right name passes."""
    for name in ("huge", ""):
        error = refused(model=name)
        assert (error.code, error.reason, error.field) == (Code.NOT_FOUND, Reason.UNKNOWN_MODEL, "model")
        assert "'tiny'" in error.message
    assert check(model="tiny").prompt == (5, 6, 7)


def test_the_prompt_is_checked_before_the_sampling() -> None:
    """Of several errors the first is told, in the order model, prompt, sampling."""
    assert refused((), model="huge", temperature=-1.0).reason is Reason.UNKNOWN_MODEL
    assert refused((), temperature=-1.0).reason is Reason.EMPTY_PROMPT
    assert refused(temperature=-1.0, top_p=7.0).field == "sampling.temperature"


def test_when_ids_end_an_answer() -> None:
    """As engines end it: an eos or stop token behind `min_tokens`, else the length."""
    stop, length = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
    plain = CheckedRequest(
        prompt=(1,),
        sampling=common_pb2.SamplingSpec(max_tokens=3, stop_token_ids=[8]),
        stop=(),
        include_stop=False,
        eos_token_ids=(9,),
    )
    assert [plain.finish_after(ids) for ids in ([], [1, 2], [9], [8], [1, 2, 3], [1, 2, 9])] == [
        None, None, stop, stop, length, stop,
    ]  # fmt: skip
    ignoring = replace(plain, sampling=common_pb2.SamplingSpec(max_tokens=3, stop_token_ids=[8], ignore_eos=True))
    assert [ignoring.finish_after(ids) for ids in ([9], [8], [1, 2, 9])] == [None, stop, length]
    later = replace(plain, sampling=common_pb2.SamplingSpec(max_tokens=3, min_tokens=2))
    assert [later.finish_after(ids) for ids in ([9], [1, 9], [1, 2, 9])] == [None, None, stop]
