from batonpb import common_pb2 as _common_pb2
from batonpb import directory_pb2 as _directory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LifecycleOrder(_message.Message):
    __slots__ = ("incarnation", "why")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    why: str
    def __init__(self, incarnation: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("record", "requests", "grants_received", "grants_written", "unacknowledged_writes", "conservation_errors", "pairs", "counters", "answers_unacknowledged", "grants_quarantined", "safe_to_delete", "story", "prefixes", "engine", "ended_empty", "ending", "writers", "fetches", "fetches_under_way")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    GRANTS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    UNACKNOWLEDGED_WRITES_FIELD_NUMBER: _ClassVar[int]
    CONSERVATION_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_UNACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    GRANTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SAFE_TO_DELETE_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENDED_EMPTY_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    WRITERS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    FETCHES_UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    record: _directory_pb2.NodeRecord
    requests: int
    grants_received: int
    grants_written: int
    unacknowledged_writes: int
    conservation_errors: int
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    answers_unacknowledged: int
    grants_quarantined: int
    safe_to_delete: bool
    story: str
    prefixes: PrefixStatus
    engine: EngineStatus
    ended_empty: bool
    ending: bool
    writers: _containers.RepeatedCompositeFieldContainer[WriterStatus]
    fetches: _containers.RepeatedCompositeFieldContainer[FetchStatus]
    fetches_under_way: int
    def __init__(self, record: _Optional[_Union[_directory_pb2.NodeRecord, _Mapping]] = ..., requests: _Optional[int] = ..., grants_received: _Optional[int] = ..., grants_written: _Optional[int] = ..., unacknowledged_writes: _Optional[int] = ..., conservation_errors: _Optional[int] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., answers_unacknowledged: _Optional[int] = ..., grants_quarantined: _Optional[int] = ..., safe_to_delete: bool = ..., story: _Optional[str] = ..., prefixes: _Optional[_Union[PrefixStatus, _Mapping]] = ..., engine: _Optional[_Union[EngineStatus, _Mapping]] = ..., ended_empty: bool = ..., ending: bool = ..., writers: _Optional[_Iterable[_Union[WriterStatus, _Mapping]]] = ..., fetches: _Optional[_Iterable[_Union[FetchStatus, _Mapping]]] = ..., fetches_under_way: _Optional[int] = ...) -> None: ...

class FetchStatus(_message.Message):
    __slots__ = ("owner", "owner_incarnation", "fetches", "tokens", "nbytes", "refused", "failed", "seconds")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    owner_incarnation: int
    fetches: int
    tokens: int
    nbytes: int
    refused: int
    failed: int
    seconds: float
    def __init__(self, owner: _Optional[str] = ..., owner_incarnation: _Optional[int] = ..., fetches: _Optional[int] = ..., tokens: _Optional[int] = ..., nbytes: _Optional[int] = ..., refused: _Optional[int] = ..., failed: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("facts", "padding_blocks")
    FACTS_FIELD_NUMBER: _ClassVar[int]
    PADDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    facts: _containers.RepeatedCompositeFieldContainer[Fact]
    padding_blocks: int
    def __init__(self, facts: _Optional[_Iterable[_Union[Fact, _Mapping]]] = ..., padding_blocks: _Optional[int] = ...) -> None: ...

class Fact(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class WriterStatus(_message.Message):
    __slots__ = ("writer", "writer_incarnation", "host", "transport", "grants", "blocks_granted", "blocks_quarantined", "taken_back_ms", "why", "quarantined_ms", "bytes_landed", "landed_per_s")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WRITER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_GRANTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_BACK_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_LANDED_FIELD_NUMBER: _ClassVar[int]
    LANDED_PER_S_FIELD_NUMBER: _ClassVar[int]
    writer: str
    writer_incarnation: int
    host: str
    transport: str
    grants: int
    blocks_granted: int
    blocks_quarantined: int
    taken_back_ms: int
    why: str
    quarantined_ms: int
    bytes_landed: int
    landed_per_s: float
    def __init__(self, writer: _Optional[str] = ..., writer_incarnation: _Optional[int] = ..., host: _Optional[str] = ..., transport: _Optional[str] = ..., grants: _Optional[int] = ..., blocks_granted: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., taken_back_ms: _Optional[int] = ..., why: _Optional[str] = ..., quarantined_ms: _Optional[int] = ..., bytes_landed: _Optional[int] = ..., landed_per_s: _Optional[float] = ...) -> None: ...

class PrefixStatus(_message.Message):
    __slots__ = ("prompt_tokens", "hit_tokens", "pinned_blocks", "pinned_blocks_max", "pins")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    hit_tokens: int
    pinned_blocks: int
    pinned_blocks_max: int
    pins: _containers.RepeatedCompositeFieldContainer[PinStatus]
    def __init__(self, prompt_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., pinned_blocks_max: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinStatus, _Mapping]]] = ...) -> None: ...

class PinStatus(_message.Message):
    __slots__ = ("name", "blocks", "blocks_pinned", "lease_left_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    blocks_pinned: int
    lease_left_ms: int
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., lease_left_ms: _Optional[int] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("peer", "peer_incarnation", "transport", "epoch", "bytes_moved", "transports_given_up", "link_failures", "handoffs_corrupt", "records_checksummed", "link_open", "moved", "moved_recently", "rejected_transports", "given_up_left_ms", "bytes_fetched")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    LINK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_CHECKSUMMED_FIELD_NUMBER: _ClassVar[int]
    LINK_OPEN_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    MOVED_RECENTLY_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    peer_incarnation: int
    transport: str
    epoch: int
    bytes_moved: int
    transports_given_up: _containers.RepeatedScalarFieldContainer[str]
    link_failures: int
    handoffs_corrupt: int
    records_checksummed: int
    link_open: bool
    moved: MovedBytes
    moved_recently: MovedBytes
    rejected_transports: _containers.RepeatedCompositeFieldContainer[_common_pb2.RejectedTransport]
    given_up_left_ms: _containers.RepeatedScalarFieldContainer[int]
    bytes_fetched: int
    def __init__(self, peer: _Optional[str] = ..., peer_incarnation: _Optional[int] = ..., transport: _Optional[str] = ..., epoch: _Optional[int] = ..., bytes_moved: _Optional[int] = ..., transports_given_up: _Optional[_Iterable[str]] = ..., link_failures: _Optional[int] = ..., handoffs_corrupt: _Optional[int] = ..., records_checksummed: _Optional[int] = ..., link_open: bool = ..., moved: _Optional[_Union[MovedBytes, _Mapping]] = ..., moved_recently: _Optional[_Union[MovedBytes, _Mapping]] = ..., rejected_transports: _Optional[_Iterable[_Union[_common_pb2.RejectedTransport, _Mapping]]] = ..., given_up_left_ms: _Optional[_Iterable[int]] = ..., bytes_fetched: _Optional[int] = ...) -> None: ...

class MovedBytes(_message.Message):
    __slots__ = ("nbytes", "moving_us", "bytes_per_s")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    MOVING_US_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    moving_us: int
    bytes_per_s: float
    def __init__(self, nbytes: _Optional[int] = ..., moving_us: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
