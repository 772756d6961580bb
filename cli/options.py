"""Command line options made from a configuration class: every key is a flag, with its type, default and help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from baton.config import describe, flag_name
from baton.log import LogFormat, LogLevel

CONFIG_FLAG: Final = "config_file"
LOG_LEVEL_FLAG: Final = "log_level"
LOG_FORMAT_FLAG: Final = "log_format"
_NESTING: Final = "__"


def config_options(cls: type[Any]) -> list[click.Parameter]:
    """One option for each key of `cls`, all text: `baton.config.load` converts, so errors read alike everywhere."""
    options: list[click.Parameter] = []
    for key in describe(cls):
        default = "required" if key.default is None else f"default: {key.default or 'none'}"
        options.append(
            click.Option(
                [flag_name(key.key), key.key.replace(".", _NESTING)],
                metavar=key.type_text.upper() if key.type_text.isalpha() else key.type_text,
                shell_complete=_values(key.type_text),
                help=f"{key.help}  [{default}]".strip(),
                hidden=not key.shown,
                **_flag(key.type_text),
            )
        )
    return options


def _flag(type_text: str) -> dict[str, Any]:
    """`--tls` alone means `--tls true`."""
    return {"is_flag": False, "flag_value": "true"} if type_text == "true|false" else {}


def _values(type_text: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For the shell: the values of a key that has few ("model|mock"), as its type says."""
    values = type_text.split(" or ")[0].split("|")
    known = values if len(values) > 1 else []
    return lambda _context, _parameter, incomplete: [value for value in known if value.startswith(incomplete)]


def common_options() -> list[click.Parameter]:
    """`--config`, `--log-level` and `--log-format`."""
    levels = click.Choice([level.value for level in LogLevel])
    formats = click.Choice([each.value for each in LogFormat])
    return [
        click.Option(
            ["--config", CONFIG_FLAG], type=click.Path(), metavar="FILE.toml", help="Configuration file (TOML).",
        ),
        click.Option(
            ["--log-level", LOG_LEVEL_FLAG], type=levels, default=LogLevel.INFO.value, show_default=True,
            help="How much goes to the log (stderr).",
        ),
        click.Option(
            ["--log-format", LOG_FORMAT_FLAG], type=formats, default=LogFormat.TEXT.value, show_default=True,
            help="A line of text for each event, or a JSON object.",
        ),
    ]  # fmt: skip


def config_flags(parameters: Mapping[str, object]) -> dict[str, object]:
    """The parameters of `config_options` as dotted keys, those not given left out."""
    return {
        name.replace(_NESTING, "."): value
        for name, value in parameters.items()
        if value is not None and name not in (CONFIG_FLAG, LOG_LEVEL_FLAG, LOG_FORMAT_FLAG)
    }


def config_path(parameters: Mapping[str, object]) -> Path | None:
    path = parameters[CONFIG_FLAG]
    return None if path is None else Path(str(path))
