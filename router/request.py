"""A client's request, checked once: what is wrong is named, what is left out gets its default. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.wire import ModelInfo
from engine.model_config import REPETITION_PENALTY_MAX, TEMPERATURE_MAX, SamplingDefaults

STOP_TOKEN_IDS_MAX = 64
PENALTY_MAX = 2.0
LOGIT_BIAS_MAX = 100.0
LOGIT_BIAS_TOKENS_MAX = 1024
LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 256
CACHE_SALT_BYTES_MAX = 256

NEUTRAL = SamplingDefaults()
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """What every attempt at the request shares."""

    prompt: tuple[int, ...]
    sampling: common_pb2.SamplingSpec
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: bytes = b""


def check_request(
    request: inference_pb2.GenerateRequest,
    *,
    model: ModelInfo,
    encode: Encode | None,
    answer_tokens: Callable[[int], int],
    rng: random.Random,
    defaults: SamplingDefaults = NEUTRAL,
    choice: int = 0,
    chat: Sequence[int] = (),
) -> CheckedRequest:
    """Validate against the model that is served.

    `chat` is the prompt that the messages of a conversation make. `choice` numbers the answers to one question with one
    seed. `max_tokens` is cut to what the model's context leaves after the prompt; `answer_tokens` gives it, from the
    length of the prompt, for a request that names none. `defaults` stand for sampling fields that are not set; a zero
    that is set counts. Raises BatonError naming the field.
    """
    if request.HasField("model") and request.model != model.name:
        raise BatonError(
            Reason.UNKNOWN_MODEL,
            f"This cluster serves '{model.name}', not '{request.model}'.",
            field="model",
        )
    prompt = check_prompt(request, model, encode, chat)
    sampling = request.sampling
    room = model.context_len_max - len(prompt)
    max_tokens = min(_max_tokens(sampling) or answer_tokens(len(prompt)), room)
    return CheckedRequest(
        prompt=prompt,
        sampling=common_pb2.SamplingSpec(
            temperature=_temperature(sampling, defaults),
            top_k=_top_k(sampling, defaults, model),
            top_p=_top_p(sampling, defaults),
            seed=sampling.seed if sampling.HasField("seed") else rng.getrandbits(64),
            max_tokens=max_tokens,
            stop_token_ids=_stop_token_ids(sampling, model),
            ignore_eos=sampling.ignore_eos,
            min_p=_min_p(sampling, defaults),
            repetition_penalty=_repetition_penalty(sampling, defaults),
            presence_penalty=_penalty("presence_penalty", sampling.presence_penalty),
            frequency_penalty=_penalty("frequency_penalty", sampling.frequency_penalty),
            logit_bias=_logit_bias(sampling, model),
            min_tokens=_min_tokens(sampling, max_tokens),
            logprobs=_logprobs(sampling),
            choice=choice,
        ),
        stop=_stop(sampling, has_text=encode is not None),
        include_stop=sampling.include_stop,
        cache_salt=check_salt(request.cache_salt) if request.HasField("cache_salt") else b"",
    )


def check_salt(salt: str) -> bytes:
    """The salt as it goes into the hash chain. Raises BatonError BAD_FIELD: an empty one would share with everybody."""
    encoded = salt.encode()
    if not 0 < len(encoded) <= CACHE_SALT_BYTES_MAX:
        raise bad_field(
            "cache_salt",
            f"cache_salt is {len(encoded)} bytes of UTF-8 long; it must be 1 to {CACHE_SALT_BYTES_MAX}. Leave it out "
            "to share cached prefixes with all requests without one.",
        )
    return encoded


def check_prompt(
    request: inference_pb2.GenerateRequest, model: ModelInfo, encode: Encode | None, chat: Sequence[int] = ()
) -> tuple[int, ...]:
    """The prompt's token ids; `chat` are those of a conversation. Raises BatonError naming the field."""
    kind = request.WhichOneof("prompt")
    field = "prompt" if kind is None else kind
    if kind == "text":
        if encode is None:
            raise BatonError(
                Reason.NO_TOKENIZER,
                "This router was started without a tokenizer: send token_ids, or start it with --model.",
                field="text",
            )
        ids = tuple(encode(request.text))
    elif kind == "chat":
        ids = tuple(chat)
    else:
        ids = tuple(request.token_ids.ids)
    if not ids:
        raise bad_field(field, "The prompt is empty: it must have at least one token.", reason=Reason.EMPTY_PROMPT)
    if len(ids) >= model.context_len_max:
        raise bad_field(
            field,
            f"The prompt has {len(ids)} tokens; the model's context is {model.context_len_max}, and one output token "
            "must fit in it too.",
            reason=Reason.PROMPT_TOO_LONG,
        )
    if max(ids) >= model.vocab_size:
        where = next(i for i, token in enumerate(ids) if token >= model.vocab_size)
        raise bad_field(
            field,
            f"Token id {ids[where]} at position {where} is outside the vocabulary of {model.vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )
    return ids


def _out_of_range(name: str, value: object, allowed: str) -> BatonError:
    text = f"{name} is {value}; it must be {allowed}."
    return bad_field(f"sampling.{name}", text, reason=Reason.SAMPLING_OUT_OF_RANGE)


def _temperature(sampling: inference_pb2.Sampling, defaults: SamplingDefaults) -> float:
    value = sampling.temperature if sampling.HasField("temperature") else defaults.temperature
    if not math.isfinite(value) or not 0 <= value <= TEMPERATURE_MAX:
        raise _out_of_range("temperature", value, f"from 0 (greedy) to {TEMPERATURE_MAX:g}")
    return value


def _top_p(sampling: inference_pb2.Sampling, defaults: SamplingDefaults) -> float:
    value = sampling.top_p if sampling.HasField("top_p") else defaults.top_p
    if not math.isfinite(value) or not 0 < value <= 1:
        raise _out_of_range("top_p", value, "above 0 and at most 1 (1 is off)")
    return value


def _top_k(sampling: inference_pb2.Sampling, defaults: SamplingDefaults, model: ModelInfo) -> int:
    if not sampling.HasField("top_k"):
        return min(defaults.top_k, model.vocab_size)
    value = sampling.top_k
    if value > model.vocab_size:
        raise _out_of_range("top_k", value, f"at most the vocabulary of {model.vocab_size} (0 is off)")
    return value


def _max_tokens(sampling: inference_pb2.Sampling) -> int | None:
    if not sampling.HasField("max_tokens"):
        return None
    if sampling.max_tokens < 1:
        raise _out_of_range("max_tokens", sampling.max_tokens, "at least 1")
    return sampling.max_tokens


def _stop_token_ids(sampling: inference_pb2.Sampling, model: ModelInfo) -> list[int]:
    ids = sorted(set(sampling.stop_token_ids))
    if len(ids) > STOP_TOKEN_IDS_MAX:
        raise _out_of_range("stop_token_ids", f"{len(ids)} ids long", f"at most {STOP_TOKEN_IDS_MAX} ids long")
    if ids and ids[-1] >= model.vocab_size:
        raise _out_of_range("stop_token_ids", ids[-1], f"ids below the vocabulary of {model.vocab_size}")
    return ids


def _min_p(sampling: inference_pb2.Sampling, defaults: SamplingDefaults) -> float:
    value = sampling.min_p if sampling.HasField("min_p") else defaults.min_p
    if not 0 <= value <= 1:
        raise _out_of_range("min_p", value, "from 0 (off) to 1")
    return value


def _repetition_penalty(sampling: inference_pb2.Sampling, defaults: SamplingDefaults) -> float | None:
    """None where it is off."""
    named = sampling.HasField("repetition_penalty")
    value = sampling.repetition_penalty if named else defaults.repetition_penalty
    if not 0 < value <= REPETITION_PENALTY_MAX:
        raise _out_of_range("repetition_penalty", value, f"above 0 and at most {REPETITION_PENALTY_MAX:g} (1 is off)")
    return value if value != 1 else None


def _penalty(name: str, value: float) -> float:
    if not -PENALTY_MAX <= value <= PENALTY_MAX:
        raise _out_of_range(name, value, f"from -{PENALTY_MAX:g} to {PENALTY_MAX:g} (0 is off)")
    return value


def _logit_bias(sampling: inference_pb2.Sampling, model: ModelInfo) -> dict[int, float]:
    biases = dict(sampling.logit_bias)
    if len(biases) > LOGIT_BIAS_TOKENS_MAX:
        raise _out_of_range("logit_bias", f"{len(biases)} tokens long", f"at most {LOGIT_BIAS_TOKENS_MAX} tokens long")
    for token, bias in sorted(biases.items()):
        if token >= model.vocab_size:
            raise _out_of_range(
                "logit_bias", f"for token {token}", f"for ids below the vocabulary of {model.vocab_size}"
            )
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            allowed = f"from -{LOGIT_BIAS_MAX:g} to {LOGIT_BIAS_MAX:g}"
            raise _out_of_range("logit_bias", f"{bias} for token {token}", allowed)
    return biases


def _min_tokens(sampling: inference_pb2.Sampling, max_tokens: int) -> int:
    if sampling.min_tokens > max_tokens:
        raise _out_of_range("min_tokens", sampling.min_tokens, f"at most max_tokens, which is {max_tokens} here")
    return sampling.min_tokens


def _logprobs(sampling: inference_pb2.Sampling) -> int | None:
    if not sampling.HasField("logprobs"):
        return None
    if sampling.logprobs > LOGPROBS_MAX:
        raise _out_of_range("logprobs", sampling.logprobs, f"at most {LOGPROBS_MAX} alternatives")
    return sampling.logprobs


def _stop(sampling: inference_pb2.Sampling, *, has_text: bool) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(sampling.stop))
    if len(stops) > STOP_STRINGS_MAX:
        raise _out_of_range("stop", f"{len(stops)} strings long", f"at most {STOP_STRINGS_MAX} strings long")
    for stop in stops:
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            raise _out_of_range("stop", f"a string of {len(stop)} characters", f"1 to {STOP_CHARS_MAX} characters")
    if stops and not has_text:
        raise BatonError(
            Reason.NO_TOKENIZER,
            "This router was started without a tokenizer and sees no text: use stop_token_ids, or start it with "
            "--model.",
            field="sampling.stop",
        )
    return stops
