from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class EmptyTierRequest(_message.Message):
    __slots__ = ("incarnation", "tier")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    tier: str
    def __init__(self, incarnation: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class EmptyTierReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...
