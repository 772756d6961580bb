"""What a command shows: a plain text table, or with `-o json` the same as data."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from enum import Enum
from typing import Final

import click


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Columns two spaces apart, those of the indexes in `right` aligned to the right; no line ends in a space."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Output(Enum):
    """How a command shows what it found."""

    TEXT = "text"
    JSON = "json"


output_option: Final = click.option(
    "-o", "--output", type=click.Choice([output.value for output in Output]), default=Output.TEXT.value,
    show_default=True, help="How to show it.",
)  # fmt: skip


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))
