"""The operator's credential of the commands that give orders: `drain`, `cordon`, `pin` and so on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from baton.endpoint import is_loopback
from baton.errors import BatonError, Reason
from baton.operator import Metadata, OperatorToken
from baton.tls import Kind
from cli.parameters import options
from cli.tls import command_tls

operator_options: Final = options(
    click.option(
        "--operator-token-file", type=click.Path(path_type=Path), envvar="BATON_OPERATOR_TOKEN_FILE",
        metavar="FILE", show_envvar=True,
        help="The token that orders need.  [default: ~/.local/state/baton/operator_token]",
    ),
    click.option(
        "--insecure", is_flag=True, envvar="BATON_INSECURE", show_envvar=True,
        help="Send the token to another machine without encryption, too.",
    ),
)  # fmt: skip
"""A command makes an `Operator` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    operator_token_file: Path | None
    insecure: bool

    def metadata(self, endpoint: str) -> Metadata:
        """What to send with an order to `endpoint`. Raises BatonError: there is no token, or it would be shown.

        An operator's certificate needs no token.
        """
        tls = command_tls()
        if tls is not None and Kind.OPERATOR in tls.kinds:
            return ()
        if not (self.insecure or tls is not None or is_loopback(endpoint)):
            raise BatonError(
                Reason.BAD_CONFIG,
                f"The operator's token is not sent to {endpoint}: the connection is not encrypted and leaves this "
                "machine. Give the order on the node's own machine, use mTLS (--tls-cert-file), or trust the network "
                "with --insecure.",
                field="insecure",
            )
        return OperatorToken(self.operator_token_file).metadata()
