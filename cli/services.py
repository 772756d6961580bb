"""The five services that a Baton process can be, and where each one's configuration comes from."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

from baton.config import load
from cli.former_settings import FORMER


class Service(Enum):
    """The value is the command's name, the section of the configuration file and the middle of BATON_..._KEY."""

    DIRECTORY = "directory"
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def env_prefix(self) -> str:
        return f"BATON_{self.name}_"

    @property
    def has_engine(self) -> bool:
        return self in (Service.PREFILL, Service.DECODE, Service.MIXED)


UP_SECTION: Final = "up"
UP_ENV_PREFIX: Final = "BATON_UP_"
SECTIONS: Final = frozenset({service.value for service in Service} | {UP_SECTION})
"""Every table that a configuration file may have; anything else is a mistake."""

_MODULES: Final[Mapping[Service, tuple[str, str, str]]] = {
    Service.DIRECTORY: ("cli.directory", "cli.directory", "DirectoryProcessConfig"),
    Service.ROUTER: ("router.main", "router.config", "RouterConfig"),
    Service.PREFILL: ("prefill_node.main", "prefill_node.config", "PrefillConfig"),
    Service.DECODE: ("decode_node.main", "decode_node.config", "DecodeConfig"),
    Service.MIXED: ("mixed_node.main", "mixed_node.config", "MixedConfig"),
}
"""Where `serve` is, where the configuration class is, and its name."""

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, how much there is."""


class Serve(Protocol):
    """What each service's module offers: runs until `stop`, calls `on_ready` once with its endpoint. `drain` ends it
    too, once what it has taken on is done."""

    async def __call__(
        self,
        config: Any,
        *,
        stop: asyncio.Event,
        drain: asyncio.Event | None = None,
        on_ready: Callable[[str], None],
        progress: Progress,
    ) -> None: ...


def config_class(service: Service) -> type[Any]:
    """The dataclass of `service`. Imports its module only now, so that other commands start fast."""
    _, module, name = _MODULES[service]
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type), found
    return found


def serve_function(service: Service) -> Serve:
    """The `serve` of `service`. Imports all that the service needs: torch too, for an engine."""
    serve: Serve = importlib.import_module(_MODULES[service][0]).serve
    return serve


def load_config(
    service: Service, *, toml_path: Path | None, env: Mapping[str, str], flags: Mapping[str, object]
) -> Any:
    """The configuration of one process, from file, environment and flags. Raises ConfigError."""
    return load(
        config_class(service),
        toml_path=toml_path,
        section=service.value,
        env_prefix=service.env_prefix,
        env=env,
        flags=flags,
        known_sections=SECTIONS,
        former=FORMER,
    )
