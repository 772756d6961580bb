from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeRequest(_message.Message):
    __slots__ = ("open", "done")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    open: SubscribeOpen
    done: SubscribeDone
    def __init__(self, open: _Optional[_Union[SubscribeOpen, _Mapping]] = ..., done: _Optional[_Union[SubscribeDone, _Mapping]] = ...) -> None: ...

class SubscribeOpen(_message.Message):
    __slots__ = ("header", "cursors")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    cursors: _containers.RepeatedCompositeFieldContainer[Cursor]
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., cursors: _Optional[_Iterable[_Union[Cursor, _Mapping]]] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("key", "next_index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    next_index: int
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., next_index: _Optional[int] = ...) -> None: ...

class SubscribeDone(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[_common_pb2.RequestKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[_common_pb2.RequestKey, _Mapping]]] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestTokens]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestTokens, _Mapping]]] = ...) -> None: ...

class RequestTokens(_message.Message):
    __slots__ = ("key", "first_index", "ids", "finish", "error", "error_reason", "logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _common_pb2.FinishReason
    error: str
    error_reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., error_reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("header", "key", "reason")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    key: _common_pb2.RequestKey
    reason: str
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("header", "key")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    key: _common_pb2.RequestKey
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ...) -> None: ...

class ResolveReply(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    def __init__(self, committed: bool = ...) -> None: ...
