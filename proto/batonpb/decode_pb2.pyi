from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TakeOverOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TAKE_OVER_OUTCOME_UNSPECIFIED: _ClassVar[TakeOverOutcome]
    TAKE_OVER_OUTCOME_TAKEN: _ClassVar[TakeOverOutcome]
    TAKE_OVER_OUTCOME_ABSENT: _ClassVar[TakeOverOutcome]
    TAKE_OVER_OUTCOME_OVER: _ClassVar[TakeOverOutcome]
    TAKE_OVER_OUTCOME_FOREIGN: _ClassVar[TakeOverOutcome]
TAKE_OVER_OUTCOME_UNSPECIFIED: TakeOverOutcome
TAKE_OVER_OUTCOME_TAKEN: TakeOverOutcome
TAKE_OVER_OUTCOME_ABSENT: TakeOverOutcome
TAKE_OVER_OUTCOME_OVER: TakeOverOutcome
TAKE_OVER_OUTCOME_FOREIGN: TakeOverOutcome

class SubscribeRequest(_message.Message):
    __slots__ = ("open", "done", "leave")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    open: SubscribeOpen
    done: SubscribeDone
    leave: SubscribeLeave
    def __init__(self, open: _Optional[_Union[SubscribeOpen, _Mapping]] = ..., done: _Optional[_Union[SubscribeDone, _Mapping]] = ..., leave: _Optional[_Union[SubscribeLeave, _Mapping]] = ...) -> None: ...

class SubscribeOpen(_message.Message):
    __slots__ = ("header", "cursors", "packed")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    cursors: _containers.RepeatedCompositeFieldContainer[Cursor]
    packed: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., cursors: _Optional[_Iterable[_Union[Cursor, _Mapping]]] = ..., packed: bool = ...) -> None: ...

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

class SubscribeLeave(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LeftRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LeftRequest, _Mapping]]] = ...) -> None: ...

class LeftRequest(_message.Message):
    __slots__ = ("key", "ended")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    ended: bool
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., ended: bool = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("requests", "numbers", "indices", "tokens")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestTokens]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestTokens, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestTokens(_message.Message):
    __slots__ = ("key", "number", "first_index", "ids", "finish", "error", "error_reason", "logprobs")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.RequestKey
    number: int
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    finish: _common_pb2.FinishReason
    error: str
    error_reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    def __init__(self, key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., number: _Optional[int] = ..., first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[str] = ..., error_reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("committed", "taken_over")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    taken_over: bool
    def __init__(self, committed: bool = ..., taken_over: bool = ...) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("header", "key", "tag", "deadline_left_ms", "forget")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    key: _common_pb2.RequestKey
    tag: bytes
    deadline_left_ms: int
    forget: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., tag: _Optional[bytes] = ..., deadline_left_ms: _Optional[int] = ..., forget: bool = ...) -> None: ...

class TakeOverReply(_message.Message):
    __slots__ = ("outcome", "epoch", "state")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    outcome: TakeOverOutcome
    epoch: int
    state: bytes
    def __init__(self, outcome: _Optional[_Union[TakeOverOutcome, str]] = ..., epoch: _Optional[int] = ..., state: _Optional[bytes] = ...) -> None: ...
