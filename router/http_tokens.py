"""`/tokenize` and `/detokenize`, with the bodies of vLLM. Pure; text workers run it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Final

from baton.errors import BatonError, Reason, bad_field
from router import openai
from router.openai import Json
from router.openai_tools import parse_tools
from router.prompts import PromptEncoder
from router.request import check_model_name
from router.text import TextCodec

PATHS: Final = frozenset({"/tokenize", "/detokenize"})


def tokenize(
    prompts: PromptEncoder, raw: bytes | bytearray, special_tokens: bool, names: Sequence[str], tokens_max: int
) -> bytes:
    """JSON: the tokens of a prompt, or of messages as a chat would have them. Raises BatonError naming the field."""
    body = openai.parse_body(raw)
    check_model_name(openai.typed(body, "model", "") or names[0], names)
    if ("messages" in body) == ("prompt" in body):
        raise bad_field("prompt", "Either prompt or messages must be there, and not both.")
    if "messages" in body:
        encode = partial(prompts.encode_chat, tools=parse_tools(body).tools, special_tokens=special_tokens)
        ids = openai.chat_tokens(body, encode)
    else:
        ids = prompts.encode_text(openai.typed(body, "prompt", ""), openai.typed(body, "add_special_tokens", True))
    strings = openai.typed(body, "return_token_strs", False)
    return _dumped(
        {
            "count": len(ids),
            "max_model_len": tokens_max,
            "tokens": list(ids),
            "token_strs": [_codec(prompts).token_name(token) for token in ids] if strings else None,
        }
    )


def detokenize(prompts: PromptEncoder, raw: bytes | bytearray, names: Sequence[str], vocab_size: int) -> bytes:
    """JSON: the text of tokens, special ones too. Raises BatonError naming the field."""
    body = openai.parse_body(raw)
    check_model_name(openai.typed(body, "model", "") or names[0], names)
    ids = openai.token_ids("tokens", body.get("tokens"))
    if ids and max(ids) >= vocab_size:
        text = f"Token id {max(ids)} is outside the vocabulary of {vocab_size}."
        raise bad_field("tokens", text, reason=Reason.TOKEN_OUT_OF_RANGE)
    return _dumped({"prompt": _codec(prompts).decode(ids)})


def _dumped(answer: Json) -> bytes:
    """Written where it is made: of a long text it takes a second."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


def _codec(prompts: PromptEncoder) -> TextCodec:
    if prompts.codec is None:
        text = "This router was started without a tokenizer: start it with --model."
        raise BatonError(Reason.NO_TOKENIZER, text)
    return prompts.codec
