"""Configuration: precedence of the sources, and errors that name the key, its source and what to write instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Gt

from baton import config
from baton.config import ConfigError, ConfigKey, ConfigProblem
from baton.errors import Code, InvalidField, Reason


class Mode(Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    rpcs_max: Annotated[int, Gt(0)] = 8
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise InvalidField("share", f"must be from 0 to 1, not {self.share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    listen: str = field(metadata={"help": "address to listen on"})
    mode: Mode = Mode.SAFE
    verbose: bool = False
    folder: Path | None = None
    stop_ids: tuple[int, ...] = ()
    peers: tuple[Peer, ...] = ()
    limits: Limits = field(default_factory=lambda: Limits(rpcs_max=16))

    def __post_init__(self) -> None:
        if self.mode is Mode.FAST and self.folder is None:
            raise ValueError("mode fast needs a folder")


def load(
    tmp_path: Path, toml: str = "", *, env: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> Settings:
    path = tmp_path / "baton.toml"
    path.write_text(toml)
    return config.load(
        Settings, toml_path=path, section="node", env_prefix="BATON_NODE_", env=env or {}, flags=flags or {}
    )


def problems(
    tmp_path: Path, toml: str = "", *, env: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> dict[str, str]:
    """Source to problem, the file named by its last part only."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, toml, env=env, flags=flags)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.reason is Reason.BAD_CONFIG
    for problem in caught.value.problems:
        assert f"  {problem.source}: {problem.problem}" in caught.value.message.splitlines()
    return {p.source.replace(str(tmp_path) + "/", ""): p.problem for p in caught.value.problems}


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Each key is set in one source more than the one before: the strongest source that has it wins."""
    toml = '[node]\nlisten = "file:1"\nverbose = true\nstop_ids = [1, 2]\n[node.limits]\nrpcs_max = 1\nshare = 1\n'
    env = {"BATON_NODE_LISTEN": "env:1", "BATON_NODE_LIMITS__RPCS_MAX": "2", "HOME": "/root", "BATON_OTHER_X": "1"}
    settings = load(tmp_path, toml, env=env, flags={"listen": "flag:1", "folder": None})
    assert settings == Settings(
        listen="flag:1", verbose=True, stop_ids=(1, 2), limits=Limits(rpcs_max=2, share=1.0), mode=Mode.SAFE
    )


def test_the_keys_that_are_given(tmp_path: Path) -> None:
    """By file or environment, rightly or wrongly, with their default too."""
    path = tmp_path / "baton.toml"
    path.write_text('[node]\nverbose = false\nlimits.share = "much"\nno_such_key = 1\n')
    env = {"BATON_NODE_MODE": "fast"}
    given = config.keys_given(Settings, toml_path=path, section="node", env_prefix="BATON_NODE_", env=env)
    assert given == {"verbose", "limits.share", "mode"}


def test_text_is_converted_to_the_type_of_the_key(tmp_path: Path) -> None:
    """Environment and flags carry text; every kind of key can be written as text."""
    env = {
        "BATON_NODE_MODE": "fast",
        "BATON_NODE_VERBOSE": "true",
        "BATON_NODE_FOLDER": "/models/a",
        "BATON_NODE_STOP_IDS": "3, 4",
        "BATON_NODE_PEERS": '[{"name": "a", "port": 1}]',
        "BATON_NODE_LIMITS__SHARE": "0.25",
    }
    assert load(tmp_path, env=env, flags={"listen": "h:1", "limits.rpcs_max": "3"}) == Settings(
        listen="h:1",
        mode=Mode.FAST,
        verbose=True,
        folder=Path("/models/a"),
        stop_ids=(3, 4),
        peers=(Peer(name="a", port=1),),
        limits=Limits(rpcs_max=3, share=0.25),
    )
    env = {"BATON_NODE_LISTEN": "h:1", "BATON_NODE_FOLDER": "none", "BATON_NODE_STOP_IDS": ""}
    assert load(tmp_path, "[node]\nfolder = '/x'\nstop_ids = [1]\n", env=env) == Settings(listen="h:1")


def test_a_nested_default_is_kept_where_one_of_its_keys_is_set(tmp_path: Path) -> None:
    """The node's own default for limits.rpcs_max (16) holds although limits.share comes from a flag."""
    settings = load(tmp_path, flags={"listen": "h:1", "limits.share": 0.75})
    assert settings.limits == Limits(rpcs_max=16, share=0.75)


def test_all_problems_are_listed_with_their_sources(tmp_path: Path) -> None:
    """A misspelt key in each source, and a wrong value in each: one error names all six, and the nearest known keys."""
    toml = '[node]\nlisten = "h:1"\nverbos = true\nverbose = 1\n[node.limits]\nrpcs_maximum = 3\n'
    env = {"BATON_NODE_LISTN": "x", "BATON_NODE_LIMITS__RPCS_MAX": "many"}
    found = problems(tmp_path, toml, env=env, flags={"mod": "fast", "mode": "quick"})
    assert found == {
        "baton.toml:node.verbos": "unknown key; did you mean verbose?",
        "baton.toml:node.verbose": "Input should be a valid boolean; got 1",
        "baton.toml:node.limits.rpcs_maximum": "unknown key; did you mean limits.rpcs_max?",
        "BATON_NODE_LISTN": "unknown variable; did you mean BATON_NODE_LISTEN?",
        "BATON_NODE_LIMITS__RPCS_MAX": (
            "Input should be a valid integer, unable to parse string as an integer; got 'many'"
        ),
        "--mod": "unknown flag; did you mean mode?",
        "--mode": "Input should be 'fast' or 'safe'; got 'quick'",
    }


@pytest.mark.parametrize(
    ("toml", "source", "problem"),
    [
        ('verbose = "true"', "baton.toml:node.verbose", "Input should be a valid boolean; got 'true'"),
        ("limits = 3", "baton.toml:node.limits", "must be a table, not 3"),
        ("stop_ids = [1, 2.5]", "baton.toml:node.stop_ids[1]", "Input should be a valid integer; got 2.5"),
        ("limits.share = inf", "baton.toml:node.limits.share", "dates, infinities and not-a-number are not used here"),
        ("folder = 1979-05-27", "baton.toml:node.folder", "dates, infinities and not-a-number are not used here"),
        ("limits.rpcs_max = 0", "baton.toml:node.limits.rpcs_max", "Input should be greater than 0; got 0"),
        ("limits.share = 2", "baton.toml:node.limits.share", "must be from 0 to 1, not 2.0"),
        ('mode = "fast"', "baton.toml:node", "mode fast needs a folder"),
        (
            'peers = [{name = "a", port = 1, prot = 2}]',
            "baton.toml:node.peers[0].prot",
            "Unexpected keyword argument; got 2",
        ),
    ],
)
def test_a_wrong_value_in_the_file(tmp_path: Path, toml: str, source: str, problem: str) -> None:
    """One value of the wrong type, out of range, or at odds with another: named by file, section and key."""
    (found,) = problems(tmp_path, f'[node]\nlisten = "h:1"\n{toml}\n').items()
    assert found[0] == source
    assert found[1].startswith(problem)


def test_a_required_key_that_is_missing_names_every_place_to_set_it(tmp_path: Path) -> None:
    """Nothing sets `listen`."""
    assert problems(tmp_path) == {
        "baton.toml:node.listen or BATON_NODE_LISTEN or --listen": "is required and not set",
    }


def test_the_file_is_missing_or_is_no_toml(tmp_path: Path) -> None:
    """A wrong path and a broken file are configuration errors like any other, beside the other problems."""
    with pytest.raises(ConfigError) as caught:
        config.load(
            Settings, toml_path=tmp_path / "no.toml", section="node", env_prefix="B_", env={}, flags={"listen": "h:1"}
        )
    assert caught.value.problems == (
        ConfigProblem(source=f"{tmp_path}/no.toml", problem="cannot be read: No such file or directory"),
    )
    found = problems(tmp_path, "[node\n", flags={"listen": "h:1"})
    assert list(found) == ["baton.toml"]
    assert found["baton.toml"].startswith("is not valid TOML: ")


def test_a_misspelt_section_is_refused(tmp_path: Path) -> None:
    """The file has [nod] and, rightly, [router], which belongs to another component."""
    path = tmp_path / "baton.toml"
    path.write_text("[nod]\n[router]\nanything = 1\n")
    with pytest.raises(ConfigError) as caught:
        config.load(
            Settings,
            toml_path=path,
            section="node",
            env_prefix="B_",
            env={},
            flags={"listen": "h:1"},
            known_sections=("node", "router"),
        )
    assert caught.value.problems == (
        ConfigProblem(source=f"{path}:nod", problem="unknown section; did you mean node?"),
    )


def test_describe_gives_what_help_shows() -> None:
    """Keys in order, nested ones dotted, the effective defaults, types in words."""
    assert list(config.describe(Settings)) == [
        ConfigKey(key="listen", type_text="text", default=None, help="address to listen on"),
        ConfigKey(key="mode", type_text="fast|safe", default="safe", help=""),
        ConfigKey(key="verbose", type_text="true|false", default="false", help=""),
        ConfigKey(key="folder", type_text="path or none", default="none", help=""),
        ConfigKey(key="stop_ids", type_text="int,...", default="", help=""),
        ConfigKey(key="peers", type_text="Peer,...", default="", help=""),
        ConfigKey(key="limits.rpcs_max", type_text="int", default="16", help=""),
        ConfigKey(key="limits.share", type_text="float", default="0.5", help=""),
    ]
