"""Limits that are numbers: what the configurations of all transports check."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING

from baton.errors import check_positive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def check_limits(config: DataclassInstance, *, but: Collection[str] = ()) -> None:
    """Each whole number of a configuration is a limit or a time, and 0 would be none. Raises InvalidField."""
    numbers = [each.name for each in fields(config) if isinstance(getattr(config, each.name), int)]
    check_positive(config, *(name for name in numbers if name not in but))
