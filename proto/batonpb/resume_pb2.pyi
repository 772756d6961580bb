from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResumeToken(_message.Message):
    __slots__ = ("secret", "seed", "request_digest", "places", "http")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    seed: int
    request_digest: int
    places: _containers.RepeatedCompositeFieldContainer[ResumePlace]
    http: HttpCall
    def __init__(self, secret: _Optional[bytes] = ..., seed: _Optional[int] = ..., request_digest: _Optional[int] = ..., places: _Optional[_Iterable[_Union[ResumePlace, _Mapping]]] = ..., http: _Optional[_Union[HttpCall, _Mapping]] = ...) -> None: ...

class HttpCall(_message.Message):
    __slots__ = ("id", "created_unix_s", "chat", "include_usage", "logprobs", "token_ids", "n", "continuous_usage", "tokens_as_ids", "reading")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_USAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    CONTINUOUS_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_AS_IDS_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    id: str
    created_unix_s: int
    chat: bool
    include_usage: bool
    logprobs: bool
    token_ids: bool
    n: int
    continuous_usage: bool
    tokens_as_ids: bool
    reading: AnswerReading
    def __init__(self, id: _Optional[str] = ..., created_unix_s: _Optional[int] = ..., chat: bool = ..., include_usage: bool = ..., logprobs: bool = ..., token_ids: bool = ..., n: _Optional[int] = ..., continuous_usage: bool = ..., tokens_as_ids: bool = ..., reading: _Optional[_Union[AnswerReading, _Mapping]] = ...) -> None: ...

class AnswerReading(_message.Message):
    __slots__ = ("tools", "parallel", "reasons", "named", "unreasoned")
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    UNREASONED_FIELD_NUMBER: _ClassVar[int]
    tools: bool
    parallel: bool
    reasons: bool
    named: bool
    unreasoned: bool
    def __init__(self, tools: bool = ..., parallel: bool = ..., reasons: bool = ..., named: bool = ..., unreasoned: bool = ...) -> None: ...

class ResumePlace(_message.Message):
    __slots__ = ("request", "attempt", "decode", "tokens", "chars", "tokens_crc", "finished", "text_offset", "prompt_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHARS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CRC_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    attempt: int
    decode: int
    tokens: int
    chars: int
    tokens_crc: int
    finished: bool
    text_offset: int
    prompt_tokens: int
    def __init__(self, request: _Optional[bytes] = ..., attempt: _Optional[int] = ..., decode: _Optional[int] = ..., tokens: _Optional[int] = ..., chars: _Optional[int] = ..., tokens_crc: _Optional[int] = ..., finished: bool = ..., text_offset: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class ResumeState(_message.Message):
    __slots__ = ("call", "answer", "answers", "stop", "include_stop", "min_tokens", "logprobs", "prompt_tokens", "output_logprobs", "request_digest", "stop_token_ids", "grammar")
    CALL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    call: str
    answer: int
    answers: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop: bool
    min_tokens: int
    logprobs: bool
    prompt_tokens: int
    output_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    request_digest: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: bool
    def __init__(self, call: _Optional[str] = ..., answer: _Optional[int] = ..., answers: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop: bool = ..., min_tokens: _Optional[int] = ..., logprobs: bool = ..., prompt_tokens: _Optional[int] = ..., output_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., request_digest: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: bool = ...) -> None: ...
