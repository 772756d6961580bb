from batonpb import directory_pb2 as _directory_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToWorker(_message.Message):
    __slots__ = ("number", "answers", "error", "start", "connection", "nodes", "lifecycle", "siblings", "key", "end_former", "metrics_wanted", "warm", "stop_within_ms", "keys_changed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    END_FORMER_FIELD_NUMBER: _ClassVar[int]
    METRICS_WANTED_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    STOP_WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    number: int
    answers: int
    error: PeerError
    start: WorkerStart
    connection: NewConnection
    nodes: NodesKnown
    lifecycle: WorkerLifecycle
    siblings: Siblings
    key: KeyAnswer
    end_former: EndFormer
    metrics_wanted: MetricsWanted
    warm: Warm
    stop_within_ms: int
    keys_changed: KeysChanged
    def __init__(self, number: _Optional[int] = ..., answers: _Optional[int] = ..., error: _Optional[_Union[PeerError, _Mapping]] = ..., start: _Optional[_Union[WorkerStart, _Mapping]] = ..., connection: _Optional[_Union[NewConnection, _Mapping]] = ..., nodes: _Optional[_Union[NodesKnown, _Mapping]] = ..., lifecycle: _Optional[_Union[WorkerLifecycle, _Mapping]] = ..., siblings: _Optional[_Union[Siblings, _Mapping]] = ..., key: _Optional[_Union[KeyAnswer, _Mapping]] = ..., end_former: _Optional[_Union[EndFormer, _Mapping]] = ..., metrics_wanted: _Optional[_Union[MetricsWanted, _Mapping]] = ..., warm: _Optional[_Union[Warm, _Mapping]] = ..., stop_within_ms: _Optional[int] = ..., keys_changed: _Optional[_Union[KeysChanged, _Mapping]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("number", "answers", "error", "ready", "report", "taken", "closed", "metrics", "warm_done", "key_news", "former_ended", "key_admit", "key_widen", "key_prompt", "key_headers", "key_end_answers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WARM_DONE_FIELD_NUMBER: _ClassVar[int]
    KEY_NEWS_FIELD_NUMBER: _ClassVar[int]
    FORMER_ENDED_FIELD_NUMBER: _ClassVar[int]
    KEY_ADMIT_FIELD_NUMBER: _ClassVar[int]
    KEY_WIDEN_FIELD_NUMBER: _ClassVar[int]
    KEY_PROMPT_FIELD_NUMBER: _ClassVar[int]
    KEY_HEADERS_FIELD_NUMBER: _ClassVar[int]
    KEY_END_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    answers: int
    error: PeerError
    ready: WorkerReady
    report: WorkerReport
    taken: int
    closed: ClosedConnections
    metrics: MetricSamples
    warm_done: WarmDone
    key_news: KeyNews
    former_ended: FormerEnded
    key_admit: KeyAdmit
    key_widen: KeyWiden
    key_prompt: KeyPrompt
    key_headers: str
    key_end_answers: str
    def __init__(self, number: _Optional[int] = ..., answers: _Optional[int] = ..., error: _Optional[_Union[PeerError, _Mapping]] = ..., ready: _Optional[_Union[WorkerReady, _Mapping]] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ..., taken: _Optional[int] = ..., closed: _Optional[_Union[ClosedConnections, _Mapping]] = ..., metrics: _Optional[_Union[MetricSamples, _Mapping]] = ..., warm_done: _Optional[_Union[WarmDone, _Mapping]] = ..., key_news: _Optional[_Union[KeyNews, _Mapping]] = ..., former_ended: _Optional[_Union[FormerEnded, _Mapping]] = ..., key_admit: _Optional[_Union[KeyAdmit, _Mapping]] = ..., key_widen: _Optional[_Union[KeyWiden, _Mapping]] = ..., key_prompt: _Optional[_Union[KeyPrompt, _Mapping]] = ..., key_headers: _Optional[str] = ..., key_end_answers: _Optional[str] = ...) -> None: ...

class WorkerStart(_message.Message):
    __slots__ = ("setup", "worker")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    setup: bytes
    worker: int
    def __init__(self, setup: _Optional[bytes] = ..., worker: _Optional[int] = ...) -> None: ...

class NewConnection(_message.Message):
    __slots__ = ("number", "door", "peer", "surplus")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    door: int
    peer: str
    surplus: bool
    def __init__(self, number: _Optional[int] = ..., door: _Optional[int] = ..., peer: _Optional[str] = ..., surplus: bool = ...) -> None: ...

class NodesKnown(_message.Message):
    __slots__ = ("changed", "names", "trouble", "refusal_reason", "refusal", "refusal_retry_after_ms")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_REASON_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedCompositeFieldContainer[_directory_pb2.NodeRecord]
    names: _containers.RepeatedScalarFieldContainer[str]
    trouble: str
    refusal_reason: str
    refusal: str
    refusal_retry_after_ms: int
    def __init__(self, changed: _Optional[_Iterable[_Union[_directory_pb2.NodeRecord, _Mapping]]] = ..., names: _Optional[_Iterable[str]] = ..., trouble: _Optional[str] = ..., refusal_reason: _Optional[str] = ..., refusal: _Optional[str] = ..., refusal_retry_after_ms: _Optional[int] = ...) -> None: ...

class WorkerLifecycle(_message.Message):
    __slots__ = ("ready", "takes_requests", "number")
    READY_FIELD_NUMBER: _ClassVar[int]
    TAKES_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    takes_requests: bool
    number: int
    def __init__(self, ready: bool = ..., takes_requests: bool = ..., number: _Optional[int] = ...) -> None: ...

class Siblings(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[PrefillShare]
    def __init__(self, shares: _Optional[_Iterable[_Union[PrefillShare, _Mapping]]] = ...) -> None: ...

class PrefillShare(_message.Message):
    __slots__ = ("incarnation", "tokens")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    tokens: int
    def __init__(self, incarnation: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class WorkerReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("requests", "waiting", "shares", "loop_lag_ms_max", "lifecycle", "grpc_open")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    GRPC_OPEN_FIELD_NUMBER: _ClassVar[int]
    requests: int
    waiting: int
    shares: _containers.RepeatedCompositeFieldContainer[PrefillShare]
    loop_lag_ms_max: int
    lifecycle: int
    grpc_open: bool
    def __init__(self, requests: _Optional[int] = ..., waiting: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[PrefillShare, _Mapping]]] = ..., loop_lag_ms_max: _Optional[int] = ..., lifecycle: _Optional[int] = ..., grpc_open: bool = ...) -> None: ...

class ClosedConnections(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class MetricsWanted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Warm(_message.Message):
    __slots__ = ("prompt", "salt")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ...) -> None: ...

class WarmDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PeerError(_message.Message):
    __slots__ = ("reason", "code", "text", "field", "retry_after_ms", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    reason: str
    code: int
    text: str
    field: str
    retry_after_ms: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., code: _Optional[int] = ..., text: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EndFormer(_message.Message):
    __slots__ = ("key_name", "resume_token")
    KEY_NAME_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    key_name: str
    resume_token: str
    def __init__(self, key_name: _Optional[str] = ..., resume_token: _Optional[str] = ...) -> None: ...

class FormerEnded(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class KeysChanged(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class KeyAdmit(_message.Message):
    __slots__ = ("admission", "key_name", "spread", "attaches", "resume_token")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    KEY_NAME_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    ATTACHES_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    admission: int
    key_name: str
    spread: float
    attaches: bool
    resume_token: str
    def __init__(self, admission: _Optional[int] = ..., key_name: _Optional[str] = ..., spread: _Optional[float] = ..., attaches: bool = ..., resume_token: _Optional[str] = ...) -> None: ...

class KeyWiden(_message.Message):
    __slots__ = ("admission", "answers")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    admission: int
    answers: int
    def __init__(self, admission: _Optional[int] = ..., answers: _Optional[int] = ...) -> None: ...

class KeyPrompt(_message.Message):
    __slots__ = ("admission", "prompt", "tokens")
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    admission: int
    prompt: int
    tokens: int
    def __init__(self, admission: _Optional[int] = ..., prompt: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class KeyAnswer(_message.Message):
    __slots__ = ("headers",)
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.ScalarMap[str, str]
    def __init__(self, headers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KeyNews(_message.Message):
    __slots__ = ("used", "ended")
    USED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    used: _containers.RepeatedCompositeFieldContainer[KeyUsed]
    ended: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, used: _Optional[_Iterable[_Union[KeyUsed, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ...) -> None: ...

class KeyUsed(_message.Message):
    __slots__ = ("key_name", "output_tokens", "left", "came_back", "epoch")
    KEY_NAME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    CAME_BACK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    key_name: str
    output_tokens: int
    left: str
    came_back: str
    epoch: int
    def __init__(self, key_name: _Optional[str] = ..., output_tokens: _Optional[int] = ..., left: _Optional[str] = ..., came_back: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class MetricSamples(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    def __init__(self, values: _Optional[bytes] = ...) -> None: ...
