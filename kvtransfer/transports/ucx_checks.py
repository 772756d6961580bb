"""Whether ucx works on this machine, and which of its transports UCX has here. For `baton doctor`."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kvtransfer.transports.rdma_checks import Finding, Verdict
from kvtransfer.transports.ucx_nixl import UcxUnavailable, destruction_fences, installed
from kvtransfer.transports.ucx_offer import try_ucx

WHAT = "ucx"
INSTALL = "pip install 'baton-serve[ucx]', only where `transports` is to name ucx"

_API_VERSION = (1, 17)
_FIELD_FEATURES, _FEATURES_RMA_AM = 1, 1 << 1 | 1 << 6
_PARAMS_BYTES = 1 << 10
"""More than ucp_params has, of which we set the first two fields: which others count, and the features."""


def check_ucx(tls: str) -> Finding:
    """One line. Makes an agent, which loads NIXL and UCX into this process, and destroys it."""
    if installed() is None:
        return Finding(what=WHAT, verdict=Verdict.OPTIONAL, text="NIXL is not installed", todo=INSTALL)
    try:
        used = try_ucx(tls)
    except UcxUnavailable as error:
        return Finding(what=WHAT, verdict=Verdict.OPTIONAL, text=str(error), todo="look at what UCX has said")
    fence = "fenced by the receiver alone" if destruction_fences(used) else "a fence needs the writer, or its death"
    return Finding(
        what=WHAT,
        verdict=Verdict.GOOD,
        text=f"{installed()} with UCX {', '.join(ucx_here()) or 'of unknown transports'}; with {used!r} {fence}",
    )


def ucx_here() -> list[str]:
    """UCX transports of this machine, as UCX prints them. Empty: it does not tell. UCX is loaded into this process."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libucp" in line}
    if not loaded:
        return []
    ucp, libc = ctypes.CDLL(loaded.pop()), ctypes.CDLL(None)
    params = (ctypes.c_uint64 * (_PARAMS_BYTES // 8))(_FIELD_FEATURES, _FEATURES_RMA_AM)
    context, text, nbytes = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.c_size_t()
    if ucp.ucp_init_version(*_API_VERSION, params, None, ctypes.byref(context)):
        return []
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(nbytes)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    ucp.ucp_cleanup(context)
    printed = (text.value or b"").decode()
    libc.free(text)
    return transports_in(printed)


def transports_in(printed: str) -> list[str]:
    """Of what `ucp_context_print_info` prints, for each device a line "# resource 3 : md 2 dev 1 flags -- tcp/eth0"."""
    names = [line.split()[-1].partition("/")[0] for line in printed.splitlines() if " resource " in line]
    return list(dict.fromkeys(names))
