"""Limits that are numbers: what the configurations of all transports check."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_positive(config: DataclassInstance, *, but: Collection[str] = ()) -> None:
    """Each whole number of a configuration is a limit or a time, and 0 would be none. Raises ValueError."""
    for each in fields(config):
        value = getattr(config, each.name)
        if isinstance(value, int) and value <= 0 and each.name not in but:
            raise ValueError(f"{each.name} must be positive, got {value}")
