"""Where the processes of a cluster are to listen, checked before any of them is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.config import ConfigProblem
from baton.endpoint import from_here, split_endpoint
from baton.errors import BatonError
from cli.services import Service, load_config


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


def listen_places(name: str, config: Any) -> dict[str, str]:
    """Where the process of this name listens by its configuration, by what is to be told of each place."""
    places = {name: config.listen}
    if (http := getattr(config, "http_listen", None)) is not None:
        places[f"{name} over HTTP"] = http
    return places


def router_address(listen: str, toml_path: Path | None, env: Mapping[str, str]) -> str | None:
    """What a router that listens on all addresses advertises to the processes of its own machine; None where it need
    not be told: it listens on one address, takes any port, or is set up with what it advertises by file or environment,
    to which `env` is added.

    Raises ConfigError.
    """
    try:
        here = from_here(listen)
        if here == listen or split_endpoint(listen)[1] == 0:
            return None
    except BatonError:
        return None  # `listen_problems` tells
    set_up = load_config(Service.ROUTER, toml_path=toml_path, env={**os.environ, **env}, flags={})
    return None if set_up.advertise is not None else here
