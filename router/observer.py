"""What the router tells of its requests, for metrics. Pure; the methods here do nothing."""

from __future__ import annotations

from batonpb import common_pb2, inference_pb2

from baton.errors import Reason


class ObservedRequest:
    """One request. `ended` is called last, once, whatever happened: after `finished`, after `failed`, or after neither,
    when the client went away.
    """

    def tokens(self, now_s: float, count: int) -> None:
        """So many tokens came at once."""

    def resumed(self) -> None:
        """A node was lost with it; the rest of the answer is computed elsewhere."""

    def corrupt(self, prefill_node: str, decode_node: str, transport: str) -> None:
        """A handoff of it was refused: sampled records had not arrived as they were sent."""

    def finished(self, reason: common_pb2.FinishReason, stats: inference_pb2.RequestStats) -> None:
        """The client has all of the answer."""

    def failed(self, reason: Reason) -> None:
        """The client has an error."""

    def ended(self) -> None:
        """Nothing of it is left in this router."""


class RequestObserver:
    """Called on the router's loop; must not block nor raise."""

    def received(self, now_s: float) -> ObservedRequest:
        """A request has come in."""
        del now_s
        return ObservedRequest()
