"""Logging of one process, taken back after a test."""

from __future__ import annotations

import logging


def tear_down_logging(handler: logging.Handler) -> None:
    """Take back `set_up_logging`, which has returned `handler`. Does not close the stream."""
    logging.getLogger().removeHandler(handler)
    logging.getLogger("baton").setLevel(logging.NOTSET)
