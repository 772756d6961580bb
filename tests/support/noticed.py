"""How long a node that is gone may pass for a living one."""

from __future__ import annotations

from baton.liveness import LivenessConfig


def noticed_ms_max(config: LivenessConfig) -> int:
    """The longest that a stopped or cut-off peer is taken to be alive."""
    return config.heartbeat_ms + config.answer_ms_max + config.reconnect_ms_max
