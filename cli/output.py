"""`-o json`: what a command shows as a table, as data."""

from __future__ import annotations

import json
from enum import Enum
from typing import Final

import click


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
