from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]

class Lifecycle(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIFECYCLE_UNSPECIFIED: _ClassVar[Lifecycle]
    LIFECYCLE_STARTING: _ClassVar[Lifecycle]
    LIFECYCLE_READY: _ClassVar[Lifecycle]
    LIFECYCLE_CORDONED: _ClassVar[Lifecycle]
    LIFECYCLE_DRAINING: _ClassVar[Lifecycle]
    LIFECYCLE_DRAINED: _ClassVar[Lifecycle]
    LIFECYCLE_STOPPED: _ClassVar[Lifecycle]
    LIFECYCLE_LAME_DUCK: _ClassVar[Lifecycle]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Priority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_UNSPECIFIED: _ClassVar[Priority]
    PRIORITY_HIGH: _ClassVar[Priority]
    PRIORITY_NORMAL: _ClassVar[Priority]
    PRIORITY_LOW: _ClassVar[Priority]
ROLE_UNSPECIFIED: Role
ROLE_ROUTER: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
LIFECYCLE_UNSPECIFIED: Lifecycle
LIFECYCLE_STARTING: Lifecycle
LIFECYCLE_READY: Lifecycle
LIFECYCLE_CORDONED: Lifecycle
LIFECYCLE_DRAINING: Lifecycle
LIFECYCLE_DRAINED: Lifecycle
LIFECYCLE_STOPPED: Lifecycle
LIFECYCLE_LAME_DUCK: Lifecycle
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
PRIORITY_UNSPECIFIED: Priority
PRIORITY_HIGH: Priority
PRIORITY_NORMAL: Priority
PRIORITY_LOW: Priority

class Header(_message.Message):
    __slots__ = ("sender", "receiver")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    sender: int
    receiver: int
    def __init__(self, sender: _Optional[int] = ..., receiver: _Optional[int] = ...) -> None: ...

class RequestKey(_message.Message):
    __slots__ = ("request", "attempt", "epoch")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request: str
    attempt: int
    epoch: int
    def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Resumable(_message.Message):
    __slots__ = ("tag", "state")
    TAG_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    tag: bytes
    state: bytes
    def __init__(self, tag: _Optional[bytes] = ..., state: _Optional[bytes] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("name", "endpoint", "incarnation", "blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    incarnation: int
    blocks: int
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., incarnation: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class PromptSources(_message.Message):
    __slots__ = ("computed", "cached_device", "cached_host", "cached_disk", "fetched", "fetched_from")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_DEVICE_FIELD_NUMBER: _ClassVar[int]
    CACHED_HOST_FIELD_NUMBER: _ClassVar[int]
    CACHED_DISK_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FROM_FIELD_NUMBER: _ClassVar[int]
    computed: int
    cached_device: int
    cached_host: int
    cached_disk: int
    fetched: int
    fetched_from: str
    def __init__(self, computed: _Optional[int] = ..., cached_device: _Optional[int] = ..., cached_host: _Optional[int] = ..., cached_disk: _Optional[int] = ..., fetched: _Optional[int] = ..., fetched_from: _Optional[str] = ...) -> None: ...

class RejectedTransport(_message.Message):
    __slots__ = ("transport", "why")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    transport: str
    why: str
    def __init__(self, transport: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("quarantined", "writer_owned", "held", "cached", "free", "promised", "pinned")
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    WRITER_OWNED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    quarantined: int
    writer_owned: int
    held: int
    cached: int
    free: int
    promised: int
    pinned: int
    def __init__(self, quarantined: _Optional[int] = ..., writer_owned: _Optional[int] = ..., held: _Optional[int] = ..., cached: _Optional[int] = ..., free: _Optional[int] = ..., promised: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "rules")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    rules: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., rules: _Optional[str] = ...) -> None: ...

class SamplingSpec(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "choice", "max_tokens", "stop_token_ids", "ignore_eos", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs", "prompt_logprobs", "grammar", "grammar_source")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_SOURCE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    grammar_source: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., grammar_source: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "context_len_max", "eos_token_ids", "layout_hash", "block_size", "protocol_min", "protocol_max", "quantisation", "quantisation_must_agree", "kv_root", "layer_groups", "kernel_set")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_MAX_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_MUST_AGREE_FIELD_NUMBER: _ClassVar[int]
    KV_ROOT_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_SET_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    context_len_max: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    layout_hash: str
    block_size: int
    protocol_min: int
    protocol_max: int
    quantisation: str
    quantisation_must_agree: bool
    kv_root: bytes
    layer_groups: int
    kernel_set: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_len_max: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., layout_hash: _Optional[str] = ..., block_size: _Optional[int] = ..., protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., quantisation: _Optional[str] = ..., quantisation_must_agree: bool = ..., kv_root: _Optional[bytes] = ..., layer_groups: _Optional[int] = ..., kernel_set: _Optional[str] = ...) -> None: ...
