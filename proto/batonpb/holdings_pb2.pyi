from batonpb import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchHoldingsRequest(_message.Message):
    __slots__ = ("header", "known")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    known: int
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., known: _Optional[int] = ...) -> None: ...

class HoldingsNews(_message.Message):
    __slots__ = ("behind", "number", "part", "parts", "digests", "tiers")
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    behind: int
    number: int
    part: int
    parts: int
    digests: bytes
    tiers: bytes
    def __init__(self, behind: _Optional[int] = ..., number: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., digests: _Optional[bytes] = ..., tiers: _Optional[bytes] = ...) -> None: ...
