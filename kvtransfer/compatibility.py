"""Which nodes may hand KV to each other (DESIGN I9). Pure."""

from __future__ import annotations

from baton.errors import BatonError, Reason
from baton.wire import ModelInfo

PROTOCOL_MIN = 3
PROTOCOL_MAX = 3
"""Versions of the Transfer protocol that this build speaks. 2: `writes_in_doubt` of Release and Revoke, without which a
receiver must not believe a writer's claim. 3: the call is named Release."""


def differences(own: ModelInfo, peer: ModelInfo) -> list[str]:
    """What keeps the two apart, in words; empty when they may hand over."""
    found = []
    if own.fingerprint != peer.fingerprint:
        found.append(f"weights or model configuration ({own.name} {own.fingerprint}, {peer.name} {peer.fingerprint})")
    if own.block_size != peer.block_size:
        found.append(f"block_size ({own.block_size}, {peer.block_size})")
    elif own.layout_hash != peer.layout_hash:
        found.append(f"record layout ({own.layout_hash}, {peer.layout_hash})")
    if own.protocol_max < peer.protocol_min or peer.protocol_max < own.protocol_min:
        found.append(
            f"protocol versions ({own.protocol_min}-{own.protocol_max}, {peer.protocol_min}-{peer.protocol_max})"
        )
    must_agree = own.quantisation_must_agree or peer.quantisation_must_agree
    if must_agree and own.quantisation != peer.quantisation:
        found.append(f"quantisation of the weights ({own.quantisation or 'none'}, {peer.quantisation or 'none'})")
    return found


def check_compatible(*, own: ModelInfo, peer: ModelInfo, peer_name: str) -> None:
    """Raises BatonError INCOMPATIBLE_NODE that names every difference."""
    found = differences(own, peer)
    if found:
        raise BatonError(
            Reason.INCOMPATIBLE_NODE,
            f"This node and {peer_name} differ in {'; '.join(found)}. Nodes of one cluster must run the same model "
            "with the same block size: start one of them anew with the other's settings.",
            metadata={"differs": "; ".join(found)},
        )
