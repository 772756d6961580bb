"""router.replies: chunks of a stream, byte for byte."""

from __future__ import annotations

import json

import pytest
from batonpb import resume_pb2
from hypothesis import given
from hypothesis import strategies as st

from router.answers import AnswerPart
from router.openai import OpenAiCall
from router.replies import Replies

MODEL = 'a "model" é \0 text'


def replies(*, chat: bool, usage: bool, token_ids: bool) -> Replies:
    call = OpenAiCall(
        chat=chat, requests=(), n=2, stream=True, include_usage=usage, logprobs=False, token_ids=token_ids
    )
    return Replies(request_id="r", call=call, model=MODEL, created=7, token_text=str)


def part(text: str, *ids: int) -> AnswerPart:
    return AnswerPart(first_index=0, ids=ids, text=text, logprobs=(), place=None)


@pytest.mark.parametrize("chat", [True, False])
@given(text=st.text(min_size=1), usage=st.booleans(), token_ids=st.booleans(), index=st.integers(0, 1))
def test_a_chunk_that_has_only_text_is_as_json_writes_it(
    chat: bool, text: str, usage: bool, token_ids: bool, index: int
) -> None:
    """Any text, for a model of any name; twice, since what stands around it is made once. Keys have their order."""
    made = replies(chat=chat, usage=usage, token_ids=token_ids)
    assert made.chunk(index, part("")) is not None  # the first one, which has the role
    choice: dict[str, object] = {
        "index": index,
        **({"delta": {"content": text}} if chat else {"text": text}),
        "logprobs": None,
        "finish_reason": None,
        **({"token_ids": []} if token_ids else {}),
    }
    expected = {
        "id": "chatcmpl-r" if chat else "cmpl-r",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 7,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [choice],
        **({"usage": None} if usage else {}),
    }
    assert [made.chunk(index, part(text)) for _ in range(2)] == [json.dumps(expected)] * 2


def test_each_chunk_of_a_split_answer_has_the_usage_so_far() -> None:
    """The one with text that was held back to the end, and so has no token of its own, too."""
    call = OpenAiCall(
        chat=True, requests=(), n=1, stream=True, include_usage=True, continuous_usage=True, logprobs=False,
        reading=resume_pb2.AnswerReading(tools=True),
    )  # fmt: skip
    made = Replies(request_id="r", call=call, model=MODEL, created=7, token_text=str)
    chunks = [made.chunk(0, part("a", 1)), made.chunk(0, part("b", 2)), made.chunk(0, part("c"))]
    assert [json.loads(chunk or "")["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_ids_are_in_the_chunk_of_a_call_that_wants_them() -> None:
    """They are no part of what is made once; a chunk without text is sent for them."""
    made = replies(chat=False, usage=False, token_ids=True)
    chunks = [made.chunk(0, part("a", 1)), made.chunk(0, part("", 2)), made.chunk(0, part("b", 3, 4))]
    choices = [json.loads(chunk or "")["choices"][0] for chunk in chunks]
    assert [(choice["text"], choice["token_ids"]) for choice in choices] == [("a", [1]), ("", [2]), ("b", [3, 4])]


def test_nothing_is_said_where_no_text_has_become_whole() -> None:
    """The first chunk aside: clients wait for its role."""
    made = replies(chat=True, usage=False, token_ids=False)
    assert made.chunk(0, part("", 1)) is not None
    assert made.chunk(0, part("", 2)) is None
