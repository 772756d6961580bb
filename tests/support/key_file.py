"""A file of API keys that a test writes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from router.keys import new_key


class Keys:
    """`of` has the secrets by name, `entries` what the file says of them once it is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, str] = {}
        self.of: dict[str, str] = {}

    def add(self, name: str, **limits: Any) -> None:
        self.of[name], self.entries[name] = new_key(os.urandom(32).hex()[:43], {"name": name, **limits})

    def write(self) -> None:
        made = self.path.with_suffix(".new")
        made.write_text("\n".join(self.entries.values()))
        made.replace(self.path)
