"""Which request a call belongs to: request id and W3C trace context, carried in call metadata. Pure and explicit.

Trace context: https://www.w3.org/TR/trace-context/ (version 00 of `traceparent`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from baton.ids import RequestId

REQUEST_ID_KEY: Final = "x-request-id"
TRACEPARENT_KEY: Final = "traceparent"

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01


@dataclass(frozen=True, slots=True, kw_only=True)
class Traceparent:
    """One position in a trace. `trace` and `span` are non-zero, 128 and 64 bits."""

    trace: int
    span: int
    sampled: bool

    def __post_init__(self) -> None:
        assert 0 < self.trace < 1 << 128, self.trace
        assert 0 < self.span < 1 << 64, self.span

    def __str__(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-{int(self.sampled):02x}"

    def child(self, rng: random.Random) -> Traceparent:
        """The same trace, a new span."""
        return Traceparent(trace=self.trace, span=_non_zero(rng, 64), sampled=self.sampled)

    @staticmethod
    def new(rng: random.Random, *, sampled: bool) -> Traceparent:
        """The start of a trace."""
        return Traceparent(trace=_non_zero(rng, 128), span=_non_zero(rng, 64), sampled=sampled)

    @staticmethod
    def parse(text: str) -> Traceparent | None:
        """None for an invalid text: the standard asks to start a new trace then, not to fail."""
        match = _TRACEPARENT.fullmatch(text)
        if match is None:
            return None
        version, trace, span, flags, rest = match.groups()
        # Later versions may append fields; this one may not. ff is reserved.
        if version == "ff" or (version == "00" and rest is not None) or int(trace, 16) == 0 or int(span, 16) == 0:
            return None
        return Traceparent(trace=int(trace, 16), span=int(span, 16), sampled=bool(int(flags, 16) & _SAMPLED))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMetadata:
    """What a caller said about its call."""

    request_id: RequestId | None = None
    traceparent: Traceparent | None = None


def call_metadata(*, request_id: RequestId, traceparent: Traceparent) -> tuple[tuple[str, str], ...]:
    """Metadata for an outgoing call. `traceparent` is the child made for this call, not its parent."""
    assert REQUEST_ID.fullmatch(request_id), request_id
    return ((REQUEST_ID_KEY, request_id), (TRACEPARENT_KEY, str(traceparent)))


def read_metadata(metadata: Iterable[tuple[str, str | bytes]] | None) -> CallMetadata:
    """Read an incoming call's metadata. An id that is not safe to log is as good as none: the call gets another."""
    request_id: RequestId | None = None
    traceparent: Traceparent | None = None
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY:
            if isinstance(value, str) and REQUEST_ID.fullmatch(value):
                request_id = RequestId(value)
        elif key == TRACEPARENT_KEY and isinstance(value, str):
            traceparent = Traceparent.parse(value)
    return CallMetadata(request_id=request_id, traceparent=traceparent)


def forward_metadata(
    metadata: Iterable[tuple[str, str | bytes]] | None, rng: random.Random
) -> tuple[tuple[str, str], ...]:
    """Metadata for the calls that an incoming call leads to: the same request id, the same trace in a new span."""
    called = read_metadata(metadata)
    pairs = []
    if called.request_id is not None:
        pairs.append((REQUEST_ID_KEY, str(called.request_id)))
    if called.traceparent is not None:
        pairs.append((TRACEPARENT_KEY, str(called.traceparent.child(rng))))
    return tuple(pairs)


def new_request_id(rng: random.Random) -> RequestId:
    """A random 128-bit request id, 32 hexadecimal digits."""
    return RequestId(f"{rng.getrandbits(128):032x}")


def _non_zero(rng: random.Random, bits: int) -> int:
    return rng.randrange(1, 1 << bits)
