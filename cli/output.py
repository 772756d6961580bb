"""What a command shows: a plain text table, or with `-o json` the same as data."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Final

import click
from google.protobuf.message import Message


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Columns two spaces apart, those of the indexes in `right` aligned to the right; no line ends in a space."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def format_pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A line for each name and value, the values below each other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


TEXT: Final = "text"
JSON: Final = "json"
output_option: Final = click.option(
    "-o", "--output", type=click.Choice([TEXT, JSON]), default=TEXT, show_default=True, help="How to show it.",
)  # fmt: skip


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


def message_data(message: Message) -> dict[str, Any]:
    """All fields of a message by name, unset and nested ones too. 64-bit numbers stay numbers: `json_format` makes
    strings of them."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return message_data(value)
    return value if isinstance(value, str | int | float) else [_plain(each) for each in value]
