"""A client's request. It is checked once: what is wrong is named, what is left out gets its default. Pure."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from batonpb import common_pb2, inference_pb2, resume_pb2
from google.protobuf.message import DecodeError

from baton.errors import BatonError, Reason, bad_field
from baton.ids import RequestId
from baton.tracing import Traceparent
from baton.wire import ModelInfo, grammar_problem
from engine.model_config import REPETITION_PENALTY_MAX, TEMPERATURE_MAX, SamplingDefaults
from router.line import Priority as Priority
from router.resume import Resume

STOP_TOKEN_IDS_MAX = 64
PENALTY_MAX = 2.0
LOGIT_BIAS_MAX = 100.0
LOGIT_BIAS_TOKENS_MAX = 1024
LOGPROBS_MAX = 20
PROMPT_SCORES_MAX = 1 << 16
"""Log-probabilities of one prompt. More take tenths of a second to pass on, in which a node answers nobody else."""
STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 256
CACHE_SALT_BYTES_MAX = 256
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MESSAGES_MAX = 4_096

NAME_CHARS_SHOWN: Final = 80
"""Of a name that a request says, in an error about it."""
UINT32_MAX = (1 << 32) - 1
INT_DIGITS_MAX: Final = 640
"""Of a whole number in JSON, the least that Python takes: longer ones take quadratic time to read."""

NEUTRAL = SamplingDefaults()
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """What every attempt at the request shares."""

    prompt: tuple[int, ...]
    sampling: common_pb2.SamplingSpec
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: bytes = b""
    eos_token_ids: tuple[int, ...] = ()
    """The model's."""
    said: tuple[int, ...] = ()
    """Ids that the client says it has of the answer, from index 0 on: it goes on behind them."""

    def finish_after(self, ids: Sequence[int]) -> common_pb2.FinishReason | None:
        """Why nothing follows these ids, by the rules that engines end answers by. Stop strings are the text's."""
        if not ids:
            return None
        sampling = self.sampling
        ends = ids[-1] in sampling.stop_token_ids or (not sampling.ignore_eos and ids[-1] in self.eos_token_ids)
        if ends and len(ids) > sampling.min_tokens:
            return common_pb2.FINISH_REASON_STOP
        return common_pb2.FINISH_REASON_LENGTH if len(ids) >= sampling.max_tokens else None


def text_of(state: resume_pb2.ResumeState) -> CheckedRequest:
    """Of a request that is taken over: what its text is cut by, and nothing to compute it by."""
    sampling = common_pb2.SamplingSpec(min_tokens=state.min_tokens, stop_token_ids=state.stop_token_ids)
    if state.grammar:
        sampling.grammar.SetInParent()
    return CheckedRequest(prompt=(), sampling=sampling, stop=tuple(state.stop), include_stop=state.include_stop)


class ObservedRequest:
    """What the router reports of one request, for metrics; the methods here do nothing. `ended` is called last, once,
    whatever happened: after `finished`, after `failed`, or after neither, when the client went away.
    """

    __slots__ = ()

    def tokens(self, now_s: float, count: int) -> None:
        """So many tokens came at once."""

    def waits(self) -> None:
        """It has come to wait in line; `waited` follows."""

    def waited(self, waited_s: float) -> None:
        """It waits no more."""

    def resumed(self) -> None:
        """A node was lost with it; the rest of the answer is computed elsewhere."""

    def attached(self, outcome: str) -> None:
        """Its client has come back for an answer that it has a part of."""

    def corrupt(self, prefill_node: str, decode_node: str, transport: str) -> None:
        """A handoff of it was refused: sampled records had not arrived as they were sent."""

    def finished(self, reason: common_pb2.FinishReason, stats: inference_pb2.RequestStats) -> None:
        """The client has all of the answer."""

    def failed(self, reason: Reason) -> None:
        """The client has an error."""

    def ended(self) -> None:
        """Nothing of it is left in this router."""


async def _free(_tokens: int) -> None:
    """Without a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCall:
    """Whose request it is. Times are those of the loop."""

    id: RequestId
    """What the client calls it."""
    trace: Traceparent
    deadline_s: float
    choice: int = 0
    """Number of this answer among those to one question: other noise from the same seed."""
    priority: Priority = Priority.NORMAL
    special_tokens: bool = False
    """Whether messages of its chat may spell special tokens out; else these are text."""
    whole: bool = False
    """Its client gets the answer in one piece, at its end."""
    source: str | None = None
    """The address that it counts for; None for a proxy of ours."""
    key_name: str | None = None
    """Of the API key that it came with."""
    key_salt: str | None = None
    """That key's salt, "" where it has none; None without a key."""
    take_prompt: Callable[[int], Awaitable[None]] = _free
    """Called with the length of its prompt. Raises BatonError where the key may not have so many tokens now."""
    take_output: Callable[[int], None] = lambda _tokens: None
    """Called with the number of tokens that the client gets."""
    left: Callable[[RequestId, int], None] = lambda _request, _epoch: None
    """Called where the client has left an answer that goes on without it, with how often it had been taken up."""
    came_back: Callable[[RequestId, int], None] = lambda _request, _epoch: None
    """Called where it has taken such an answer up again, with how often that makes it."""
    resume: Resume | None = None
    """Of a request that its client may go on with by another call, or goes on with by this one."""
    shown: frozenset[int] = frozenset()
    """Special tokens that are part of its text: its door reads them."""
    had: Callable[[str], None] | None = None
    """Called with the text that its client, which attaches, has already: its sink does not get that."""

    @property
    def source_number(self) -> int:
        """Stands for whose it is: the key's, or without one the address's."""
        name = ("address", self.source) if self.key_name is None else ("key", self.key_name)
        return int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:8])


def with_priority(call: ClientCall, asked: Priority | None) -> ClientCall:
    """The call by the class that its request asks for. Nobody goes before what its key may."""
    if asked is None:
        return call
    return replace(call, priority=asked if call.key_name is None else max(asked, call.priority))


def read_message(_prompts: object, raw: bytes | bytearray, context_len_max: int) -> inference_pb2.GenerateRequest:
    """The message of a call, whose parts are few enough to be looked at on the event loop. Raises BatonError."""
    try:
        request = inference_pb2.GenerateRequest.FromString(bytes(raw))
    except DecodeError as error:
        raise BatonError(Reason.BAD_FIELD, "The message of the call is no GenerateRequest.") from error
    _check_parts(request, context_len_max)
    return request


def read_attach(_prompts: object, raw: bytes | bytearray, context_len_max: int) -> inference_pb2.AttachRequest:
    """The same of a client that attaches."""
    try:
        message = inference_pb2.AttachRequest.FromString(bytes(raw))
    except DecodeError as error:
        raise BatonError(Reason.BAD_FIELD, "The message of the call is no AttachRequest.") from error
    if message.HasField("request"):
        _check_parts(message.request, context_len_max)
    check_prompt_length(len(message.output.ids), context_len_max, field="output")
    return message


def _check_parts(request: inference_pb2.GenerateRequest, context_len_max: int) -> None:
    check_counts(request)
    check_prompt_length(len(request.token_ids.ids), context_len_max, field="token_ids")
    request.DiscardUnknownFields()


def check_request(
    request: inference_pb2.GenerateRequest,
    *,
    model: ModelInfo,
    prompt: Sequence[int],
    has_tokenizer: bool,
    answer_tokens: Callable[[int], int],
    rng: random.Random,
    defaults: SamplingDefaults = NEUTRAL,
    choice: int = 0,
    key_salt: str | None = None,
    said: Sequence[int] = (),
    names: Sequence[str] = (),
    source: int = 0,
) -> CheckedRequest:
    """Validate against the model that is served.

    `prompt` has the token ids of the request's prompt, whatever its kind. `choice` numbers the answers to one question
    with one seed. `max_tokens` is cut to what the model's context leaves after the prompt; `answer_tokens` gives it,
    from the length of the prompt, for a request that names none. `defaults` stand for sampling fields that are not set;
    a zero that is set counts. `key_salt` is that of the API key. `said` is what the client has of the answer. `names`
    are those that the model is served by, if not its own. `source` is the call's. Raises BatonError naming the field.
    """
    if request.HasField("model"):
        check_model_name(request.model, names or (model.name,))
    check_counts(request)
    kind = request.WhichOneof("prompt") or "prompt"
    if kind == "text" and not has_tokenizer:
        text = "This router was started without a tokenizer: send token_ids, or start it with --model."
        raise BatonError(Reason.NO_TOKENIZER, text, field="text")
    check_prompt(prompt, model, field=kind)
    sampling = request.sampling
    named = {field.name: value for field, value in sampling.ListFields()}  # one look: most requests name a few
    if "prompt_logprobs" in named and request.resumable:
        why = "prompt_logprobs do not outlive their router: leave them, or resumable, out."
        raise bad_field("sampling.prompt_logprobs", why)
    if "max_tokens" in named:
        max_tokens = _in_range("max_tokens", sampling.max_tokens, 1, UINT32_MAX, "at least 1")
    else:
        max_tokens = answer_tokens(len(prompt))
    max_tokens = min(max_tokens, model.context_len_max - len(prompt))
    checked = CheckedRequest(
        prompt=tuple(prompt),
        sampling=common_pb2.SamplingSpec(
            seed=sampling.seed if "seed" in named else rng.getrandbits(64),
            max_tokens=max_tokens,
            choice=choice,
            ignore_eos=sampling.ignore_eos,
            grammar=named.get("grammar"),
            grammar_source=source if "grammar" in named else 0,
            **_drawn_by(named, model, defaults),
            **_counts(named, len(prompt), max_tokens),
        ),
        stop=_stop(sampling, has_tokenizer=has_tokenizer) if "stop" in named else (),
        include_stop=sampling.include_stop,
        cache_salt=own_cache_salt(key_salt, check_salt(request.cache_salt) if request.HasField("cache_salt") else b""),
        eos_token_ids=model.eos_token_ids,
        said=_said(said, model),
    )
    problem = grammar_problem(checked.sampling)
    if problem is not None:
        raise bad_field("sampling.grammar", f"The request cannot be answered: {problem}.")
    return checked


def _drawn_by(named: Mapping[str, Any], model: ModelInfo, defaults: SamplingDefaults) -> dict[str, Any]:
    """Fields of a SamplingSpec: what a token is drawn by. Raises BatonError."""
    vocab, repetition_penalty = model.vocab_size, _number(named, "repetition_penalty", defaults.repetition_penalty)
    found: dict[str, Any] = {
        "temperature": _number(named, "temperature", defaults.temperature),
        "top_k": min(defaults.top_k, vocab),
        "top_p": _number(named, "top_p", defaults.top_p),
        "min_p": _number(named, "min_p", defaults.min_p),
    }
    if "top_k" in named:
        allowed = f"at most the vocabulary of {vocab} (0 is off)"
        found["top_k"] = _in_range("top_k", named["top_k"], 0, vocab, allowed)
    if repetition_penalty != 1:
        found["repetition_penalty"] = repetition_penalty
    for name in ("presence_penalty", "frequency_penalty"):
        if name in named:
            found[name] = _number(named, name, 0.0)
    if "stop_token_ids" in named:
        found["stop_token_ids"] = _stop_token_ids(named["stop_token_ids"], model)
    if "logit_bias" in named:
        found["logit_bias"] = _logit_bias(named["logit_bias"], model)
    return found


def _counts(named: Mapping[str, Any], prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Fields of a SamplingSpec: how many tokens, and how many log-probabilities. Raises BatonError."""
    found = {}
    if "min_tokens" in named:
        allowed = f"at most max_tokens, which is {max_tokens} here"
        found["min_tokens"] = _in_range("min_tokens", named["min_tokens"], 0, max_tokens, allowed)
    if "logprobs" in named:
        found["logprobs"] = _in_range(
            "logprobs", named["logprobs"], 0, LOGPROBS_MAX, f"at most {LOGPROBS_MAX} alternatives"
        )
    if "prompt_logprobs" in named:
        most = min(LOGPROBS_MAX, PROMPT_SCORES_MAX // prompt_tokens - 1)
        allowed = (
            f"at most {LOGPROBS_MAX}, and with each of the prompt's {prompt_tokens} tokens {PROMPT_SCORES_MAX} in all"
        )
        found["prompt_logprobs"] = _in_range("prompt_logprobs", named["prompt_logprobs"], 0, most, allowed)
    return found


def check_model_name(name: str, names: Sequence[str]) -> None:
    """Raises BatonError UNKNOWN_MODEL."""
    if name not in names:
        served = ", ".join(f"'{each}'" for each in names)
        text = f"This cluster serves {served}, not '{name[:NAME_CHARS_SHOWN]}'."
        raise BatonError(Reason.UNKNOWN_MODEL, text, field="model")


def _said(ids: Sequence[int], model: ModelInfo) -> tuple[int, ...]:
    if ids and max(ids) >= model.vocab_size:
        text = f"Token id {max(ids)} is outside the vocabulary of {model.vocab_size}."
        raise bad_field("output", text, reason=Reason.TOKEN_OUT_OF_RANGE)
    return tuple(ids)


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


def own_cache_salt(key_salt: str | None, asked: bytes) -> bytes:
    """What goes into the hash chain for a request that asks for the salt `asked` (empty: none).

    `key_salt` is that of its key, "" where that has none; it is None where there are no keys. A request's salt never
    replaces its key's, and is told apart from every key's by a byte that no text has: nobody can read, from the time
    of a first token, what another key's requests have cached.
    """
    if key_salt is None or not asked:
        return asked if key_salt is None else key_salt.encode()
    key_bytes = key_salt.encode()
    return b"\xff" + hashlib.sha256(len(key_bytes).to_bytes(8) + key_bytes + asked).digest()


def check_role(role: str, i: int, *, field: str, roles: Sequence[str] = ROLES, of: str = "messages") -> None:
    """Of message `i`, of these. Templates write it between the characters of a special token, so it is one of a few.
    Raises BatonError naming `field`."""
    if role not in roles:
        raise bad_field(field, f"{of}[{i}] has the role {role[:40]!r}; roles are {', '.join(roles)}.")


def check_prompt(ids: Sequence[int], model: ModelInfo, *, field: str) -> None:
    """Whether the model takes these token ids. Raises BatonError naming `field`."""
    if not ids:
        raise bad_field(field, "The prompt is empty: it must have at least one token.", reason=Reason.EMPTY_PROMPT)
    check_prompt_length(len(ids), model.context_len_max, field=field)
    if max(ids) >= model.vocab_size:
        where = next(i for i, token in enumerate(ids) if token >= model.vocab_size)
        raise bad_field(
            field,
            f"Token id {ids[where]} at position {where} is outside the vocabulary of {model.vocab_size}.",
            reason=Reason.TOKEN_OUT_OF_RANGE,
        )


def context_words(context_len_max: int) -> str:
    """What errors of prompts that are too long begin with: frameworks look for it before they shorten a prompt."""
    return f"This model's maximum context length is {context_len_max} tokens."


def check_prompt_length(tokens: int, context_len_max: int, *, field: str) -> None:
    """Raises BatonError naming `field`."""
    if tokens >= context_len_max:
        raise bad_field(
            field,
            # Some frameworks look for the last words.
            f"{context_words(context_len_max)} The prompt has {tokens} tokens, and one output token must fit in it "
            "too: the prompt is too long.",
            reason=Reason.PROMPT_TOO_LONG,
        )


def _out_of_range(name: str, value: object, allowed: str) -> BatonError:
    text = f"{name} is {value}; it must be {allowed}."
    return bad_field(f"sampling.{name}", text, reason=Reason.SAMPLING_OUT_OF_RANGE)


def _in_range(name: str, value: _N, lowest: float, highest: float, allowed: str) -> _N:
    if not lowest <= value <= highest:
        raise _out_of_range(name, value, allowed)
    return value


_ABOVE_0: Final = math.ulp(0.0)
_PENALTIES: Final = (-PENALTY_MAX, PENALTY_MAX, f"from -{PENALTY_MAX:g} to {PENALTY_MAX:g} (0 is off)")
_RANGES: Final[Mapping[str, tuple[float, float, str]]] = {
    "temperature": (0, TEMPERATURE_MAX, f"from 0 (greedy) to {TEMPERATURE_MAX:g}"),
    "top_p": (_ABOVE_0, 1, "above 0 and at most 1 (1 is off)"),
    "min_p": (0, 1, "from 0 (off) to 1"),
    "repetition_penalty": (
        _ABOVE_0, REPETITION_PENALTY_MAX, f"above 0 and at most {REPETITION_PENALTY_MAX:g} (1 is off)"
    ),
    "presence_penalty": _PENALTIES,
    "frequency_penalty": _PENALTIES,
}  # fmt: skip
"""Lowest and highest value, and both in words."""


def _number(named: Mapping[str, Any], name: str, default: float) -> float:
    """What the request names, or the default. A NaN is in no range."""
    return _in_range(name, named[name], *_RANGES[name]) if name in named else default


_COUNTS: Final = (
    ("stop", STOP_STRINGS_MAX, "strings"),
    ("stop_token_ids", STOP_TOKEN_IDS_MAX, "ids"),
    ("logit_bias", LOGIT_BIAS_TOKENS_MAX, "tokens"),
)


def check_counts(request: inference_pb2.GenerateRequest) -> None:
    """Nothing is copied before it is counted. Raises BatonError naming the field."""
    sampling = request.sampling
    for name, most, what in _COUNTS:
        count = len(getattr(sampling, name))
        if count > most:
            raise _out_of_range(name, f"{count} {what} long", f"at most {most} {what} long")
    count = len(request.chat.messages)
    if count > MESSAGES_MAX:
        text = f"The conversation has {count} messages; at most {MESSAGES_MAX} are taken."
        raise bad_field("chat.messages", text, reason=Reason.PROMPT_TOO_LONG)


def _stop_token_ids(named: Sequence[int], model: ModelInfo) -> list[int]:
    ids = sorted(set(named))
    if ids and ids[-1] >= model.vocab_size:
        raise _out_of_range("stop_token_ids", ids[-1], f"ids below the vocabulary of {model.vocab_size}")
    return ids


def _logit_bias(named: Mapping[int, float], model: ModelInfo) -> dict[int, float]:
    biases = dict(named)
    for token, bias in sorted(biases.items()):
        if token >= model.vocab_size:
            allowed = f"for ids below the vocabulary of {model.vocab_size}"
            raise _out_of_range("logit_bias", f"for token {token}", allowed)
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            allowed = f"from -{LOGIT_BIAS_MAX:g} to {LOGIT_BIAS_MAX:g}"
            raise _out_of_range("logit_bias", f"{bias} for token {token}", allowed)
    return biases


def _stop(sampling: inference_pb2.Sampling, *, has_tokenizer: bool) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(sampling.stop))
    for stop in stops:
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            raise _out_of_range("stop", f"a string of {len(stop)} characters", f"1 to {STOP_CHARS_MAX} characters")
    if stops and not has_tokenizer:
        raise BatonError(
            Reason.NO_TOKENIZER,
            "This router was started without a tokenizer and sees no text: use stop_token_ids, or start it with "
            "--model.",
            field="sampling.stop",
        )
    return stops
