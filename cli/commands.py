"""The commands of `baton`. Each command's module is imported when it is called for: `baton --help` needs neither
gRPC nor torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import get_completion_class

from baton import baton_version
from cli.child import tie_to_supervisor
from cli.invocation import ERROR_PREFIX, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, QuietInterrupts

if TYPE_CHECKING:
    from baton.errors import BatonError

_USAGE_REASONS: Final = frozenset({"BAD_CONFIG", "BAD_ENDPOINT", "BAD_NAME"})
CONTEXT_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "up": ("cli.up", "Start a whole cluster on this machine."),
    "generate": ("cli.generate", "Send a prompt and stream the answer."),
    "chat": ("cli.chat", "Talk with the model, line by line."),
    "nodes": ("cli.nodes", "Show who is in the cluster and what it holds."),
    "describe": ("cli.nodes", "Show everything about one node."),
    "pin": ("cli.pins", "Keep the KV of a prefix in the cache of every node."),
    "unpin": ("cli.pins", "Let the nodes evict a pinned prefix again."),
    "pins": ("cli.pins", "Show the pinned prefixes."),
    "cache": ("cli.cache", "Show the tiers of the nodes' caches, or empty one."),
    "cordon": ("cli.drain", "Keep new requests away from a node."),
    "uncordon": ("cli.drain", "Let a cordoned node take requests again."),
    "drain": ("cli.drain", "Empty a node until it is safe to delete."),
    "undrain": ("cli.drain", "Let a drained node take requests again."),
    "ca": ("cli.ca", "Make certificates for mTLS between the processes."),
    "key": ("cli.keys", "Make an API key."),
    "doctor": ("cli.doctor", "Check whether RDMA works on this machine."),
    "directory": ("cli.services", "Run the embedded directory."),
    "router": ("cli.services", "Run a router."),
    "prefill": ("cli.services", "Run a prefill node."),
    "decode": ("cli.services", "Run a decode node."),
    "mixed": ("cli.services", "Run a node that does both halves."),
    "demo-model": ("cli.demo_model", "Write a small model: trained, or random."),
    "demo": ("cli.demo", "Start a cluster, check its answers, stop it."),
    "bench": ("cli.bench", "Send requests and report latencies."),
    "completion": ("cli.commands", "Print the completion script of a shell."),
}
"""The module of each, and what `baton --help` says of it."""


class _LazyGroup(click.Group):
    """Has a stand-in of each command, and imports the command itself when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, None if stand_in is None else import_command(str(stand_in.name)), rest


def import_command(name: str) -> click.Command:
    """Import one command."""
    module_name, summary = _COMMANDS[name]
    with QuietInterrupts():
        module = importlib.import_module(module_name)
        if module_name == "cli.services":
            found = module.service_command(name, summary)
        else:
            found = getattr(module, name.replace("-", "_"))
    assert isinstance(found, click.Command), found
    return found


_STAND_INS: Final = {name: click.Command(name, short_help=summary) for name, (_, summary) in _COMMANDS.items()}


@click.group(cls=_LazyGroup, commands=_STAND_INS, context_settings=CONTEXT_SETTINGS)
@click.version_option(baton_version(), prog_name="baton")
def cli() -> None:
    """Baton serves large language models on separate prefill and decode nodes.

    \b
    Example:
      baton demo-model /tmp/demo-model
      baton up --model /tmp/demo-model --prefill 2 --decode 2
      baton generate "Once upon a time" --max-tokens 32 --stats
    """


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
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


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit status; a user's error is one message on stderr, no traceback."""
    supervised = tie_to_supervisor()
    try:
        status = cli.main(args=arguments, prog_name="baton", standalone_mode=False, obj=supervised)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `baton nodes | head`: nobody reads any more
        sys.stdout = None  # or the interpreter would try to flush it at exit
        return EXIT_ERROR
    except Exception as error:
        from baton.errors import BatonError

        if not isinstance(error, BatonError):
            raise
        return _report(error)
    return status if isinstance(status, int) else 0


def _report(error: BatonError) -> int:
    """One message on stderr: what is wrong, which field, why for machines, when to try again."""
    usage = error.reason.name in _USAGE_REASONS
    facts = f"reason {error.reason.name}"
    if error.field is not None:
        facts += f", field {error.field}"
    if error.retry_after_ms is not None:
        facts += f", try again in {error.retry_after_ms} ms"
    # The message of a process of our own (`cli.supervisor`) has its facts already.
    plain = usage or "process" in error.metadata
    click.echo(ERROR_PREFIX + error.message + ("" if plain else f" ({facts})"), err=True)
    return EXIT_USAGE if usage else EXIT_ERROR
