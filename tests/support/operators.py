"""The operator's credential of the processes that tests start: the default file, in a folder of the test run's own."""

from __future__ import annotations

from baton.operator import Metadata, OperatorToken


def as_operator() -> Metadata:
    """The metadata of an order."""
    return OperatorToken(None).metadata()
