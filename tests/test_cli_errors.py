"""What a user reads, and which status a script gets, when something is wrong: never a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_harness import free_endpoint, run_baton, taken_port


def check(arguments: list[str], status: int, message: str, env: dict[str, str] | None = None) -> None:
    """The command fails with exactly this on stderr, and prints nothing to stdout."""
    result = run_baton(*arguments, env=env)
    assert (result.stderr, result.returncode, result.stdout) == (message, status, "")


def test_an_unknown_key_of_the_file(tmp_path: Path) -> None:
    """A key that no service has is named with its place and the nearest one that exists."""
    path = tmp_path / "baton.toml"
    path.write_text("[directory]\nlissten = '127.0.0.1:0'\n")
    check(
        ["directory", "--config", str(path)],
        2,
        f"error: Wrong configuration:\n  {path}:directory.lissten: unknown key; did you mean listen?\n",
    )


def test_an_unknown_section_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text("[prefil]\n")
    check(
        ["directory", "--config", str(path)],
        2,
        f"error: Wrong configuration:\n  {path}:prefil: unknown section; did you mean prefill?\n",
    )


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    """File, environment and flags are wrong: one message names all three."""
    path = tmp_path / "baton.toml"
    path.write_text("[directory]\nstop_grace_ms = 'long'\n")
    result = run_baton(
        "directory", "--config", str(path), "--rpc-rpcs-max", "many", env={"BATON_DIRECTORY_LISTN": "127.0.0.1:0"}
    )
    assert result.returncode == 2
    assert result.stdout == ""
    first, *problems = result.stderr.splitlines()
    assert first == "error: Wrong configuration:"
    assert sorted(line.partition(": ")[0].strip() for line in problems) == sorted(
        [f"{path}:directory.stop_grace_ms", "BATON_DIRECTORY_LISTN", "--rpc-rpcs-max"]
    )


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    path.write_text("[directory\n")
    result = run_baton("directory", "--config", str(path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: Wrong configuration:\n  {path}: is not valid TOML: ")
    assert len(result.stderr.splitlines()) == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "baton.toml"
    check(
        ["up", "--config", str(path)],
        2,
        f"error: Wrong configuration:\n  {path}: cannot be read: No such file or directory\n",
    )


def test_an_unknown_flag() -> None:
    check(
        ["directory", "--lissten", "127.0.0.1:0"],
        2,
        "Usage: baton directory [OPTIONS]\n"
        "Try 'baton directory --help' for help.\n\n"
        "Error: No such option '--lissten'. Did you mean '--listen'?\n",
    )


def test_a_required_key_is_missing() -> None:
    """A prefill node needs a name, and a model unless it is a mock."""
    result = run_baton("prefill", "--engine-kind", "mock")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == ("error: Wrong configuration:\n  BATON_PREFILL_NAME or --name: is required and not set\n")


def test_an_endpoint_that_is_none() -> None:
    check(
        ["directory", "--listen", "7070"],
        2,
        "error: '7070' is not a usable endpoint: expected host:port, as in 127.0.0.1:7000.\n",
    )


@pytest.mark.parametrize(
    "command", [["directory"], ["router"], ["decode", "--name", "decode-0", "--engine-kind", "mock"]]
)
def test_a_port_in_use(command: list[str]) -> None:
    """The port is named, and how to find who has it; no log line or traceback around it."""
    with taken_port() as endpoint:
        port = endpoint.rpartition(":")[2]
        check(
            [*command, "--listen", endpoint, "--log-level", "error"],
            1,
            f"error: Cannot listen on {endpoint}: the port is in use. Stop the process that has it "
            f"(`ss -ltnp 'sport = :{port}'` shows it), or choose another port. (reason PORT_IN_USE, field listen)\n",
        )


def test_no_directory_for_a_node() -> None:
    """A node gives up after the time it was given, and says what it could not reach."""
    endpoint = free_endpoint()
    result = run_baton(
        "router", "--directory", endpoint, "--listen", "127.0.0.1:0", "--log-level", "error",
        "--membership-directory-wait-ms-max", "100",
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: Not registered after ")
    assert f"directory at {endpoint}" in result.stderr
    assert result.stderr.endswith("(reason PEER_UNREACHABLE)\n")
    assert len(result.stderr.splitlines()) == 1


def test_no_directory_for_nodes() -> None:
    endpoint = free_endpoint()
    check(
        ["nodes", "--directory", endpoint, "--timeout", "1"],
        1,
        f"error: No directory answers at {endpoint} within 1000 ms. Is the cluster running (`baton up`)? "
        "Name another place with --directory HOST:PORT. (reason PEER_UNREACHABLE)\n",
    )


def test_no_router_for_generate() -> None:
    endpoint = free_endpoint()
    check(
        ["generate", "hello", "--router", endpoint],
        1,
        f"error: No router answers at {endpoint}. Is the cluster running (`baton up`)? "
        "Name another place with --router HOST:PORT. (reason PEER_UNREACHABLE)\n",
    )


def test_generate_needs_one_prompt() -> None:
    """Neither a text nor ids, both, or ids that are none."""
    head = "Usage: baton generate [OPTIONS] [PROMPT]\nTry 'baton generate --help' for help.\n\n"
    check(["generate"], 2, head + "Error: Give either a PROMPT or --token-ids.\n")
    check(["generate", "hello", "--token-ids", "1"], 2, head + "Error: Give either a PROMPT or --token-ids.\n")
    check(
        ["generate", "--token-ids", "1,two"],
        2,
        head + "Error: Invalid value for '--token-ids': '1,two' is no list of numbers; write it like 1,2,3\n",
    )
    check(
        ["generate", "hello", "--seed", "-1"],
        2,
        head + "Error: Invalid value for --seed: -1 is out of range: 0 to 18446744073709551615\n",
    )


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """`up` asks for a model before it starts anything; a node names the folder that is missing."""
    check(
        ["up"],
        2,
        "error: Wrong configuration:\n"
        "  BATON_PREFILL_ENGINE__MODEL or --model: is not set; name a folder or a model on the hub\n",
    )
    folder = tmp_path / "nothing"
    result = run_baton(
        "prefill",
        "--name",
        "prefill-0",
        "--listen",
        "127.0.0.1:0",
        "--log-level",
        "error",
        "--engine-model",
        f"{folder}",
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert str(folder) in result.stderr
    assert result.stderr.endswith("(reason MODEL_MISSING, field engine.model)\n")
    assert len(result.stderr.splitlines()) == 1


def test_a_demo_model_does_not_replace_what_is_no_demo_model(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    check(
        ["demo-model", str(tmp_path)],
        2,
        f"error: {tmp_path} exists and is no demo model: it is left as it is; name another folder\n",
    )
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_supervisor_that_is_gone() -> None:
    """A child whose parent is not the supervisor that started it ends at once: the supervisor has died meanwhile."""
    check(["--version"], 1, "", env={"BATON_SUPERVISOR_PID": "999999999"})
