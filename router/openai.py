"""The OpenAI endpoints' bodies, checked and turned into requests of ours, and the JSON of errors. Pure.

A field that we do not know is accepted and ignored, as OpenAI's own clients expect. One that we know and cannot serve
is refused by name where it would change the answer. API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from batonpb import inference_pb2, resume_pb2

from baton.errors import BatonError, Code, Reason, bad_field
from baton.wire import ModelInfo
from router.line import Priority
from router.request import LOGPROBS_MAX, MESSAGES_MAX, ROLES, UINT32_MAX, check_role
from router.resume import RESUMABLE_ANSWERS_MAX, request_digest
from router.structured import grammar_field, grammar_of

CHOICES_MAX: Final = 128
"""Answers to one call: prompts times n."""
PROMPT_SCORES_MAX: Final = 1 << 19
"""Log-probabilities of all prompts of a call, counted for each answer. Each takes a router some 100 bytes."""
_TEXT_ONLY: Final = "answers are text only"
_DRAWN: Final = "answers are drawn, not searched"
_Refused = Mapping[tuple[str, ...], tuple[tuple[object, ...], str]]
"""Names of fields that would change the answer, values that change nothing, and why others are refused."""
_REFUSED: Final[_Refused] = {
    ("prompt_logprobs",): ((), "a completion with echo and logprobs has them"),
    ("guided_whitespace_pattern", "structural_tag"): ((), "schemas, regular expressions, choices and grammars are"),
    ("allowed_token_ids", "bad_words"): (([],), "logit_bias keeps tokens out of an answer"),
    ("skip_special_tokens",): ((True,), "special tokens are no part of an answer's text"),
    ("use_beam_search", "early_stopping"): ((False,), _DRAWN),
    ("length_penalty",): ((1,), _DRAWN),
    ("typical_p",): ((1,), "top_p, top_k and min_p cut what is drawn from"),
    ("logits_processors", "logits_processor", "custom_logit_processor"): (([], ""), "nothing of a client's runs here"),
    ("vllm_xargs", "custom_params"): (({},), "nothing of a client's runs here"),
    ("spaces_between_special_tokens",): ((True,), "special tokens are no part of an answer's text"),
    ("truncation_side",): (("left",), "prompts are cut at their beginning"),
    ("prompt_embeds",): (([],), "prompts are text or token ids"),
    ("thinking_token_budget", "repetition_detection"): ((), "nothing ends an answer but its tokens, stop and limits"),
    ("no_repeat_ngram_size",): ((0,), "repetition_penalty and frequency_penalty keep repetitions down"),
    ("logprob_token_ids",): (([],), "log-probabilities are those of the best tokens"),
    ("return_prompt_text",): ((False,), "/tokenize and /detokenize show a prompt"),
    ("return_hidden_states",): ((False,), "an answer is text, token ids and log-probabilities"),
    ("kv_transfer_params", "ec_transfer_params"): (({},), "the cluster itself chooses its nodes"),
    ("watermarking",): ((False,), "nothing marks an answer's tokens"),
    ("stop_regex",): (([], ""), "stop strings are looked for as they are"),
    ("no_stop_trim",): ((False,), "include_stop keeps the stop string"),
    ("separate_reasoning",): ((True,), "reasoning is never content"),
    ("lora_path",): (([], ""), "the model has no adapters"),
}  # fmt: skip
_REFUSED_NAMES: Final = frozenset(name for names in _REFUSED for name in names)
_REFUSED_IN_COMPLETIONS: Final[_Refused] = {
    ("suffix",): (("",), "text can only be continued at its end"),
}
_REFUSED_IN_CHATS: Final[_Refused] = {
    ("functions",): (([],), "tools are what it became"),
    ("function_call",): (("none",), "tool_choice is what it became"),
    ("modalities",): ((["text"],), _TEXT_ONLY),
    ("audio",): ((), _TEXT_ONLY),
    ("echo",): ((False,), "the prompt's own text is not returned"),
    ("web_search_options",): ((), "nothing is searched"),
    ("mm_processor_kwargs", "media_io_kwargs"): (({},), _TEXT_ONLY),
    ("chat_template",): ((), "the model's own is used"),
    ("add_special_tokens",): ((False,), "the chat template spells them out"),
    ("documents",): (([],), "a template that knows them takes them from chat_template_kwargs"),
}
REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""All that OpenAI and vLLM know. What they mean is the template's."""
_PRIORITIES: Final = {priority.name.lower(): priority for priority in Priority}
_FLOATS: Final = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

_WHOLE: Final = {"max_tokens": (1, UINT32_MAX), "logprobs": (0, LOGPROBS_MAX)}
"""Lowest and highest of whole numbers that are not simply any."""
_KINDS: Final = {bool: "true or false", str: "a string", dict: "an object"}
_T = TypeVar("_T", bool, str, dict[str, Any])

_Prompt = str | Sequence[int]
EncodeChat = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], Sequence[int]]
"""Messages and further variables of the chat template to token ids. Raises BatonError."""
DecodeText = Callable[[Sequence[int]], str]
"""Token ids to their text."""
EncodeText = Callable[[str, bool], Sequence[int]]
"""A text to token ids, with those that the tokenizer adds or without. Raises BatonError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiCall:
    """One call: each of `requests` is answered `n` times. It has none where an attach came without its body."""

    chat: bool
    requests: tuple[inference_pb2.GenerateRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    """A stream ends with a chunk that has the usage."""
    logprobs: bool
    token_ids: bool = False
    """Answers have the ids of their tokens, and of their prompts."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens by their ids."""
    continuous_usage: bool = False
    """Each chunk has the usage so far."""
    priority: Priority | None = None
    echoes: tuple[str, ...] = ()
    """The prompts' texts, which answers begin with. Empty: they do not."""
    no_answer: bool = False
    """The prompts alone are wanted: the one token that is drawn for each is dropped."""
    resumable: bool = False
    """A stream that the client may go on with at another router."""
    digest: int = 0
    """Of a resumable call: a repeated one must be the same."""
    said: tuple[tuple[int, ...], ...] = ()
    """What the client says that it has, of each answer. Empty: it does not say."""
    reading: resume_pb2.AnswerReading | None = None
    """How the answers of a chat are split into content, reasoning and calls of tools. None: all is content."""
    grammar_field: str = ""
    """Of the body, the field that says what the answers are; errors of their grammar name it."""
    echo: dict[str, Any] | None = None
    """What the answer repeats of a call of /v1/responses. None: it is none."""


JSON_ELEMENTS_MAX: Final = 1 << 16
"""Brackets and colons of one body. Parsing so many takes some ten milliseconds, in which no stream goes on."""
JSON_COMMAS_MAX: Final = 1 << 19
"""Commas: most are between token ids, which are quick to parse."""
JSON_STRINGS_MAX: Final = 1 << 16


def check_elements(raw: bytes | bytearray) -> None:
    """Refuse JSON that is short to send and long to parse. Raises BatonError BAD_FIELD."""
    if _few_elements(raw):
        return
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # else a quote may be part of a string
    if plain.count(b'"') > 2 * JSON_STRINGS_MAX:
        raise BatonError(Reason.BAD_FIELD, f"The body has more than {JSON_STRINGS_MAX} strings, the limit.")
    if not _few_elements(b"".join(plain.split(b'"')[::2])):
        most = f"{JSON_ELEMENTS_MAX} lists, objects and keys, or {JSON_COMMAS_MAX} elements"
        raise BatonError(Reason.BAD_FIELD, f"The body has more than {most}, the limit.")


def _few_elements(raw: bytes | bytearray) -> bool:
    nested = sum(map(raw.count, (b"[", b"{", b":")))
    return nested <= JSON_ELEMENTS_MAX and raw.count(b",") <= JSON_COMMAS_MAX


def parse_body(raw: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a call, without the fields that are null. Raises BatonError BAD_FIELD."""
    check_elements(raw)
    try:
        text = raw.decode()
        body = json.loads(text)
        if "\\ud" in text.lower():  # JSON can spell halves of characters, which no encoding has
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BatonError(Reason.BAD_FIELD, f"The body is not JSON in UTF-8: {error}.") from error
    if not isinstance(body, dict):
        raise BatonError(Reason.BAD_FIELD, "The body must be a JSON object.")
    return {name: value for name, value in body.items() if value is not None}


def _no_echo(_ids: Sequence[int]) -> str:
    return ""


def _no_text(_text: str, _special: bool) -> Sequence[int]:
    raise BatonError(Reason.NO_TOKENIZER, "This router was started without a tokenizer.", field="text")


def parse_completion(
    body: Mapping[str, Any],
    encode: EncodeText = _no_text,
    context_len_max: int = UINT32_MAX,
    *,
    decode: DecodeText = _no_echo,
) -> OpenAiCall:
    """/v1/completions. `body` as `parse_body` gives it. Raises BatonError naming the field."""
    n = _answers_each(body)
    refuse(body, _REFUSED_IN_COMPLETIONS)
    sampling = _sampling(body)
    echo = typed(body, "echo", False)
    no_answer = echo and not isinstance(body.get("max_tokens"), bool) and body.get("max_tokens") == 0
    if no_answer:
        sampling.max_tokens = 1  # the least that is computed
    else:
        _set_integer(sampling, body, "max_tokens")
    if body.get("logprobs") is not False:  # some clients say so when they want none
        _set_integer(sampling, body, "logprobs")
    prompts, special = _prompts(body.get("prompt")), typed(body, "add_special_tokens", True)
    if echo and sampling.HasField("logprobs"):
        sampling.prompt_logprobs = sampling.logprobs
    if echo and typed(body, "stream", False) and (no_answer or sampling.HasField("logprobs")):
        raise bad_field(
            "echo", "A stream echoes text only: leave stream out for max_tokens 0, or for log-probabilities."
        )
    if echo and typed(body, "resumable", False):
        raise bad_field("echo", "A resumable stream does not echo: who goes on with it need not have the prompt.")
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts] if echo else []
    if (
        not special
        or sampling.HasField("prompt_logprobs")
        or "truncate_prompt_tokens" in body
        or typed(body, "return_token_ids", False)
    ):
        # Else a text becomes tokens where its request is checked.
        encoded = [encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in prompts]
        prompts = [_cut(ids, body, context_len_max, sampling.max_tokens) for ids in encoded]
    if sampling.HasField("prompt_logprobs"):
        scores = n * sum(map(len, prompts)) * (sampling.prompt_logprobs + 1)
        if scores > PROMPT_SCORES_MAX:
            text = f"The prompts have {scores} log-probabilities in all; a call may ask for {PROMPT_SCORES_MAX}."
            raise bad_field("echo", text)
    call = _call(body, prompts, sampling, chat=False)
    return replace(call, echoes=tuple(texts), no_answer=no_answer) if echo else call


def _cut(prompt: Sequence[int], body: Mapping[str, Any], context_len_max: int, max_tokens: int) -> Sequence[int]:
    """The end of a prompt that is longer than the client wants it."""
    if "truncate_prompt_tokens" not in body:
        return prompt
    tokens = _integer("truncate_prompt_tokens", body["truncate_prompt_tokens"], -1, UINT32_MAX)
    if tokens == 0:
        raise bad_field(
            "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1: what the model takes."
        )
    if tokens == -1:
        tokens = max(1, context_len_max - max(1, max_tokens))
    return prompt[-tokens:]


def parse_chat(body: Mapping[str, Any], encode: EncodeChat, context_len_max: int = UINT32_MAX) -> OpenAiCall:
    """/v1/chat/completions. `body` as `parse_body` gives it. Raises BatonError naming the field."""
    _answers_each(body)
    sampling = _sampling(body)
    _set_integer(sampling, body, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens")
    if typed(body, "logprobs", False):
        sampling.logprobs = 0
        _set_integer(sampling, body, "top_logprobs", "logprobs")
    elif body.get("top_logprobs"):
        raise bad_field("top_logprobs", "top_logprobs needs logprobs: true.")
    prompt = _cut(chat_tokens(body, encode), body, context_len_max, sampling.max_tokens)
    return _call(body, [prompt], sampling, chat=True)


def chat_tokens(body: Mapping[str, Any], encode: EncodeChat) -> Sequence[int]:
    """The prompt of a chat. Raises BatonError naming the field."""
    refuse(body, _REFUSED_IN_CHATS)
    goes_on = typed(body, "continue_final_message", False)
    extra: dict[str, Any] = {"add_generation_prompt": typed(body, "add_generation_prompt", not goes_on)}
    if goes_on and extra["add_generation_prompt"]:
        text = "continue_final_message goes on with the last message; add_generation_prompt begins another one."
        raise bad_field("continue_final_message", text)
    if "reasoning_effort" in body:  # what a template does not name changes nothing
        effort = body["reasoning_effort"]
        if effort not in REASONING_EFFORTS:
            raise bad_field("reasoning_effort", f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}.")
        extra["reasoning_effort"] = effort
    extra |= typed(body, "chat_template_kwargs", {})
    if goes_on:
        extra["continue_final_message"] = True
    return encode(_messages(body.get("messages")), extra)


def _call(
    body: Mapping[str, Any], prompts: Sequence[_Prompt], sampling: inference_pb2.Sampling, *, chat: bool
) -> OpenAiCall:
    requests = tuple(_request(prompt, sampling, body) for prompt in prompts)
    n = _answers_each(body)
    answers = len(requests) * n
    if answers > CHOICES_MAX:
        raise bad_field("n", f"{len(requests)} prompts with n {n} are more than {CHOICES_MAX} answers, the limit.")
    stream, resumable = typed(body, "stream", False), typed(body, "resumable", False)
    if resumable and not stream:
        raise bad_field("resumable", "Only a stream is resumable: set stream, or leave resumable out.")
    if resumable and answers > RESUMABLE_ANSWERS_MAX:
        text = f"A resumable call may ask for {RESUMABLE_ANSWERS_MAX} answers; this one asks for {answers}."
        raise bad_field("resumable", text)
    options = typed(body, "stream_options", {})
    include_usage = typed(options, "include_usage", False, within="stream_options.")
    continuous_usage = typed(options, "continuous_usage_stats", False, within="stream_options.")
    return OpenAiCall(
        chat=chat,
        requests=requests,
        n=n,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        logprobs=requests[0].sampling.HasField("logprobs"),
        token_ids=typed(body, "return_token_ids", False),
        tokens_as_ids=typed(body, "return_tokens_as_token_ids", False),
        priority=_priority(body.get("priority")),
        resumable=resumable,
        digest=request_digest(requests, n) if resumable else 0,
        said=_said(body.get("resume_token_ids", []), answers) if resumable else (),
        grammar_field=grammar_field(body),
    )


def _answers_each(body: Mapping[str, Any]) -> int:
    """Answers to each prompt."""
    n = _integer("n", body.get("n", 1), 1, CHOICES_MAX)
    if "best_of" in body:
        refuse(body, {("best_of",): ((n,), "every answer that is drawn is returned: ask for n of them")})
    return n


def _priority(value: object) -> Priority | None:
    """A class by its name, or vLLM's number: the smaller goes first, and 0 is usual."""
    if value is None:
        return None
    if isinstance(value, str) and value in _PRIORITIES:
        return _PRIORITIES[value]
    if isinstance(value, str):
        raise bad_field("priority", f"priority must be {', '.join(_PRIORITIES)}, or a whole number.")
    number = _integer("priority", value, -(1 << 31), (1 << 31) - 1)
    return Priority.HIGH if number < 0 else Priority.LOW if number else Priority.NORMAL


def _said(said: object, answers: int) -> tuple[tuple[int, ...], ...]:
    """A list of token ids for each answer; for one answer the list itself will do."""
    if not isinstance(said, list):
        raise bad_field("resume_token_ids", "resume_token_ids must be a list of token ids for each answer.")
    nested = any(isinstance(each, list) for each in said)
    lists = said if nested else [said] if said else []
    if lists and len(lists) != answers:
        text = f"resume_token_ids has {len(lists)} lists of token ids, and the call asks for {answers} answers."
        raise bad_field("resume_token_ids", text)
    places = [f"resume_token_ids[{j}]" if nested else "" for j in range(len(lists))]
    return tuple(
        tuple(token_ids("resume_token_ids", each, place=place)) for each, place in zip(lists, places, strict=True)
    )


def _request(
    prompt: _Prompt, sampling: inference_pb2.Sampling, body: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(sampling=sampling)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    for name in ("model", "cache_salt"):
        if name in body:
            setattr(request, name, typed(body, name, ""))
    return request


def _sampling(body: Mapping[str, Any]) -> inference_pb2.Sampling:
    """What both endpoints share, our own extensions too. Ranges are checked where every client's are."""
    if not _REFUSED_NAMES.isdisjoint(body):
        refuse(body, _REFUSED)
    sampling = inference_pb2.Sampling()
    for name in _FLOATS:
        if name in body:
            setattr(sampling, name, _number(body, name))
    if body.get("top_k") == -1:  # what others write for "off"
        sampling.top_k = 0
    else:
        _set_integer(sampling, body, "top_k")
    _set_integer(sampling, body, "min_tokens")
    if "seed" in body:
        sampling.seed = _integer("seed", body["seed"], -(1 << 63), (1 << 64) - 1) % (1 << 64)
    if "ignore_eos" in body:
        sampling.ignore_eos = typed(body, "ignore_eos", False)
    if typed(body, "include_stop", False) or typed(body, "include_stop_str_in_output", False):
        sampling.include_stop = True
    sampling.stop_token_ids.extend(token_ids("stop_token_ids", body.get("stop_token_ids", [])))
    stop = body.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise bad_field("stop", "stop must be a string or a list of strings.")
    sampling.stop.extend(stops)
    _set_logit_bias(sampling, body.get("logit_bias", {}))
    grammar = grammar_of(body)
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)
    return sampling


def _set_logit_bias(sampling: inference_pb2.Sampling, biases: object) -> None:
    if not isinstance(biases, dict):
        raise bad_field("logit_bias", "logit_bias must be an object of token ids and numbers.")
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()):
            raise bad_field("logit_bias", f"logit_bias has the key '{key[:40]}', which is no token id.")
        token = _integer("logit_bias", int(key[:20]), 0, UINT32_MAX)
        sampling.logit_bias[token] = _number({"logit_bias": bias}, "logit_bias")


def _prompts(prompt: object) -> Sequence[_Prompt]:
    """A text, token ids, or a list of either kind."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return [token_ids("prompt", prompt)]
        if len(prompt) > CHOICES_MAX:
            raise bad_field("prompt", f"{len(prompt)} prompts are more than {CHOICES_MAX}, the limit.")
        if all(isinstance(each, str) for each in prompt):
            return prompt
        if all(isinstance(each, list) for each in prompt):
            return [token_ids("prompt", each, place=f"prompt[{j}]") for j, each in enumerate(prompt)]
    raise bad_field("prompt", "prompt must be a string, a list of strings, token ids, or a list of lists of token ids.")


def _messages(messages: object) -> list[dict[str, Any]]:
    """The messages, each with its text as one string."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        raise bad_field("messages", f"messages must be a list of 1 to {MESSAGES_MAX} messages.")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad_field(f"messages.{i}", f"messages[{i}] must be an object with a role.")
        check_role(message["role"], i, field=f"messages.{i}.role", roles=(*ROLES, "function"))
        if message.get("function_call"):
            text = f"messages[{i}] has a function_call: tool_calls are what it became."
            raise bad_field(f"messages.{i}.function_call", text)
        checked.append({**message, "content": _content(message.get("content"), i)})
    return checked


def _content(content: object, i: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    place = f"messages.{i}.content"
    if not isinstance(content, list):
        raise bad_field(place, f"The content of messages[{i}] must be a string or a list of parts.")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad_field(place, f"messages[{i}] has a part of type {str(kind)[:40]!r}; only text is understood.")
    return "\n".join(part["text"] for part in content)


def refuse(body: Mapping[str, Any], refused: _Refused) -> None:
    for names, (neutral, why) in refused.items():
        for name in names:
            if name in body and body[name] not in neutral:
                raise bad_field(name, f"{name} is not supported: {why}. Leave it out.")


def typed(body: Mapping[str, Any], name: str, default: _T, *, within: str = "") -> _T:
    """The field, of the default's type. `within` is the path of `body`, with its dot."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, type(default)):
        raise bad_field(f"{within}{name}", f"{within}{name} must be {_KINDS[type(default)]}.")
    return value


def _number(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_field(name, f"{name} must be a number.")
    try:
        return float(value)
    except OverflowError as error:
        raise bad_field(name, f"{name} is too large.") from error


def _set_integer(sampling: inference_pb2.Sampling, body: Mapping[str, Any], name: str, ours: str | None = None) -> None:
    """Set our field (`max_tokens` for any name that has it, else the same name) where the client has set its own."""
    if name in body:
        field = ours or ("max_tokens" if name == "max_completion_tokens" else name)
        low, high = _WHOLE.get(field, (0, UINT32_MAX))
        setattr(sampling, field, _integer(name, body[name], low, high))


def _integer(name: str, value: object, low: int, high: int, *, place: str = "") -> int:
    """`place` is what an error calls it, if not by its name."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_field(name, f"{place or name} must be a whole number from {low} to {high}.")
    return value


def token_ids(name: str, values: object, *, place: str = "") -> list[int]:
    """`place` is where the list is, if not in the field itself."""
    place = place or name
    if not isinstance(values, list):
        raise bad_field(name, f"{place} must be a list of token ids.")
    if values and {*map(type, values)} == {int} and min(values) >= 0 and max(values) <= UINT32_MAX:
        return values
    return [_integer(name, value, 0, UINT32_MAX, place=f"{place}[{i}]") for i, value in enumerate(values)]


STATUS_OF: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.OUT_OF_RANGE: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.CANCELLED: 499,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.ABORTED: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""HTTP status; 500 for the rest. ABORTED asks to send the request again, which 503 does too."""
_OF_THE_CLUSTER: Final = frozenset({Reason.INCARNATION_MISMATCH, Reason.INCOMPATIBLE_NODE})
"""Preconditions that nodes fail, not the request: 503."""

_CODES: Final = {Reason.UNKNOWN_MODEL: "model_not_found", Reason.PROMPT_TOO_LONG: "context_length_exceeded"}
"""Where OpenAI's own name is what clients look for."""

Json = dict[str, Any]


def error_status(error: BatonError) -> int:
    return 503 if error.reason in _OF_THE_CLUSTER else STATUS_OF.get(error.code, 500)


def error_headers(error: BatonError) -> dict[str, str]:
    """When to try again, in whole seconds as the standard has it, and the same in milliseconds as OpenAI's clients read
    it; or what kind of key is missing."""
    if error.reason is Reason.INVALID_API_KEY:
        return {"www-authenticate": "Bearer"}
    if error.retry_after_ms is None and error_status(error) != 429:
        return {}
    seconds = max(1, math.ceil((error.retry_after_ms or 0) / 1000))
    return {"retry-after": str(seconds), "retry-after-ms": str(seconds * 1000)}


def error_json(error: BatonError, *, chat: bool = False) -> Json:
    status = error_status(error)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    kind = error.metadata.get("limit", kind)  # of a key that may not have more of these
    param = None if error.field is None else error.field.removeprefix("sampling.")
    if param in ("text", "token_ids"):
        param = "messages" if chat else "prompt"
    elif chat and error.field == "sampling.logprobs":
        param = "top_logprobs"
    code = _CODES.get(error.reason) or error.reason.value.lower()
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def model_json(model: ModelInfo, name: str, *, created: int, tokens_max: int) -> Json:
    """`name` is one that the model is served by."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": model.name,
        "parent": None,
        "max_model_len": tokens_max,
    }
