"""What must hold in every state, and once the faults are over. Reads the nodes' books; trusts none of their sums."""

from __future__ import annotations

from baton.ids import BlockId
from cachestore.ledger import Ledger
from decode_node.job import GONE_MAX
from kvtransfer.protocol.receiver import GrantState
from tests.sim.books import OVER
from tests.sim.cluster import Kind, Process, SimCluster
from tests.support.node_states import decode_state


def check_now(cluster: SimCluster) -> None:
    """Conservation and bounds, of every node that lives."""
    for process in cluster.processes.values():
        if process.alive:
            check_bounds(process)
            check_blocks(process)


def check_bounds(process: Process) -> None:
    _told(process, _bounds(process))


def check_blocks(process: Process) -> None:
    """Recount all blocks. (What changes is looked at after each callback, see `books`.)"""
    if process.ledger is not None:
        _told(process, conservation(process.ledger))
    if process.decode is not None:
        _told(process, _grants_and_blocks(process))


def _told(process: Process, problem: str | None) -> None:
    if problem is not None:
        process.cluster.violation(f"{process.name}: {problem}")


def conservation(ledger: Ledger) -> str | None:
    """Each block in one class, the classes sum to the region, the free list is what nobody has."""
    free = set(ledger._free)
    if len(free) != len(ledger._free):
        return "a block is twice in the free list"
    promised = sum(ledger._promises.values())
    owned = zip(ledger._holds, ledger._writer, ledger._cached, ledger._quarantined, strict=True)
    idle = 0
    for block, (holds, writer, cached, quarantined) in enumerate(owned):
        nobody = not holds and writer is None and not cached
        if nobody is not (block in free):
            return f"block {block}: {holds} holds, writer {writer!r}, cached {cached}, in the free list: {not nobody}"
        if quarantined and writer is None:
            return f"block {block} is quarantined and has no writer"
        if holds < 0 or (writer is not None and cached):
            return f"block {block}: {holds} holds, writer {writer!r}, cached {cached}"
        idle += not holds and writer is None
    if promised > idle:
        return f"{promised} blocks promised, {idle} could be given"
    return None


def _grants_and_blocks(process: Process) -> str | None:
    """Every writer-owned block belongs to a grant that is not over, and to one only."""
    assert process.decode is not None and process.ledger is not None
    if not hasattr(process.decode, "receiver"):
        return None
    grants = process.decode.receiver.grants
    owned = {}
    for grant in grants._grants.values():
        if grant.state in OVER:
            continue
        for block in grant.blocks:
            if block in owned:
                return f"block {block} is in two grants"
            owned[block] = grant.id
    writers = {BlockId(block): writer for block, writer in enumerate(process.ledger._writer) if writer is not None}
    for block in () if writers == owned else writers.keys() | owned.keys():
        if writers.get(block) != owned.get(block):
            return f"block {block} has writer {writers.get(block)!r} in the ledger, {owned.get(block)!r} in a grant"
    return None


def _bounds(process: Process) -> str | None:
    """Named limits are kept."""
    found: list[tuple[str, int, int]] = []
    if process.server is not None:
        found.append(("calls served", process.server.edge._slots._running, process.server.limits.rpcs_max))
    if process.router is not None:
        router, line = process.router, process.router._line._book
        found.append(("requests", line.out, router.config.requests_max))
        found.append(
            ("requests and line", router.requests, router.config.requests_max + router.config.line_requests_max)
        )
    if process.prefill is not None:
        config = process.prefill.config
        found.append(("queue", len(process.prefill._queue), config.queue_max))
        found.append(("admitted", len(process.prefill._admitted), config.engine.sequences_max))
    if process.decode is not None and hasattr(process.decode, "receiver"):
        decode, limits = process.decode, process.decode.receiver.grants.limits
        found.append(("requests", decode.requests, decode.config.requests_max))
        found.append(("finished", len(decode.streams.finished), decode.config.finished_max))
        found.append(("requests remembered", len(decode._gone), GONE_MAX))
        found.append(("tombstones", len(decode.receiver.grants._dead_attempts), limits.tombstones_max))
    for what, count, limit in found:
        if count > limit:
            return f"{what}: {count}, the limit is {limit}"
    return None


def what_is_left(cluster: SimCluster) -> dict[str, str]:
    """What keeps a cluster from being quiet, by node. Empty when nothing is left but caches."""
    left = {}
    for name, process in cluster.processes.items():
        if process.kind is Kind.CLIENT:
            continue
        reported = _left(process) if process.alive and process.ready else "not ready"
        if reported:
            left[name] = reported
    return left


def is_quiet(cluster: SimCluster) -> bool:
    """Nothing is left. Looks no further than the first node that has something."""
    return not any(
        _left(process) if process.alive and process.ready else "not ready"
        for process in cluster.processes.values()
        if process.kind is not Kind.CLIENT
    )


def _left(process: Process) -> str:
    runtime = process.runtime
    if runtime is None:
        return ""
    reported = [f"{what} {count}" for what, count in runtime.holds().left().items()]
    if process.decode is not None:
        receiver = process.decode.receiver
        reported += [
            f"{s.value} {n}"
            for s, n in receiver.grants.states().items()
            if n and s not in (GrantState.FENCED, GrantState.RELEASED)
        ]
        if decode_state(process.decode).outputs:
            reported.append("outputs")
        if len(process.decode._gone):
            reported.append(f"requests remembered {len(process.decode._gone)}")
        if receiver._timers:
            reported.append(f"timers {len(receiver._timers)}")
    if process.peers is not None:
        reported += [f"handoffs {len(peer._handoffs)}" for peer in process.peers._peers.values() if peer._handoffs]
        reported += [f"link {link.number} busy" for link in process.links if not link.idle]
    if process.router is not None and process.router.streams.inboxes:
        reported.append(f"inboxes {len(process.router.streams.inboxes)}")
    if process.ledger is not None:
        counts = process.ledger.counts()
        if counts.cached + counts.free != counts.total or counts.promised:
            reported.append(f"blocks {counts}")
    if runtime.membership.stale:
        reported.append("directory stale")
    return ", ".join(reported)
