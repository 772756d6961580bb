"""Typed values out of a model's JSON files. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.model_errors import ConfigFileError


class Keys:
    """Reads typed values out of one JSON object; a wrong one is an error that names file and key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def positive_int(self, key: str, *, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigFileError(f"{self.source}: {key} must be a positive integer, found {value!r}")
        return value

    def natural_int(self, key: str, *, default: int) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigFileError(f"{self.source}: {key} must be an integer of 0 or more, found {value!r}")
        return value

    def optional_float(self, key: str) -> float | None:
        """A positive number, or None where the key is absent, null or 0."""
        return self.positive_float(key) if self.values.get(key) not in (None, 0) else None

    def positive_float(self, key: str, *, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigFileError(f"{self.source}: {key} must be a positive number, found {value!r}")
        return float(value)

    def number(self, key: str, *, default: float, low: float, high: float, above_low: bool = False) -> float:
        """From `low` to `high`; with `above_low` not `low` itself."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigFileError(f"{self.source}: {key} must be a number from {low:g} to {high:g}, found {value!r}")
        if above_low and value == low:
            raise ConfigFileError(f"{self.source}: {key} must be above {low:g}")
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise ConfigFileError(f"{self.source}: {key} must be true or false, found {value!r}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The object under a key that may be absent or null; empty then."""
        value: object = self._present(key, {})
        if not isinstance(value, dict):
            raise ConfigFileError(f"{self.source}: {key} must be an object, found {value!r}")
        return dict(value)

    def _present(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigFileError(f"{self.source}: key {key} is missing")
        return default


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigFileError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigFileError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
