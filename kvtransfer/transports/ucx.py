"""Transport over what UCX finds (RoCE, InfiniBand, EFA, tcp, shared memory), through NIXL's Python package.

Optional, and never chosen unless `transports` names it. Here are what its HELLO and WELCOME carry, and whether a node
offers it. `ucx_nixl` has the agent of one link (it imports NIXL when the first is made), `ucx_receiver` the port,
`ucx_writer` the link.

A seal is a SEAL on the control channel and a NIXL notification with its number; SEALED says that both have come. The
BYE's `drained` says that everything that was handed to UCX has completed, so that no write is in doubt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.transport import TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.ucx_nixl import UcxAgent, UcxUnavailable, destruction_fences, ucx_transports

log = get_log("ucx")

HOST_BYTES: Final = 16
METADATA_BYTES_MAX: Final = 1 << 16
_TRIAL_BYTES: Final = 1 << 12
_HELLO: Final = struct.Struct(f"<{HOST_BYTES}sI")
_WELCOME: Final = struct.Struct("<QQ")
CODEC: Final = wire.Codec(TransportName.UCX, payload_bytes_max=_WELCOME.size + METADATA_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxHello:
    """`host` is `link.host_identity`, 32 hexadecimal digits; `pid` is of use only where it is the same."""

    host: str
    pid: int

    def encode(self) -> bytes:
        raw = bytes.fromhex(self.host)
        assert len(raw) == HOST_BYTES, self.host
        return _HELLO.pack(raw, self.pid)

    @classmethod
    def decode(cls, payload: bytes) -> UcxHello:
        """Raises MalformedMessage."""
        if len(payload) != _HELLO.size:
            raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a HELLO")
        host, pid = _HELLO.unpack(payload)
        return cls(host=host.hex(), pid=pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxWelcome:
    """Where the receiver's region is, and the metadata of its agent, which a writer needs to write into it."""

    region_base: int
    region_nbytes: int
    metadata: bytes

    def encode(self) -> bytes:
        assert 0 < len(self.metadata) <= METADATA_BYTES_MAX, len(self.metadata)
        return _WELCOME.pack(self.region_base, self.region_nbytes) + self.metadata

    @classmethod
    def decode(cls, payload: bytes) -> UcxWelcome:
        """Raises MalformedMessage."""
        if len(payload) <= _WELCOME.size:
            raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a WELCOME")
        base, nbytes = _WELCOME.unpack_from(payload)
        return cls(region_base=base, region_nbytes=nbytes, metadata=payload[_WELCOME.size :])


def try_ucx(tls: str) -> str:
    """Make an agent and destroy it: the UCX transports that are used. Takes up to a second. Raises UcxUnavailable."""
    UcxAgent(np.zeros(_TRIAL_BYTES, np.uint8), "trial", tls).destroy()
    return ucx_transports(tls)


def usable(transports: Sequence[TransportName], tls: str) -> bool:
    """Whether ucx is to be offered and can be, which is logged. Called once, at start: NIXL is loaded here.

    Raises:
        InvalidField: ucx alone is to be offered, and it does not work here.
    """
    if TransportName.UCX not in transports:
        return False
    try:
        used = try_ucx(tls)
    except UcxUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has ucx alone, which does not work here: {error}. `baton doctor` says more"
            ) from error
        log.warning("ucx is not offered", reason=str(error))
        return False
    log.info("ucx is offered", ucx_transports=used, fence="own" if destruction_fences(used) else "needs the writer")
    return True
