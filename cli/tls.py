"""mTLS of the commands that talk to the directory and to nodes: their options, and the credentials that these name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from baton.errors import InvalidField
from baton.tls import Tls, TlsConfig
from cli.parameters import options

_FILES: Final = {
    "cert_file": "Your certificate, where the cluster uses mTLS (`baton ca issue --kind operator`).",
    "key_file": "Its key.",
    "ca_file": "The CA of the cluster.",
}


def env_of(name: str) -> str:
    """The environment variable of "cert_file" and so on."""
    return f"BATON_TLS_{name.upper()}"


def _option(name: str, help_text: str) -> Any:
    def keep(ctx: click.Context, _parameter: click.Parameter, value: Path | None) -> None:
        ctx.meta[_key(name)] = value

    return click.option(
        f"--tls-{name.replace('_', '-')}", type=click.Path(path_type=Path), envvar=env_of(name), show_envvar=True,
        metavar="FILE", help=help_text, expose_value=False, callback=keep,
    )  # fmt: skip


tls_options: Final = options(*(_option(name, help_text) for name, help_text in _FILES.items()))
"""The command does not get them: `command_tls` has what they name."""


def command_tls() -> Tls | None:
    """Of the command that runs; None if it was given none. Raises BatonError BAD_CONFIG, UsageError."""
    context = click.get_current_context(silent=True)
    given = {name: context.meta.get(_key(name)) for name in _FILES} if context is not None else {}
    try:
        config = TlsConfig(**given)
    except InvalidField as error:
        raise click.UsageError(f"--tls-{error.field.replace('_', '-')} {error.args[0]}") from error
    return Tls(config) if config.on else None


def _key(name: str) -> str:
    return f"{__name__}.{name}"
