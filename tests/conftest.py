"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast examples come is a matter of the machine and of what else runs on it: no test depends on it.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
