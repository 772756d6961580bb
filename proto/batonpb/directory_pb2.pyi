from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeRecord(_message.Message):
    __slots__ = ("name", "role", "incarnation", "endpoint", "lifecycle", "model", "load", "transports", "sequence", "admin_endpoint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _common_pb2.Role
    incarnation: int
    endpoint: str
    lifecycle: _common_pb2.Lifecycle
    model: _common_pb2.ModelInfo
    load: NodeLoad
    transports: _containers.RepeatedScalarFieldContainer[str]
    sequence: int
    admin_endpoint: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., incarnation: _Optional[int] = ..., endpoint: _Optional[str] = ..., lifecycle: _Optional[_Union[_common_pb2.Lifecycle, str]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., sequence: _Optional[int] = ..., admin_endpoint: _Optional[str] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("waiting_requests", "running_requests", "waiting_tokens", "blocks", "prefill_tokens_per_s", "swapped_out_requests", "host_blocks_filled", "host_blocks_free", "transports_given_up", "control_loop_lag_ms_max", "requests_taken", "fetch_tokens_per_s", "tiers", "moved")
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FILLED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    CONTROL_LOOP_LAG_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TAKEN_FIELD_NUMBER: _ClassVar[int]
    FETCH_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    waiting_requests: int
    running_requests: int
    waiting_tokens: int
    blocks: _common_pb2.BlockCounts
    prefill_tokens_per_s: float
    swapped_out_requests: int
    host_blocks_filled: int
    host_blocks_free: int
    transports_given_up: int
    control_loop_lag_ms_max: int
    requests_taken: int
    fetch_tokens_per_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierLoad]
    moved: MovedLoad
    def __init__(self, waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., blocks: _Optional[_Union[_common_pb2.BlockCounts, _Mapping]] = ..., prefill_tokens_per_s: _Optional[float] = ..., swapped_out_requests: _Optional[int] = ..., host_blocks_filled: _Optional[int] = ..., host_blocks_free: _Optional[int] = ..., transports_given_up: _Optional[int] = ..., control_loop_lag_ms_max: _Optional[int] = ..., requests_taken: _Optional[int] = ..., fetch_tokens_per_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ..., moved: _Optional[_Union[MovedLoad, _Mapping]] = ...) -> None: ...

class MovedLoad(_message.Message):
    __slots__ = ("handoff_bytes", "served_bytes", "fetches", "fetched_bytes", "fetch_s", "fetches_refused", "fetches_failed", "fetch_counts")
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    SERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    FETCHES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FAILED_FIELD_NUMBER: _ClassVar[int]
    FETCH_COUNTS_FIELD_NUMBER: _ClassVar[int]
    handoff_bytes: int
    served_bytes: int
    fetches: int
    fetched_bytes: int
    fetch_s: float
    fetches_refused: int
    fetches_failed: int
    fetch_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handoff_bytes: _Optional[int] = ..., served_bytes: _Optional[int] = ..., fetches: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_s: _Optional[float] = ..., fetches_refused: _Optional[int] = ..., fetches_failed: _Optional[int] = ..., fetch_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("tier", "blocks", "blocks_max", "block_bytes", "blocks_pinned", "blocks_hit", "blocks_stored", "blocks_evicted", "blocks_evicted_unused", "blocks_lost", "blocks_refused", "promotions", "promotion_s", "promotion_counts")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_UNUSED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_S_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_COUNTS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    blocks: int
    blocks_max: int
    block_bytes: int
    blocks_pinned: int
    blocks_hit: int
    blocks_stored: int
    blocks_evicted: int
    blocks_evicted_unused: int
    blocks_lost: int
    blocks_refused: int
    promotions: int
    promotion_s: float
    promotion_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tier: _Optional[str] = ..., blocks: _Optional[int] = ..., blocks_max: _Optional[int] = ..., block_bytes: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., blocks_hit: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., blocks_evicted: _Optional[int] = ..., blocks_evicted_unused: _Optional[int] = ..., blocks_lost: _Optional[int] = ..., blocks_refused: _Optional[int] = ..., promotions: _Optional[int] = ..., promotion_s: _Optional[float] = ..., promotion_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("record", "ttl_ms")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    record: NodeRecord
    ttl_ms: int
    def __init__(self, record: _Optional[_Union[NodeRecord, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("name", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: bool
    def __init__(self, removed: bool = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[NodeRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[NodeRecord, _Mapping]]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("snapshot", "upserts", "removals")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    UPSERTS_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    upserts: _containers.RepeatedCompositeFieldContainer[NodeRecord]
    removals: _containers.RepeatedCompositeFieldContainer[RemoveRequest]
    def __init__(self, snapshot: bool = ..., upserts: _Optional[_Iterable[_Union[NodeRecord, _Mapping]]] = ..., removals: _Optional[_Iterable[_Union[RemoveRequest, _Mapping]]] = ...) -> None: ...
