"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast examples come is a matter of the machine and of what else runs on it: no test depends on it.
# The examples are the same in every run, so that a run can be repeated; `--hypothesis-profile=more` draws others.
settings.register_profile("more", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("more"), derandomize=True)
settings.load_profile("same")
