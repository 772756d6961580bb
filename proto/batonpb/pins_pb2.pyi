from batonpb import common_pb2 as _common_pb2
from batonpb import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PinRequest(_message.Message):
    __slots__ = ("name", "text", "token_ids", "system", "cache_salt", "ttl_ms", "warm")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    token_ids: _inference_pb2.TokenIds
    system: str
    cache_salt: str
    ttl_ms: int
    warm: bool
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., system: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., warm: bool = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: PinnedPrefix
    def __init__(self, pin: _Optional[_Union[PinnedPrefix, _Mapping]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsReply(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    def __init__(self, pins: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("name", "tokens", "has_cache_salt", "ttl_left_ms", "from_config", "nodes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    FROM_CONFIG_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokens: int
    has_cache_salt: bool
    ttl_left_ms: int
    from_config: bool
    nodes: _containers.RepeatedCompositeFieldContainer[PinOnNode]
    def __init__(self, name: _Optional[str] = ..., tokens: _Optional[int] = ..., has_cache_salt: bool = ..., ttl_left_ms: _Optional[int] = ..., from_config: bool = ..., nodes: _Optional[_Iterable[_Union[PinOnNode, _Mapping]]] = ...) -> None: ...

class PinOnNode(_message.Message):
    __slots__ = ("node", "blocks", "blocks_pinned", "problem")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    node: str
    blocks: int
    blocks_pinned: int
    problem: str
    def __init__(self, node: _Optional[str] = ..., blocks: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class HoldPinRequest(_message.Message):
    __slots__ = ("header", "name", "tokens", "cache_salt", "lease_ms", "version")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    name: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    lease_ms: int
    version: int
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., name: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class HoldPinReply(_message.Message):
    __slots__ = ("blocks", "blocks_pinned", "superseded_by")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_BY_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    blocks_pinned: int
    superseded_by: int
    def __init__(self, blocks: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., superseded_by: _Optional[int] = ...) -> None: ...

class DropPinRequest(_message.Message):
    __slots__ = ("header", "name", "version")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    name: str
    version: int
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., name: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class DropPinReply(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...
