"""The engine of one node, as others see it: what computes, where its KV lies, which blocks are the engine's own, and
what reaches them."""

from __future__ import annotations

from batonpb import node_pb2

from baton.runtime import NodeRuntime
from cachestore.device_pool import DevicePool


def report_engine(runtime: NodeRuntime, pool: DevicePool) -> None:
    """Tell of it in the node's status. Called once, when the node's own `status` is set."""
    own_status = runtime.status

    def status(message: node_pb2.NodeStatus) -> None:
        own_status(message)
        message.engine.padding_blocks = pool.blocks.padding_blocks
        for name, text in pool.describe().items():
            message.engine.facts.add(name=name, text=text)

    runtime.status = status


def add_fact(message: node_pb2.NodeStatus, name: str, text: str) -> None:
    """One more line for people, once, though both halves of a node may tell it."""
    if all(fact.name != name for fact in message.engine.facts):
        message.engine.facts.add(name=name, text=text)
