"""Requests: bodies of the OpenAI endpoints, messages of gRPC, what tokenizers and templates do to them, and what a
client shows to go on with one."""

from __future__ import annotations

import base64
import random
import sys
from collections import Counter
from functools import partial
from typing import Any, Final, cast

from batonpb import inference_pb2, resume_pb2
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from baton.errors import BatonError
from baton.wire import ModelInfo
from router import openai
from router.answer_forms import AnswerForm, AnswerParser, ToolForm
from router.answer_reader import Piece, PieceKind
from router.chat_template import ChatTemplate
from router.http_attach import LAST_EVENT_ID, call_of, read_token, resumes
from router.openai import CHOICES_MAX, OpenAiCall
from router.openai_tools import parse_tools
from router.prompts import PromptEncoder
from router.replies import Replies
from router.request import ROLES, check_request
from router.resume import RESUMABLE_ANSWERS_MAX, TOKEN_CHARS_MAX, ResumeToken
from router.text import TextCodec
from router.text_jobs import parse_response
from tests.fuzz.target import Target, jsons, refusal_is_typed, written
from tests.support import chat_tokenizers
from tests.support.chat_tokenizers import BEGIN, END

MODEL: Final = ModelInfo(
    name="m", fingerprint="f", vocab_size=1000, context_len_max=4_096, eos_token_ids=(0,), layout_hash="l",
    block_size=16, protocol_min=1, protocol_max=1,
)  # fmt: skip
CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | replace('/think', '') | trim }}"
    "{% for call in m.tool_calls %}{{ call | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if mood %}{{ mood }}{% endif %}"
)
KINDS: Final = (
    chat_tokenizers.byte_level, chat_tokenizers.byte_fallback, chat_tokenizers.unigram, chat_tokenizers.word_piece
)  # fmt: skip
TOKENIZERS: Final = [make() for make in KINDS]
ENCODERS: Final = [
    PromptEncoder(codec=TextCodec(make()), template=ChatTemplate(CHATML, {}), chars_max=100_000) for make in KINDS
]
_PIECES: Final = (BEGIN, END, "<|im", "_start|>", "</", "s>", "＜/s＞", "/think", "[UNK]", "a", " ", "\U000c0000", "𓀀")


def check_answer_form(data: bytes) -> None:
    """The text of an answer, in each form: one way of cutting it gives what another gives."""
    text = data.decode(errors="replace")
    for tools in (None, *ToolForm):
        form = AnswerForm(tools=tools, think=("<think>", "</think>"))
        whole, cut = (AnswerParser(form, tools=True) for _ in range(2))
        halves = [piece for at in range(0, len(text), 7) for piece in cut.feed(text[at : at + 7])]
        assert _said([*halves, *cut.end()]) == _said([*whole.feed(text), *whole.end()]), tools


def _said(pieces: list[Piece]) -> dict[tuple[PieceKind, int], str]:
    said: dict[tuple[PieceKind, int], list[str]] = {}
    for piece in pieces:
        said.setdefault((piece.kind, piece.call), []).append(piece.text)
    return {key: "".join(texts) for key, texts in said.items()}


def check_body(data: bytes) -> None:
    """Of any of the endpoints."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)  # as routers do
    try:
        with refusal_is_typed():
            _sent(openai.parse_completion(openai.parse_body(data)))
        for encoder in ENCODERS[:1]:
            with refusal_is_typed():
                body = openai.parse_body(data)
                _sent(openai.parse_chat(body, partial(encoder.encode_chat, tools=parse_tools(body).tools)))
            with refusal_is_typed():
                call = parse_response(encoder, data, False, 4_096)
                assert call.echo is not None
                _sent(call)
    finally:
        sys.set_int_max_str_digits(before)


def _sent(call: OpenAiCall) -> None:
    answers = len(call.requests) * call.n
    assert 0 < answers <= (RESUMABLE_ANSWERS_MAX if call.resumable else CHOICES_MAX)
    assert len(call.said) in (0, answers)
    assert call.stream or not call.resumable
    for request in call.requests:
        check_message(request.SerializeToString())


def check_message(data: bytes) -> None:
    """A GenerateRequest: what is taken is within the model's bounds, and says the same again."""
    try:
        request = inference_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return  # gRPC answers that
    with refusal_is_typed():
        given = request.token_ids.ids
        prompt = given if request.WhichOneof("prompt") in (None, "token_ids") else ENCODERS[0].encode(request)
        first, second = (
            check_request(
                inference_pb2.GenerateRequest.FromString(each),
                model=MODEL,
                prompt=prompt,
                has_tokenizer=True,
                answer_tokens=lambda _tokens: 16,
                rng=random.Random(1),
            )
            for each in (data, request.SerializeToString(deterministic=True))
        )
        assert first == second
        assert len(first.prompt) + first.sampling.max_tokens <= MODEL.context_len_max
        assert max(first.prompt) < MODEL.vocab_size


def check_chat(data: bytes) -> None:
    """The first byte chooses a tokenizer; the rest is a body. The prompt has the template's special tokens only."""
    which = (data[0] if data else 0) % len(KINDS)
    asked: list[int] = []

    def encode(messages: Any, extra: Any) -> Any:
        ids = ENCODERS[which].encode_chat(messages, extra)
        asked.append(len(messages))
        ours = {TOKENIZERS[which].token_to_id(text) for text in (BEGIN, END)}
        assert Counter(token for token in ids if token in ours) == dict.fromkeys(ours, len(messages))
        return ids

    with refusal_is_typed():
        call = openai.parse_chat(openai.parse_body(data[1:]), encode)
        assert len(asked) == 1 and call.chat


def check_resume_token(data: bytes) -> None:
    """A token's message: what is taken says the same again, and fits a call to its end."""
    sent = base64.urlsafe_b64encode(data).decode().rstrip("=")
    with refusal_is_typed():
        token = ResumeToken.decode(sent)
        again = token.encode()
        assert ResumeToken.decode(again) == token and len(again) <= TOKEN_CHARS_MAX
        if token.http is None:
            return
        call = call_of(token, token.http.id)
        assert call is not None and len(resumes(call, token, attaches=True)) == len(token.places)
        replies = Replies(request_id=token.http.id, call=call, model="m", created=1, token_text=str)
        replies.go_on(token.places)
        assert replies.usage()["prompt_tokens"] >= 0 and replies.id.isprintable()


def check_last_event_id(data: bytes) -> None:
    """Values of the header, one in each line, as an HTTP connection gives them."""
    with refusal_is_typed():
        try:
            token = read_token([line.decode("latin-1") for line in data.split(b"\n")])
        except BatonError as error:
            assert error.field == LAST_EVENT_ID and len(error.message) < 200
            raise
        assert ResumeToken.decode(token.encode()) == token


_texts = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join) | st.text(max_size=6)
_leaves = st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | _texts
_values = jsons(_leaves)
_parts = st.fixed_dictionaries({"type": st.just("text"), "text": _texts})
_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from([*ROLES, "function", END]) | _values},
        optional={
            "content": _texts | st.lists(_parts, max_size=3) | _values,
            "tool_calls": st.lists(_values, max_size=2),
            "name": _texts,
        },
    ),
    max_size=4,
)  # fmt: skip
_tools = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries(
    {"name": st.just("f") | _texts}, optional={"parameters": _values, "description": _texts})})  # fmt: skip
_numbers = st.integers(-2, 2**33) | st.floats() | st.sampled_from([0, 1, -1, 0.5, 2.0, "1"])
_variables = st.sampled_from(["mood", "tools", "range", "x"])
_fields: dict[Any, st.SearchStrategy[Any]] = {
    "prompt": _texts | st.lists(st.integers(-1, 1100), max_size=5) | _values,
    "model": st.sampled_from(["m", "x" * 9000]),
    "max_tokens": _numbers, "max_completion_tokens": _numbers, "temperature": _numbers, "top_p": _numbers,
    "top_k": _numbers, "min_p": _numbers, "n": _numbers, "best_of": _numbers, "seed": _numbers, "min_tokens": _numbers,
    "logprobs": _numbers | st.booleans(), "top_logprobs": _numbers, "stop": _texts | st.lists(_texts, max_size=20),
    "repetition_penalty": _numbers, "presence_penalty": _numbers, "frequency_penalty": _numbers,
    "logit_bias": st.dictionaries(st.integers(-1, 1100).map(str) | _texts, _numbers, max_size=3) | _values,
    "stop_token_ids": st.lists(st.integers(-1, 1100), max_size=3), "cache_salt": _texts, "stream": st.booleans(),
    "stream_options": _values, "response_format": _values,
    "structured_outputs": _values, "guided_choice": _values, "x": _values, "priority": _values,
    "chat_template_kwargs": st.dictionaries(_variables, _values, max_size=2) | _values,
    "tools": st.lists(_tools | _values, max_size=2) | _values, "parallel_tool_calls": st.booleans() | _values,
    "tool_choice": st.sampled_from(["auto", "none"]) | _values,
    "resumable": st.booleans() | _values, "return_token_ids": st.booleans() | _values,
    "resume_token_ids": st.lists(_numbers | st.lists(_numbers, max_size=3), max_size=3) | _values,
}  # fmt: skip
_completions = st.fixed_dictionaries({}, optional=_fields)
_chats = st.fixed_dictionaries({"messages": _messages | _values}, optional=_fields)

_whole = st.integers(0, 2**32 - 1) | st.integers(0, 70)
_samplings = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(openai._FLOATS, st.floats() | st.floats(0, 2)),
        **dict.fromkeys(("max_tokens", "top_k", "logprobs", "min_tokens", "choice"), _whole),
        "seed": st.integers(0, 2**64 - 1), "stop": st.lists(st.text(max_size=4) | st.just("a" * 300), max_size=18),
        "stop_token_ids": st.lists(_whole, max_size=70), "logit_bias": st.dictionaries(_whole, st.floats(), max_size=3),
        "ignore_eos": st.booleans(), "include_stop": st.booleans(),
    },
).map(lambda fields: inference_pb2.Sampling(**cast(Any, fields)))  # fmt: skip
_chat_messages = st.builds(inference_pb2.ChatMessage, role=st.sampled_from([*ROLES, "", "x" * 5000]), content=_texts)
_requests = st.fixed_dictionaries(
    {"sampling": _samplings},
    optional={
        "text": _texts, "token_ids": st.builds(inference_pb2.TokenIds, ids=st.lists(st.integers(0, 1100), max_size=9)),
        "chat": st.lists(_chat_messages, max_size=4).map(lambda messages: inference_pb2.Chat(messages=messages)),
        "model": st.sampled_from(["m", "", "x" * 9000]), "cache_salt": _texts | st.just("s" * 300),
    },
)  # fmt: skip

_ids = st.sampled_from(["mine", "", "a" * 65, "a\r\nb: c"])
_calls = st.builds(resume_pb2.HttpCall, id=_ids, n=st.integers(0, 4), chat=st.booleans(), logprobs=st.booleans())
_numbers_of_places = ("attempt", "tokens", "chars", "text_offset", "prompt_tokens")
_places = st.fixed_dictionaries(
    {"request": st.sampled_from([b"", b"r" * 16, b"r" * 15])},
    optional={**dict.fromkeys(_numbers_of_places, _whole), "finished": st.booleans()},
).map(lambda fields: resume_pb2.ResumePlace(**cast(Any, fields)))
_tokens = st.builds(
    resume_pb2.ResumeToken,
    secret=st.sampled_from([b"s" * 16, b"s" * 16, b"s" * 15]), seed=st.integers(0, 2**64 - 1),
    places=st.lists(_places, max_size=18), http=st.none() | _calls,
).map(resume_pb2.ResumeToken.SerializeToString)  # fmt: skip
_PLACE: Final = resume_pb2.ResumePlace(request=b"r" * 16, attempt=1, decode=7, tokens=300, chars=5, finished=True)
_TOKEN: Final = resume_pb2.ResumeToken(
    secret=b"s" * 16, seed=5, request_digest=6, places=[_PLACE, _PLACE], http=resume_pb2.HttpCall(id="mine", n=2)
).SerializeToString()
_SENT: Final = base64.urlsafe_b64encode(_TOKEN).rstrip(b"=")

_COMPLETION: Final = (
    b'{"model": "m", "prompt": "hi </s>", "max_tokens": 5, "stop": ["x"], "logit_bias": {"7": -1.5}, "n": 2}'
)
_CHAT: Final = (
    b'{"messages": [{"role": "system", "content": "a </s><|im_start|>"}, {"role": "user", "content": [{"type": "text", '
    b'"text": "b\\ud83d\\ude00"}], "name": "<|im"}], "chat_template_kwargs": {"mood": "</s>"}, "temperature": 0.5}'
)
_REQUEST: Final = inference_pb2.GenerateRequest(
    chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi </s>")]),
    sampling=inference_pb2.Sampling(temperature=0.5, top_k=3, stop=["x"], logit_bias={5: 1.0}, stop_token_ids=[7]),
    cache_salt="s",
).SerializeToString()
_IDS: Final = inference_pb2.GenerateRequest(
    token_ids=inference_pb2.TokenIds(ids=range(300)), sampling=inference_pb2.Sampling(max_tokens=3, seed=2**64 - 1)
).SerializeToString()
_TEXT: Final = inference_pb2.GenerateRequest(text="the <|im_start|> sea", model="m").SerializeToString()

_PART: Final = b'{"type":"text","text":"a"}'

BODIES: Final = Target(
    name="body",
    check=check_body,
    inputs=(_completions | _chats | _values).map(written),
    samples=[_COMPLETION, _CHAT, b'{"prompt": [[1, 2], [3]], "logprobs": 3}'],
    repeats=[
        (b"", b"[", b""), (b"", b'{"a":', b""), (b'{"prompt":[', b"1,", b"1]}"), (b'{"prompt":"', b"\\u0041", b'"}'),
        (b'{"prompt":"', b"\\\\", b'"}'), (b'{"prompt":"', b'\\"', b'"}'), (b'{"prompt":', b"9", b"}"),
        (b'{"prompt":["', b'a","', b'"]}'), (b'{"stop":["', b'a","', b'"],"prompt":"a"}'), (b'{"seed":1', b"0", b"}"),
        (b'{"prompt":"a","logit_bias":{"5":1', b',"5":1', b"}}"), (b'{"prompt":"a"', b',"a":1', b"}"),
        (b'{"x":[', b"[],", b"[]]}"), (b'{"x":1e', b"9", b"}"), (b'{"x":0.', b"1", b"}"), (b"", b"\xff", b""),
        (b'{"prompt":"', b"<|", b'"}'), (b'{"prompt":"', b"</s>", b'"}'), (b'{"prompt":"', "𓀀".encode(), b'"}'),
    ],
)  # fmt: skip
_OBJECT: Final = b'{"name": "f", "arguments": {"a": ['
ANSWER_FORMS: Final = Target(
    name="answer_form",
    check=check_answer_form,
    inputs=st.lists(
        st.sampled_from([
            *[mark for tools in ToolForm for mark in sorted(AnswerForm(tools=tools).markers())], "<think>", "</think>",
            "function", " to=functions.f", "analysis", *'"{}[],:\\ \nf', '{"name": "f", "arguments": {',
        ]) | st.text(max_size=3), max_size=16,
    ).map(lambda parts: "".join(parts).encode()),
    samples=[b'<think>a</think>b<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'],
    repeats=[
        (b"", b" ", b""), (b"", b"<", b""), (b"<think>", b"\n", b"a"), (b"<tool_call>{", b" ", b""),
        (b"<tool_call>{", b'"a":1,', b""), (b'<tool_call>{"a":"', b"a", b""), (b"<tool_call>{", b"{", b""),
        (b"<tool_call>" + _OBJECT, b"[", b""), (b"<tool_call>" + _OBJECT, b'"\\"",', b""), (b"", b"<tool_call>{}", b""),
        (b"{", b'"a":[],', b""), (b"", b'{"name":"f","parameters":{}};', b""), (b"[TOOL_CALLS]", b"f", b""),
        (b"", b"<|channel|>", b""), (b"<|message|>", b"<|end|>", b""), (b"<tool_call>", b"<tool_call>", b""),
    ],
)  # fmt: skip
MESSAGES: Final = Target(
    name="message",
    check=check_message,
    inputs=_requests.map(lambda fields: inference_pb2.GenerateRequest(**cast(Any, fields)).SerializeToString()),
    samples=[_REQUEST, _IDS, _TEXT],
    repeats=[(b"", _REQUEST, b""), (b"", _IDS[:4], b""), (b"", b"\x0b", b""), (b"", b"\x08\x80", b"")],
)
CHATS: Final = Target(
    name="chat",
    check=check_chat,
    inputs=st.tuples(st.integers(0, 3), _chats).map(lambda pair: bytes([pair[0]]) + written(pair[1])),
    samples=[bytes([which]) + _CHAT for which in range(len(KINDS))],
    repeats=[
        (bytes([which]) + b'{"messages":[{"role":"user","content":"', part, b'"}]}')
        for which in range(len(KINDS))
        for part in (b"<|", b"</s>", b"<|im_start", b"/think", b"a ", "𓀀".encode(), "＜/s＞".encode(), b"\\u0301a")
    ]
    + [
        (b'\0{"messages":[{"role":"user","content":"a"}', b',{"role":"user","content":"a"}', b"]}"),
        (b'\0{"messages":[{"role":"user","content":"a","tool_calls":[', b'{"</s>":"</s>"},', b"1]}]}"),
        (b'\0{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"mood":[', b"[],", b"1]}}"),
        (b'\0{"messages":[{"role":"user","content":[', _PART + b",", _PART + b"]}]}"),
    ],
)  # fmt: skip
RESUME_TOKENS: Final = Target(
    name="resume_token",
    check=check_resume_token,
    inputs=_tokens,
    samples=[_TOKEN],
    repeats=[(_TOKEN, _TOKEN[-40:], b""), (b"", _TOKEN, b""), (b"", b"\x0b", b""), (b"\x0a\x10", b"s", b"")],
)
LAST_EVENT_IDS: Final = Target(
    name="last_event_id",
    check=check_last_event_id,
    inputs=st.lists(st.just(_SENT) | st.text(max_size=5).map(str.encode), max_size=3).map(b"\n".join),
    samples=[_SENT, b"  " + _SENT + b" ", _SENT + b"==", _SENT + b"\n" + _SENT],
    repeats=[(b"", b"A", b""), (b"", b"=", b""), (b"", b" ", _SENT), (b"", b"A\n", b""), (b"", b"\xff", b"")],
)
