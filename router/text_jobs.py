"""What text workers do. No more tokens than the model takes come back: a call that has more is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from batonpb import inference_pb2
from google.protobuf.message import DecodeError

from baton.errors import BatonError, Reason
from router import openai
from router.openai import OpenAiCall
from router.prompts import PromptEncoder
from router.request import check_counts, check_prompt_length


def parse_call(
    prompts: PromptEncoder, raw: bytes | bytearray, chat: bool, special_tokens: bool, context_len_max: int
) -> OpenAiCall:
    """The body of either endpoint. Raises BatonError naming the field."""
    body = openai.parse_body(raw)
    if chat:
        call = openai.parse_chat(body, partial(prompts.encode_chat, special_tokens=special_tokens))
    else:
        call = openai.parse_completion(body)
    for request in call.requests:
        check_prompt_length(len(request.token_ids.ids), context_len_max, field="token_ids")
    return call


def read_message(
    _prompts: PromptEncoder, raw: bytes | bytearray, context_len_max: int
) -> inference_pb2.GenerateRequest:
    """The message of a call, whose parts are few enough to be looked at on the event loop. Raises BatonError."""
    try:
        request = inference_pb2.GenerateRequest.FromString(bytes(raw))
    except DecodeError as error:
        raise BatonError(Reason.BAD_FIELD, "The message of the call is no GenerateRequest.") from error
    _check_parts(request, context_len_max)
    return request


def read_attach(_prompts: PromptEncoder, raw: bytes | bytearray, context_len_max: int) -> inference_pb2.AttachRequest:
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


def encode_prompt(
    prompts: PromptEncoder, raw: bytes | bytearray, special_tokens: bool, context_len_max: int
) -> Sequence[int]:
    """The tokens of the text or chat of a GenerateRequest. Raises BatonError."""
    request = inference_pb2.GenerateRequest.FromString(bytes(raw))
    ids = prompts.encode(request, special_tokens)
    check_prompt_length(len(ids), context_len_max, field=str(request.WhichOneof("prompt")))
    return ids
