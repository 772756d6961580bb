"""Every command says what it does, with an example, and every configuration key is a flag."""

from __future__ import annotations

import re
import sys

import click
import pytest

from baton.config import describe, flag_name
from cli.commands import cli, import_command
from cli.main import run
from cli.services import Service, config_class

COMMANDS = cli.list_commands(click.Context(cli))


def test_the_commands() -> None:
    """The list of commands is the one in the documentation."""
    assert COMMANDS == [
        "up", "generate", "chat", "nodes", "describe", "pin", "unpin", "pins", "cache", "cordon", "uncordon", "drain",
        "undrain", "ca", "key", "doctor", "directory", "router", "prefill", "decode", "mixed", "demo-model", "demo",
        "bench", "completion",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("nods", "No such command 'nods'. Did you mean 'nodes'?\n"),
        ("corden", "No such command 'corden'. (Did you mean one of: 'cordon', 'uncordon'?)\n"),
        ("xyzzy", "No such command 'xyzzy'.\n"),
    ],
)
def test_a_command_that_is_mistyped(typed: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is alike is named, as for flags."""
    assert run([typed]) == 2
    assert capsys.readouterr().err.endswith(f"Error: {words}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`baton COMMAND --help` ends well and shows a line that can be typed."""
    assert run([command, "--help"]) == 0
    assert re.search(rf"Example:\n    baton {command} ", capsys.readouterr().out)


def test_the_group_has_an_example_and_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "Example:\n    baton demo-model " in shown
    assert [name for name in COMMANDS if not re.search(rf"^  {name} +[A-Z].*\.$", shown, re.MULTILINE)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_summary_in_the_list_is_how_the_help_begins(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The list is written by hand, so that it needs no import; each line fits its command's own text."""
    run(["--help"])
    summary = re.search(rf"^  {command} +(.*)$", capsys.readouterr().out, re.MULTILINE)
    found = import_command(command)
    assert summary is not None and found.help is not None
    assert found.help.split()[0] == summary[1].split()[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is_for(command: str) -> None:
    """More than its default, which `config_options` adds by itself."""
    found = import_command(command)
    options = [parameter for parameter in found.params if isinstance(parameter, click.Option)]
    assert [option.opts for option in options if not (option.help or "").partition("[")[0].strip()] == []


def test_every_command_that_prints_a_table_prints_it_as_data_too() -> None:
    """Whose module makes tables has -o; what one line tells (`demo-model`, `completion`, `up`, `pin`) has not."""
    made = []
    for command in COMMANDS:
        found = import_command(command)
        assert found.callback is not None
        module = sys.modules[found.callback.__module__]
        if command not in ("pin", "unpin") and any(
            hasattr(module, name) for name in ("format_table", "answer_data", "node_data")
        ):
            made.append(command)
            assert [parameter.name for parameter in found.params if "-o" in parameter.opts] == ["output"], command
    assert made == [
        "generate",
        "chat",
        "nodes",
        "describe",
        "pins",
        "cache",
        "cordon",
        "uncordon",
        "drain",
        "undrain",
        "doctor",
        "demo",
    ]


@pytest.mark.parametrize("service", list(Service))
def test_every_key_is_a_flag(service: Service) -> None:
    """The options of a service are its configuration keys, plus those of all."""
    command = import_command(service.value)
    flags = [option for parameter in command.params for option in parameter.opts]
    keys = [flag_name(key.key) for key in describe(config_class(service))]
    assert flags == [*keys, "--config", "--log-level", "--log-format"]


def test_a_flag_that_is_always_refused_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A mixed node spills nothing, and its help does not offer it; a decode node's does."""
    shown = {}
    for service in (Service.MIXED, Service.DECODE):
        assert run([service.value, "--help"]) == 0
        shown[service] = re.findall(r"--spill-[a-z-]+", capsys.readouterr().out)
    assert shown[Service.MIXED] == []
    assert "--spill-host-blocks" in shown[Service.DECODE]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"baton, version \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve"]) == 2
    assert "No such command 'serve'" in capsys.readouterr().err
