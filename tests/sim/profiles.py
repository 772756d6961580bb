"""Sizes and times of simulated clusters.

Times are those of a cluster in a hurry: leases, heartbeats and limits are shorter than the product's defaults, in about
the same proportions, so that a short run sees each of them pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.directory_service import DirectoryConfig
from baton.liveness import LivenessConfig
from baton.membership import MembershipConfig
from decode_node.config import DecodeConfig
from engine.build import EngineConfig, EngineKind
from kvtransfer.receiver import ReceiverConfig
from kvtransfer.writer import WriterConfig
from prefill_node.config import PrefillConfig
from router.config import RouterConfig
from router.retries import RetryConfig
from tests.sim.network import NetworkTimes

DIRECTORY = "directory"
DIRECTORY_ENDPOINT = "10.0.0.1:7070"
BLOCK_SIZE = 16
CHUNK_TOKENS = 16
PROMPT_TOKENS_MIN = 3 * CHUNK_TOKENS + 1
"""So that every prompt takes at least four chunks."""
PROMPT_TOKENS_MAX = 5 * CHUNK_TOKENS
OUTPUT_TOKENS_MIN = 32
OUTPUT_TOKENS_MAX = 40
PLACEMENT_WAIT_MS_MAX = 5_000
RESUME_WAIT_MS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How big a cluster is and how fast its parts are."""

    name: str
    routers: int
    prefill: int
    decode: int
    hosts: int
    """Machines that the nodes are spread over; two on one machine use shm, others tcp."""
    clients: int = 1
    concurrency: int = 12
    """Requests under way at a time."""
    pause_s: float = 0.3
    """About how long a client waits before it asks again: the longer, the more happens between two requests."""
    layer_groups: int = 1
    prefill_blocks: int = 64
    decode_blocks: int = 120
    decode_sequences: int = 16
    step_s: float = 0.000_8
    token_s: float = 0.000_02
    network: NetworkTimes = NetworkTimes()
    fault_gap_s: float = 0.03
    """Mean time between two faults."""
    faults_at_once_max: int = 5
    fault_weights: tuple[tuple[str, int], ...] | None = None
    """How often each fault comes; None: as `faults.FaultPlan` has it."""
    faults_more: tuple[tuple[str, int], ...] = ()
    """Beside those."""
    leavers: float = 0.04
    """Share of the clients that go away in the middle of an answer."""
    resumable: float = 0.75
    """Share of the requests whose client may go on with them at another router."""
    prompts: int = 24
    """Different prompts; some share a beginning."""
    membership: MembershipConfig = field(
        default_factory=lambda: MembershipConfig(
            heartbeat_ms=400, ttl_ms=1_600, directory_wait_ms_max=30_000, backoff_ms_min=50, backoff_ms_max=500
        )
    )
    liveness: LivenessConfig = field(
        default_factory=lambda: LivenessConfig(
            heartbeat_ms=150, answer_ms_max=450, reconnect_ms_max=300, reconnect_pause_ms=20
        )
    )
    directory: DirectoryConfig = field(
        default_factory=lambda: DirectoryConfig(watch_interval_ms=50, expire_interval_ms=200)
    )


SMALL = Profile(name="small", routers=1, prefill=2, decode=2, hosts=3)
PAIR = Profile(
    name="pair", routers=1, prefill=1, decode=1, hosts=1, concurrency=8, fault_gap_s=0.15, faults_at_once_max=2
)
ROUTERS = Profile(
    name="routers",
    routers=2,
    prefill=3,
    decode=2,
    hosts=4,
    clients=2,
    concurrency=16,
    faults_more=(("lose_router", 10), ("cut_client", 8), ("cut_tokens", 6)),
)
"""Routers that are lost, and clients that find another one."""
WIDE = Profile(
    name="wide",
    routers=2,
    prefill=16,
    decode=2,
    hosts=6,
    clients=4,
    concurrency=160,
    prefill_blocks=96,
    decode_blocks=900,
    decode_sequences=96,
    pause_s=0.0,
    fault_gap_s=0.1,
    faults_more=(("lose_router", 3), ("cut_client", 3), ("cut_tokens", 3)),
    prompts=512,
    step_s=0.000_5,
    token_s=0.000_005,
    network=NetworkTimes(delay_s_min=0.001, delay_s_max=0.003, client_s=0.01),
)
TANGLED = Profile(
    name="tangled",
    routers=1,
    prefill=3,
    decode=1,
    hosts=2,
    concurrency=16,
    pause_s=0.05,
    fault_gap_s=0.02,
    faults_at_once_max=8,
    leavers=0.4,
    resumable=0.4,
    fault_weights=(
        ("delay", 8),
        ("reset_calls", 8),
        ("busy", 8),
        ("slow", 4),
        ("duplicate", 4),
        ("lose", 2),
        ("stop", 2),
        ("cut_one_way", 2),
        ("reset_links", 1),
        ("crash", 1),
    ),
)
"""Messages that overtake each other, much more than nodes that end: what comes late finds its request cancelled,
resolved, or another attempt further on."""
OVERTAKEN = replace(
    TANGLED,
    name="overtaken",
    fault_gap_s=0.05,
    fault_weights=(("overtake", 8), ("busy", 2), ("delay", 1), ("reset_calls", 1), ("duplicate", 1)),
)
"""An attempt that was given up goes on, and comes to the decode node behind the next one's end."""
STALLED = replace(
    SMALL,
    name="stalled",
    decode=1,
    hosts=1,
    fault_gap_s=0.05,
    faults_at_once_max=3,
    fault_weights=(("stop", 6), ("slow_data", 6), ("cut", 1), ("lose", 1), ("crash", 1), ("busy", 1)),
)
"""Writers that stand still in the middle of a copy, all of them on the receiver's machine: leases run out, Revokes go
unanswered, and the copy goes on long afterwards."""
RESETS = replace(
    SMALL,
    name="resets",
    fault_gap_s=0.02,
    faults_at_once_max=8,
    fault_weights=(("delay", 8), ("reset_links", 8), ("busy", 2)),
)
"""Data links that break while messages are late: what was written under a grant arrives when its blocks are
another's."""
GROUPED = replace(SMALL, name="grouped", layer_groups=2, prefill_blocks=128, decode_blocks=240)
"""Every layer is a group with blocks of its own."""
FETCHING = replace(
    SMALL,
    name="fetching",
    prefill=4,
    decode=2,
    hosts=2,
    token_s=0.002,
    prompts=12,
    prefill_blocks=48,
    concurrency=24,
    pause_s=0.05,
    fault_gap_s=0.2,
    faults_more=(("slow_data", 6), ("stop", 4), ("crash", 4), ("reset_links", 4)),
)
"""Few prompts, and computing that is dear: prefill nodes fetch them from each other and from decode nodes, both ways at
once. Faults strike either end, and data links stand still in the middle of a fetch."""
PROFILES = {p.name: p for p in (SMALL, PAIR, ROUTERS, WIDE, TANGLED, OVERTAKEN, STALLED, RESETS, GROUPED, FETCHING)}


def router_config(name: str, endpoint: str, profile: Profile) -> RouterConfig:
    return RouterConfig(
        name=name,
        listen=endpoint,
        insecure=True,
        directory=DIRECTORY_ENDPOINT,
        membership=profile.membership,
        liveness=profile.liveness,
        retries=RetryConfig(resume_wait_ms_max=RESUME_WAIT_MS_MAX, resolve_ms_max=200),
        cancel_ms_max=300,
        placement_wait_ms_max=PLACEMENT_WAIT_MS_MAX,
        stop_grace_ms=500,
    )


def _engine(num_blocks: int, *, sequences_max: int) -> EngineConfig:
    return EngineConfig(
        kind=EngineKind.MOCK,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        tokens_per_step_max=max(sequences_max, CHUNK_TOKENS),
        sequences_max=sequences_max,
    )


def prefill_config(name: str, endpoint: str, profile: Profile) -> PrefillConfig:
    return PrefillConfig(
        name=name,
        listen=endpoint,
        insecure=True,
        directory=DIRECTORY_ENDPOINT,
        membership=profile.membership,
        liveness=profile.liveness,
        engine=_engine(profile.prefill_blocks, sequences_max=8),
        writer=WriterConfig(reserve_ms_max=150, call_ms_max=250, retry_ms_min=5, retry_ms_max=100, stall_ms_max=2_000),
        stop_grace_ms=500,
    )


def decode_config(name: str, endpoint: str, profile: Profile) -> DecodeConfig:
    return DecodeConfig(
        name=name,
        listen=endpoint,
        insecure=True,
        directory=DIRECTORY_ENDPOINT,
        membership=profile.membership,
        liveness=profile.liveness,
        engine=_engine(profile.decode_blocks, sequences_max=profile.decode_sequences),
        receiver=ReceiverConfig(lease_ms=400, revoke_ms=60),
        requests_max=profile.decode_sequences,
        finished_ms_max=2_000,
        orphan_ms=1_200,
        resume_ms=2_500,
        busy_retry_ms=50,
        stop_grace_ms=500,
    )
