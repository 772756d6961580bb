"""The engine of one node, as others see it: what computes, where its KV lies, which blocks are the engine's own, what
moves its bytes, and what reaches them."""

from __future__ import annotations

from collections.abc import Sequence

from batonpb import node_pb2

from baton.runtime import NodeRuntime
from kvtransfer.native.copy import copies_by
from kvtransfer.negotiation import serving
from kvtransfer.transport import RegionKind, TransportName
from kvtransfer.transports.rdma_poster import posts_by
from kvtransfer.transports.tcp_payload import moved_by
from node.pool import DevicePool


def report_engine(runtime: NodeRuntime, pool: DevicePool) -> None:
    """Tell of it in the node's status. Called once, when the node's own `status` is set, and what it offers."""
    own_status = runtime.status
    moving = transport_facts(pool.transports, pool.region.kind, runtime.transports)

    def status(message: node_pb2.NodeStatus) -> None:
        own_status(message)
        message.engine.padding_blocks = pool.blocks.padding_blocks
        for name, text in (*pool.describe().items(), *moving.items()):
            message.engine.facts.add(name=name, text=text)

    runtime.status = status


def transport_facts(configured: Sequence[TransportName], region: RegionKind, offered: Sequence[str]) -> dict[str, str]:
    """For people: by what this process moves bytes, and which transports of its configuration it cannot offer, though
    they would serve its region. The native libraries that it asks about are loaded already."""
    facts = {}
    if region is RegionKind.HOST:
        facts["copies by"] = copies_by()
        if TransportName.TCP.value in offered:
            facts["tcp moved by"] = moved_by()
    if TransportName.RDMA.value in offered:
        facts["rdma posted by"] = posts_by()
    missing = [transport.value for transport in serving(configured, region) if transport.value not in offered]
    if missing:
        facts["not offered"] = f"{', '.join(missing)}: not to be used here, `baton doctor` tells why"
    return facts


def add_fact(message: node_pb2.NodeStatus, name: str, text: str) -> None:
    """One more line for people, once, though both halves of a node may tell it."""
    if all(fact.name != name for fact in message.engine.facts):
        message.engine.facts.add(name=name, text=text)
