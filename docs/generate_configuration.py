"""Writes docs/configuration.md, from the configuration classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from baton.config import ConfigKey, describe
from cli.services import Service, config_class
from cli.up import UpConfig

PAGE: Final = Path(__file__).with_name("configuration.md")
_HEAD: Final = """# Configuration

Every setting of every process. This page is generated: `python docs/generate_configuration.py`.

A process reads its settings from flags, then from the environment, then from one TOML file (`--config`), then from the
defaults below. The section of the file is the name of the command; the key `rpc.rpcs_max` of a decode node is:

| where | how |
| --- | --- |
| flag | `baton decode --rpc-rpcs-max 2048` |
| environment | `BATON_DECODE_RPC__RPCS_MAX=2048` |
| file | `rpc.rpcs_max = 2048` under `[decode]` |

A wrong or unknown setting is refused at the start, all of them at once. Limits that nobody has to turn are no settings:
they are constants beside their use. A setting of an earlier version is refused with its new name, or with the value at
which it is fixed now.
"""
_UNITS: Final = {
    "ms": "milliseconds",
    "chars": "characters",
    "rpcs": "calls",
    "context": "tokens",
    **{word: word for word in ("bytes", "tokens", "blocks", "threads", "connections", "requests", "sequences", "rows")},
}
"""By the words of a key's last part."""
_TITLES: Final = {
    "engine": "Engine",
    "membership": "Directory membership",
    "liveness": "Liveness",
    "rpc": "Calls",
    "tls": "TLS",
    "pod": "Kubernetes pod",
    "writer": "Writing side of a handoff",
    "receiver": "Receiving side of a handoff",
    "shm": "Transport shm",
    "rdma": "Transport rdma",
    "ucx": "Transport ucx",
    "tcp": "Transport tcp",
    "staging": "Pinned memory",
    "spill": "Overcommit",
    "store": "Store",
    "retries": "Retries",
    "pins": "Pinned prefixes",
}


_ORDER: Final = (Service.PREFILL, Service.DECODE, Service.MIXED, Service.ROUTER, Service.DIRECTORY)
Sections = dict[Service, ConfigKey]


def settings() -> dict[str, Sections]:
    """Each key path, as the services have it."""
    found: dict[str, Sections] = {}
    for service in _ORDER:
        for key in describe(config_class(service)):
            if key.shown:
                found.setdefault(key.key, {})[service] = key
    return found


def page() -> str:
    groups: dict[str, list[Sections]] = {"": []}
    for name, sections in settings().items():
        groups.setdefault(name.partition(".")[0] if "." in name else "", []).append(sections)
    parts = [_HEAD]
    for group, keys in groups.items():
        title = _TITLES[group] if group else "Each process"
        parts.append(f"\n## {title}\n\n" + "\n".join(_table(keys)) + "\n")
    up = [{None: key} for key in describe(UpConfig)]
    parts.append(
        "\n## `baton up`\n\nSection `[up]`, environment `BATON_UP_*`. What it starts reads the other sections too.\n\n"
        + "\n".join(_table(up))
        + "\n"
    )
    return "".join(parts)


def _table(keys: Sequence[Mapping[Service, ConfigKey] | Mapping[None, ConfigKey]]) -> Iterator[str]:
    yield "| key | sections | type | default | unit | what it is | when to change it |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for sections in keys:
        key = next(iter(sections.values()))
        names = " ".join("up" if service is None else service.value for service in sections)
        cells = [f"`{key.key}`", names, key.type_text, _defaults(sections), _unit(key), key.help, key.when]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _defaults(sections: Mapping[Service, ConfigKey] | Mapping[None, ConfigKey]) -> str:
    """That of the first section, and those of others where they differ."""
    texts = {
        service: "required" if key.default is None else f"`{key.default}`" if key.default else "empty"
        for service, key in sections.items()
    }
    first = next(iter(texts.values()))
    others = [f"{service.value}: {text}" for service, text in texts.items() if service and text != first]
    return first + (f" ({', '.join(others)})" if others else "")


def _unit(key: ConfigKey) -> str:
    words = key.key.rpartition(".")[2].split("_")
    if "int" not in key.type_text.split() and "float" not in key.type_text.split():
        return ""
    if words[-2:] == ["per", "s"]:
        return "per second"
    return next((unit for word, unit in _UNITS.items() if word in words), "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
