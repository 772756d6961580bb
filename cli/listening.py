"""Where the processes of a cluster are to listen, checked before any of them is started."""

from __future__ import annotations

from collections.abc import Mapping

from baton.config import ConfigProblem
from baton.endpoint import split_endpoint
from baton.errors import BatonError


def listen_problems(places: Mapping[str, str]) -> list[ConfigProblem]:
    """Processes, by name, that could not listen where they are told to: no endpoint, or that of an earlier one."""
    problems = []
    taken: dict[tuple[str, int], str] = {}
    for name, place in places.items():
        source = f"listen of {name}"
        try:
            host, port = split_endpoint(place)
        except BatonError as error:
            problems.append(ConfigProblem(source=source, problem=error.message))
            continue
        holder = taken.setdefault((host, port), name) if port else name
        if holder != name:
            problems.append(ConfigProblem(source=source, problem=f"{place} is where {holder} is to listen"))
    return problems
