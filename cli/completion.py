"""`baton completion SHELL`: what a shell needs to complete commands, options and names of nodes."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

SHELLS: Final = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL, to be read by it at its start. Names of nodes come from the directory.

    \b
    Example:
      baton completion bash >> ~/.bashrc
      baton completion zsh >> ~/.zshrc
      baton completion fish > ~/.config/fish/completions/baton.fish
    """
    root = ctx.find_root().command
    made = get_completion_class(shell)
    assert made is not None, shell
    click.echo(made(root, {}, "baton", "_BATON_COMPLETE").source())
