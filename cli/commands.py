"""The commands of `baton`. Each command's module is imported when it is called for: `baton --help` needs neither
gRPC nor torch."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

from baton.version import baton_version
from cli.child import tie_to_supervisor
from cli.interrupts import QuietInterrupts
from cli.invocation import ERROR_PREFIX, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, Invocation

if TYPE_CHECKING:
    from baton.errors import BatonError

_USAGE_REASONS: Final = frozenset({"BAD_CONFIG", "BAD_ENDPOINT", "BAD_NAME"})
CONTEXT_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    module: str
    attribute: str
    summary: str


_COMMANDS: Final[Mapping[str, _Entry]] = {
    "up": _Entry(module="cli.up", attribute="up", summary="Start a whole cluster on this machine."),
    "generate": _Entry(module="cli.generate", attribute="generate", summary="Send a prompt and stream the answer."),
    "chat": _Entry(module="cli.chat", attribute="chat", summary="Talk with the model, line by line."),
    "nodes": _Entry(module="cli.nodes", attribute="nodes", summary="Show who is in the cluster and what it holds."),
    "describe": _Entry(module="cli.describe", attribute="describe", summary="Show everything about one node."),
    "pin": _Entry(module="cli.pins", attribute="pin", summary="Keep the KV of a prefix cached on all nodes."),
    "unpin": _Entry(module="cli.pins", attribute="unpin", summary="Let a pinned prefix be evicted again."),
    "pins": _Entry(module="cli.pins", attribute="pins", summary="Show the pinned prefixes."),
    "cordon": _Entry(module="cli.drain", attribute="cordon", summary="Keep new requests away from a node."),
    "uncordon": _Entry(module="cli.drain", attribute="uncordon", summary="Let a cordoned node take requests again."),
    "drain": _Entry(module="cli.drain", attribute="drain", summary="Empty a node until it is safe to delete."),
    "undrain": _Entry(module="cli.drain", attribute="undrain", summary="Let a drained node take requests again."),
    "doctor": _Entry(module="cli.doctor", attribute="doctor", summary="Tell whether RDMA works on this machine."),
    "directory": _Entry(module="cli.service", attribute="directory", summary="Run the embedded directory."),
    "router": _Entry(module="cli.service", attribute="router", summary="Run a router."),
    "prefill": _Entry(module="cli.service", attribute="prefill", summary="Run a prefill node."),
    "decode": _Entry(module="cli.service", attribute="decode", summary="Run a decode node."),
    "mixed": _Entry(module="cli.service", attribute="mixed", summary="Run a node that does both halves."),
    "demo-model": _Entry(module="cli.demo_model", attribute="demo_model", summary="Write a small random model."),
    "demo": _Entry(module="cli.demo", attribute="demo", summary="Start a cluster, check its answers, stop it."),
    "bench": _Entry(module="cli.bench", attribute="bench", summary="Send requests and report latencies."),
    "completion": _Entry(
        module="cli.completion", attribute="completion", summary="Print the completion script of a shell."
    ),
}


class _LazyGroup(click.Group):
    """Lists commands by the table above and imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        with QuietInterrupts():
            module = importlib.import_module(entry.module)
            if entry.module == "cli.service":
                command = module.service_command(entry.attribute, entry.summary)
            else:
                command = getattr(module, entry.attribute)
        assert isinstance(command, click.Command), command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            alike = difflib.get_close_matches(args[0], _COMMANDS)
            if not alike:
                raise
            text = f"{error.message} Did you mean {' or '.join(map(repr, alike))}?"
            raise click.UsageError(text, ctx=error.ctx) from error

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """From the table: completing a command's name imports none of them."""
        names = [CompletionItem(n, help=e.summary) for n, e in _COMMANDS.items() if n.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings=CONTEXT_SETTINGS)
@click.version_option(baton_version(), prog_name="baton")
def cli() -> None:
    """Baton serves large language models on separate prefill and decode nodes.

    \b
    Example:
      baton demo-model /tmp/demo-model
      baton up --model /tmp/demo-model --prefill 2 --decode 2
      baton generate "the sea in the evening" --max-tokens 32 --stats
    """


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit status; a user's error is one message on stderr, no traceback."""
    invocation = Invocation(supervised=tie_to_supervisor())
    try:
        status = cli.main(args=arguments, prog_name="baton", standalone_mode=False, obj=invocation)
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
    facts = [f"reason {error.reason.name}"]
    if error.field is not None:
        facts.append(f"field {error.field}")
    if error.retry_after_ms is not None:
        facts.append(f"try again in {error.retry_after_ms} ms")
    # The message of a process of our own (`cli.supervisor`) has its facts already.
    plain = usage or "process" in error.metadata
    click.echo(ERROR_PREFIX + error.message + ("" if plain else f" ({', '.join(facts)})"), err=True)
    return EXIT_USAGE if usage else EXIT_ERROR
