"""What text workers do. No more tokens than the model takes come back: a call that has more is refused here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from batonpb import inference_pb2, resume_pb2

from baton.errors import BatonError, Reason
from baton.wire import GRAMMAR_BYTES_MAX
from router import openai, responses
from router.answer_grammar import answer_rules, own_tokens
from router.openai import OpenAiCall
from router.openai_tools import AskedTools, parse_tools
from router.prompts import PromptEncoder
from router.request import check_prompt_length, context_words
from router.resume import request_digest
from router.structured import check_no_grammar


def parse_call(
    prompts: PromptEncoder, raw: bytes | bytearray, chat: bool, special_tokens: bool, context_len_max: int
) -> OpenAiCall:
    """The body of a completion, or of a chat. Raises BatonError naming the field."""
    return _parsed(prompts, openai.parse_body(raw), chat, special_tokens, context_len_max)


def parse_response(
    prompts: PromptEncoder, raw: bytes | bytearray, special_tokens: bool, context_len_max: int
) -> OpenAiCall:
    """The body of /v1/responses. Raises BatonError naming the field."""
    body = openai.parse_body(raw)
    chat, echo = responses.chat_body(body), responses.echo_of(body)
    try:
        return replace(_parsed(prompts, chat, True, special_tokens, context_len_max), echo=echo)
    except BatonError as error:
        raise responses.renamed(error) from error


def _parsed(
    prompts: PromptEncoder, body: Mapping[str, Any], chat: bool, special_tokens: bool, context_len_max: int
) -> OpenAiCall:
    if not chat:
        with _too_long(context_len_max):
            call = openai.parse_completion(body, prompts.encode_text, context_len_max, decode=prompts.decode)
    else:
        asked = parse_tools(body)
        encode = partial(prompts.encode_chat, tools=asked.tools, special_tokens=special_tokens)
        with _too_long(context_len_max):
            call = openai.parse_chat(body, encode, context_len_max)
        if asked.must:
            check_no_grammar(body, "A tool_choice that asks for a call says what the answer is")
        if asked.tools or prompts.form.splits:
            call = _with_parts(prompts, call, asked, unreasoned=not openai.typed(body, "include_reasoning", True))
    for request in call.requests:
        check_prompt_length(len(request.token_ids.ids), context_len_max, field="token_ids")
    return call


@contextmanager
def _too_long(context_len_max: int) -> Iterator[None]:
    """A prompt with too many characters is refused with the words for one with too many tokens."""
    try:
        yield
    except BatonError as error:
        if error.reason is not Reason.PROMPT_TOO_LONG:
            raise
        raise error.reworded(f"{context_words(context_len_max)} {error.message}") from error


def _with_parts(prompts: PromptEncoder, call: OpenAiCall, asked: AskedTools, *, unreasoned: bool) -> OpenAiCall:
    """A chat whose answers have parts: how they are read, and what they are held to."""
    (request,) = call.requests
    begun = prompts.opens_reasoning(request.token_ids.ids)
    reading = resume_pb2.AnswerReading(
        tools=bool(asked.tools),
        parallel=asked.parallel,
        reasons=begun,
        named=bool(asked.named),
        unreasoned=unreasoned,
    )
    grammar, content, rules = request.sampling.grammar, None, None
    if grammar.WhichOneof("kind") == "json_schema":
        content = _schema(grammar.json_schema)
    if content is not None or (asked.held and grammar.WhichOneof("kind") is None):
        assert prompts.codec is not None
        tokens = own_tokens(prompts.codec.special, prompts.codec.added)
        rules = answer_rules(prompts.form, tokens, asked, begun=begun, content=content)
    if rules is not None:
        grammar.rules = rules
    return replace(
        call,
        reading=reading,
        digest=request_digest(call.requests, call.n) if call.resumable else 0,
        grammar_field=call.grammar_field or "tools",
    )


def _schema(text: str) -> Mapping[str, Any] | None:
    """None: it is none, which the node says that compiles it."""
    try:
        schema = json.loads(text) if len(text) <= GRAMMAR_BYTES_MAX else None
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def encode_prompt(
    prompts: PromptEncoder, raw: bytes | bytearray, special_tokens: bool, context_len_max: int
) -> Sequence[int]:
    """The tokens of the text or chat of a GenerateRequest. Raises BatonError."""
    request = inference_pb2.GenerateRequest.FromString(bytes(raw))
    with _too_long(context_len_max):
        ids = prompts.encode(request, special_tokens)
    check_prompt_length(len(ids), context_len_max, field=str(request.WhichOneof("prompt")))
    return ids
