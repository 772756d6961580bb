"""What text workers do. No more tokens than the model takes come back: a call that has more is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from batonpb import inference_pb2, resume_pb2

from router import openai
from router.openai import OpenAiCall
from router.openai_tools import parse_tools
from router.prompts import PromptEncoder
from router.request import check_prompt_length


def parse_call(
    prompts: PromptEncoder, raw: bytes | bytearray, chat: bool, special_tokens: bool, context_len_max: int
) -> OpenAiCall:
    """The body of either endpoint. Raises BatonError naming the field."""
    body = openai.parse_body(raw)
    if not chat:
        call = openai.parse_completion(body, prompts.encode_text, context_len_max, decode=prompts.decode)
    else:
        asked = parse_tools(body)
        encode = partial(prompts.encode_chat, tools=asked.tools, special_tokens=special_tokens)
        call = openai.parse_chat(body, encode, context_len_max)
        if asked.tools or prompts.form.splits:
            reasons = prompts.opens_reasoning(call.requests[0].token_ids.ids)
            reading = resume_pb2.AnswerReading(tools=bool(asked.tools), parallel=asked.parallel, reasons=reasons)
            call = replace(call, reading=reading)
    for request in call.requests:
        check_prompt_length(len(request.token_ids.ids), context_len_max, field="token_ids")
    return call


def encode_prompt(
    prompts: PromptEncoder, raw: bytes | bytearray, special_tokens: bool, context_len_max: int
) -> Sequence[int]:
    """The tokens of the text or chat of a GenerateRequest. Raises BatonError."""
    request = inference_pb2.GenerateRequest.FromString(bytes(raw))
    ids = prompts.encode(request, special_tokens)
    check_prompt_length(len(ids), context_len_max, field=str(request.WhichOneof("prompt")))
    return ids
