"""Which version this is."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def baton_version() -> str:
    """Of the package that is installed; "unknown" where it runs from its tree. Any thread."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
