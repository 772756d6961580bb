"""Whether a node offers ucx: it does where `transports` names it, NIXL is installed and UCX works."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.transport import TransportName
from kvtransfer.transports.ucx_nixl import UcxAgent, UcxUnavailable, destruction_fences, ucx_transports

log = get_log("ucx")

_TRIAL_BYTES = 1 << 12


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
                "transports", f"has ucx alone, which does not work here: {error}. `baton doctor` tells more"
            ) from error
        log.warning("ucx is not offered", reason=str(error))
        return False
    log.info("ucx is offered", ucx_transports=used, fence="own" if destruction_fences(used) else "needs the writer")
    return True
