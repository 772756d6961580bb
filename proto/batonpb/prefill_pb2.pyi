from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("header", "key", "prompt", "sampling", "router", "cache_salt", "output", "avoid_decode", "resumable", "whole", "owners", "priority")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    AVOID_DECODE_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    key: _common_pb2.RequestKey
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingSpec
    router: int
    cache_salt: bytes
    output: _containers.RepeatedScalarFieldContainer[int]
    avoid_decode: _containers.RepeatedScalarFieldContainer[int]
    resumable: _common_pb2.Resumable
    whole: bool
    owners: _containers.RepeatedCompositeFieldContainer[_common_pb2.Owner]
    priority: _common_pb2.Priority
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingSpec, _Mapping]] = ..., router: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., output: _Optional[_Iterable[int]] = ..., avoid_decode: _Optional[_Iterable[int]] = ..., resumable: _Optional[_Union[_common_pb2.Resumable, _Mapping]] = ..., whole: bool = ..., owners: _Optional[_Iterable[_Union[_common_pb2.Owner, _Mapping]]] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("granted", "first_token", "handed_off")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    granted: Granted
    first_token: FirstToken
    handed_off: HandedOff
    def __init__(self, granted: _Optional[_Union[Granted, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("decode_node", "decode_incarnation", "decode_endpoint")
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    decode_node: str
    decode_incarnation: int
    decode_endpoint: str
    def __init__(self, decode_node: _Optional[str] = ..., decode_incarnation: _Optional[int] = ..., decode_endpoint: _Optional[str] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "finish", "prompt_tokens_cached", "logprobs", "sources", "prompt_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    finish: _common_pb2.FinishReason
    prompt_tokens_cached: int
    logprobs: _common_pb2.TokenLogprobs
    sources: _common_pb2.PromptSources
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, token: _Optional[int] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., prompt_tokens_cached: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., sources: _Optional[_Union[_common_pb2.PromptSources, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("transport", "blocks_written", "blocks_skipped", "bytes_written", "handoff_exposed_ms", "first_token")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    transport: str
    blocks_written: int
    blocks_skipped: int
    bytes_written: int
    handoff_exposed_ms: float
    first_token: FirstToken
    def __init__(self, transport: _Optional[str] = ..., blocks_written: _Optional[int] = ..., blocks_skipped: _Optional[int] = ..., bytes_written: _Optional[int] = ..., handoff_exposed_ms: _Optional[float] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...
