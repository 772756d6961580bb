"""The entry point of the `baton` command. Imports nothing before it can answer Ctrl-C; the commands are in
`cli.commands`."""

from __future__ import annotations

import sys

from cli.invocation import QuietInterrupts


def main() -> None:
    """Entry point of the `baton` command. Ends the process; a user's error is one message on stderr, no traceback."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    with QuietInterrupts():
        from cli.commands import run_command
    return run_command(arguments)


if __name__ == "__main__":
    main()
