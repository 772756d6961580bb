"""What every node shares and nothing else. Imports nothing of ours but batonpb."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

# gRPC reads this once, when it is first imported; its default is to write routine disconnections to stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@cache
def baton_version() -> str:
    """Of the package that is installed; "unknown" where it runs from its tree. Any thread."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "unknown"
