"""What a node reports of one pair that it writes to: its path, whether that is open, how fast it is, what it is not."""

from __future__ import annotations

from batonpb import common_pb2, node_pb2

from kvtransfer.pair_speed import Moved
from kvtransfer.writer import WriterPeer


def pair_status(peer: WriterPeer, now_s: float) -> node_pb2.PairStatus:
    """On the control thread; `now_s` is the time of its loop."""
    link = peer.link
    in_all, recent = link.moved()
    return node_pb2.PairStatus(
        peer=peer.address.name,
        peer_incarnation=peer.address.pair.receiver,
        epoch=link.epoch,
        transport=link.transport.value if link.transport is not None else "",
        bytes_moved=peer.bytes_moved,
        transports_given_up=[transport.value for transport in link.offers.given_up],
        given_up_left_ms=[
            round(link.offers.cooldown_left_s(transport, now_s) * 1e3) for transport in link.offers.given_up
        ],
        link_failures=link.failures,
        handoffs_corrupt=peer.handoffs_corrupt,
        records_checksummed=peer.records_checksummed,
        link_open=link.now is not None,
        moved=_moved(in_all),
        moved_recently=_moved(recent),
        passed_over=[common_pb2.PassedOver(transport=other.transport, why=other.why) for other in link.passed_over],
    )


def _moved(moved: Moved) -> node_pb2.MovedBytes:
    return node_pb2.MovedBytes(
        nbytes=moved.nbytes, moving_us=round(moved.moving_s * 1e6), bytes_per_s=moved.bytes_per_s
    )
