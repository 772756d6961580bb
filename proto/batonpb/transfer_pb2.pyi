from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_OUTCOME_UNSPECIFIED: _ClassVar[FetchOutcome]
    FETCH_OUTCOME_DONE: _ClassVar[FetchOutcome]
    FETCH_OUTCOME_ABSENT: _ClassVar[FetchOutcome]
    FETCH_OUTCOME_BUSY: _ClassVar[FetchOutcome]
    FETCH_OUTCOME_UNFIT: _ClassVar[FetchOutcome]
    FETCH_OUTCOME_FAILED: _ClassVar[FetchOutcome]
FETCH_OUTCOME_UNSPECIFIED: FetchOutcome
FETCH_OUTCOME_DONE: FetchOutcome
FETCH_OUTCOME_ABSENT: FetchOutcome
FETCH_OUTCOME_BUSY: FetchOutcome
FETCH_OUTCOME_UNFIT: FetchOutcome
FETCH_OUTCOME_FAILED: FetchOutcome

class FetchRequest(_message.Message):
    __slots__ = ("header", "key", "tokens", "digests", "cache_salt", "first_block", "kv_root", "receiver_name", "receiver_endpoint")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    KV_ROOT_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_NAME_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    key: _common_pb2.RequestKey
    tokens: bytes
    digests: bytes
    cache_salt: bytes
    first_block: int
    kv_root: bytes
    receiver_name: str
    receiver_endpoint: str
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., tokens: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., cache_salt: _Optional[bytes] = ..., first_block: _Optional[int] = ..., kv_root: _Optional[bytes] = ..., receiver_name: _Optional[str] = ..., receiver_endpoint: _Optional[str] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("outcome", "blocks", "reason")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    outcome: FetchOutcome
    blocks: int
    reason: str
    def __init__(self, outcome: _Optional[_Union[FetchOutcome, str]] = ..., blocks: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("header", "writer_name", "writer_endpoint", "model", "transports", "host_name", "host_parts")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    WRITER_NAME_FIELD_NUMBER: _ClassVar[int]
    WRITER_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_PARTS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    writer_name: str
    writer_endpoint: str
    model: _common_pb2.ModelInfo
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_name: str
    host_parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., writer_name: _Optional[str] = ..., writer_endpoint: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., host_name: _Optional[str] = ..., host_parts: _Optional[_Iterable[str]] = ...) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("receiver", "transport", "address", "secret", "epoch", "num_blocks", "rejected_transports")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    receiver: int
    transport: str
    address: str
    secret: bytes
    epoch: int
    num_blocks: int
    rejected_transports: _containers.RepeatedCompositeFieldContainer[_common_pb2.RejectedTransport]
    def __init__(self, receiver: _Optional[int] = ..., transport: _Optional[str] = ..., address: _Optional[str] = ..., secret: _Optional[bytes] = ..., epoch: _Optional[int] = ..., num_blocks: _Optional[int] = ..., rejected_transports: _Optional[_Iterable[_Union[_common_pb2.RejectedTransport, _Mapping]]] = ...) -> None: ...

class LivenessRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ...) -> None: ...

class LivenessReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("header", "number", "lowest_live", "key", "prompt", "sampling", "router", "cache_salt", "deadline_left_ms", "output", "resumable", "whole", "fetch_blocks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOWEST_LIVE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FETCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    number: int
    lowest_live: int
    key: _common_pb2.RequestKey
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingSpec
    router: int
    cache_salt: bytes
    deadline_left_ms: int
    output: _containers.RepeatedScalarFieldContainer[int]
    resumable: _common_pb2.Resumable
    whole: bool
    fetch_blocks: int
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., number: _Optional[int] = ..., lowest_live: _Optional[int] = ..., key: _Optional[_Union[_common_pb2.RequestKey, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingSpec, _Mapping]] = ..., router: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., deadline_left_ms: _Optional[int] = ..., output: _Optional[_Iterable[int]] = ..., resumable: _Optional[_Union[_common_pb2.Resumable, _Mapping]] = ..., whole: bool = ..., fetch_blocks: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("granted", "busy", "reject")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    granted: Grant
    busy: Busy
    reject: Reject
    def __init__(self, granted: _Optional[_Union[Grant, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant", "epoch", "blocks", "prefix_skip", "lease_ms")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SKIP_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    epoch: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    prefix_skip: int
    lease_ms: int
    def __init__(self, grant: _Optional[bytes] = ..., epoch: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., prefix_skip: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("retry_after_ms", "reason")
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    retry_after_ms: int
    reason: str
    def __init__(self, retry_after_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("header", "grant")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    grant: bytes
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., grant: _Optional[bytes] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("renewed", "lease_ms")
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    renewed: bool
    lease_ms: int
    def __init__(self, renewed: bool = ..., lease_ms: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("header", "grant", "writes", "bytes_written", "first_token", "first_logprobs", "checksum_layers", "checksum_blocks", "checksums", "blocks_filled")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FILLED_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    grant: bytes
    writes: int
    bytes_written: int
    first_token: int
    first_logprobs: _common_pb2.TokenLogprobs
    checksum_layers: _containers.RepeatedScalarFieldContainer[int]
    checksum_blocks: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    blocks_filled: int
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., grant: _Optional[bytes] = ..., writes: _Optional[int] = ..., bytes_written: _Optional[int] = ..., first_token: _Optional[int] = ..., first_logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., checksum_layers: _Optional[_Iterable[int]] = ..., checksum_blocks: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., blocks_filled: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("committed", "reason")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    committed: bool
    reason: str
    def __init__(self, committed: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("header", "number", "lowest_live", "writes_in_doubt")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOWEST_LIVE_FIELD_NUMBER: _ClassVar[int]
    WRITES_IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    number: int
    lowest_live: int
    writes_in_doubt: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., number: _Optional[int] = ..., lowest_live: _Optional[int] = ..., writes_in_doubt: bool = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("header", "number", "reason")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.Header
    number: int
    reason: str
    def __init__(self, header: _Optional[_Union[_common_pb2.Header, _Mapping]] = ..., number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class RevokeReply(_message.Message):
    __slots__ = ("writes_in_doubt",)
    WRITES_IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    writes_in_doubt: bool
    def __init__(self, writes_in_doubt: bool = ...) -> None: ...
