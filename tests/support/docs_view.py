"""What the documentation names, taken out of its text: commands, flags, keys, links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import click

from baton.config import describe, env_name
from cli.commands import cli, import_command
from cli.services import UP_ENV_PREFIX, Service, config_class
from cli.up import UpConfig

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = tuple(
    str(path.relative_to(ROOT)) for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
)
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPERATORS: Final = frozenset({"|", "||", "&", "&&", ";"})


@cache
def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks in this language."""
    return [found[2] for found in _FENCE.finditer(text_of(page)) if found[1] == language]


def spans(page: str) -> list[str]:
    """What stands `between backticks` outside of blocks."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text_of(page)))


def shell_commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a block, those in the arguments of `sh -c` too, without assignments before them."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word not in _OPERATORS:
                command.append(word)
                continue
            while command and re.match(r"\w+=", command[0]):
                command.pop(0)
            if command:
                yield command
            command = []
        for word in shlex.split(line, comments=True):
            if word.startswith("baton "):
                yield shlex.split(word)


def baton_commands(page: str) -> list[list[str]]:
    """The arguments of each `baton` in a block of shell."""
    found = [command for script in blocks(page, "sh") for command in shell_commands(script)]
    return [command[1:] for command in found if command[0].rpartition("/")[2] == "baton"]


@cache
def options_of(name: str) -> frozenset[str]:
    """The options of one command, and of those in it."""
    if name not in cli.commands:
        return frozenset()
    command = import_command(name)
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    params = [parameter for each in (command, *inner) for parameter in each.params]
    return frozenset(each for option in params for each in (*option.opts, *option.secondary_opts)) | {"--help"}


@cache
def all_options() -> frozenset[str]:
    names = cli.list_commands(click.Context(cli))
    return frozenset({"--version"}).union(*(options_of(name) for name in names))


@cache
def config_keys() -> Mapping[str, frozenset[str]]:
    """The keys of each service, and of `up`, by the prefix of its variables."""
    classes = {service.env_prefix: config_class(service) for service in Service} | {UP_ENV_PREFIX: UpConfig}
    return {prefix: frozenset(key.key for key in describe(cls)) for prefix, cls in classes.items()}


@cache
def key_endings() -> frozenset[str]:
    """Every key of every service, and what is left of it without its first words: `engine.gpu.overlap_steps`,
    `gpu.overlap_steps`, `overlap_steps`."""
    keys = frozenset[str]().union(*config_keys().values())
    return frozenset(".".join(key.split(".")[i:]) for key in keys for i in range(key.count(".") + 1))


@cache
def key_groups() -> frozenset[str]:
    """What stands before a dot in a key: `engine`, `gpu`, `engine.gpu`."""
    return frozenset(key.rpartition(".")[0] for key in key_endings() if "." in key)


@cache
def variables() -> frozenset[str]:
    return frozenset(env_name(prefix, key) for prefix, keys in config_keys().items() for key in keys)


def headings(page: str) -> frozenset[str]:
    """The anchors that GitHub gives them."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.strip().lower()) for title in titles]
    return frozenset(title.replace(" ", "-") for title in plain)


def table_under(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables' rows between this heading and the next one, without their heads."""
    section = text_of(page).partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    heads = {i - 1 for i, line in enumerate(lines) if set(line) <= set("|- ")}
    return [row for i, row in enumerate(rows) if i not in heads and i - 1 not in heads]
