"""What a user reads, and which status a script gets, when something is wrong: never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import click
import pytest

from cli.commands import import_command
from tests.support.cli_harness import BATON, RUN_S_MAX, clean_env, free_endpoint, run_baton, taken_port


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
        "Error: No such option '--lissten'. (Did you mean one of: '--listen', '--probe-listen'?)\n",
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
            f"(`ss -ltnp 'sport = :{port}'` shows it), or choose another port with --listen. "
            "(reason PORT_IN_USE, field listen)\n",
        )


@pytest.mark.parametrize(
    "command", [["router"], ["decode", "--name", "decode-0", "--engine-kind", "mock", "--insecure"]]
)
def test_all_addresses_and_none_to_tell(command: list[str]) -> None:
    """Refused at once, and not when a model has been loaded: nobody could call it. `--advertise` is checked too."""
    listen = ["--listen", "0.0.0.0:0", "--log-level", "error"]
    check(
        [*command, *listen],
        2,
        "error: 0.0.0.0:0 is for listening only: say with --advertise HOST:PORT where the other processes reach this "
        "one.\n",
    )
    check(
        [*command, *listen, "--advertise", "10.0.0.1:0"],
        2,
        "error: '10.0.0.1:0' is not a usable endpoint: port 0 is for listening; advertise the port that was bound.\n",
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
    assert result.stderr.endswith(
        f"The directory at {endpoint} does not answer: nothing listens there. Start the directory first, or say where "
        "it is with --directory. (reason PEER_UNREACHABLE)\n"
    )
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
        f"error: No router answers at {endpoint}. Is the cluster running (`baton up`), and the router neither cordoned "
        "nor drained (`baton nodes`)? Name another place with --router HOST:PORT. (reason PEER_UNREACHABLE)\n",
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
        head + "Error: Invalid value for '--seed': -1 is not in the range 0<=x<=18446744073709551615.\n",
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "what"),
    [
        (["-"], b"ab\xff\xfe", "the prompt"),
        ([b"ab\xff"], b"", "the prompt"),
        (["hello", "--model", b"\xff"], b"", "--model"),
        (["hello", "--router", b"\xff:1"], b"", "--router"),
    ],
)
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_text_that_is_not_utf8(arguments: list[str | bytes], stdin: bytes, what: str, locale: str) -> None:
    """Refused before anything is sent, whatever the locale makes of such bytes."""
    result = subprocess.run(
        [*BATON, "generate", *arguments],
        input=stdin,
        env=clean_env(LC_ALL=locale),
        capture_output=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.decode().splitlines()[-1] == f"Error: {what} is not UTF-8"
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("timeout", ["nan", "inf", "1e300", "0", "-1", "86401"])
def test_a_timeout_that_is_no_time(timeout: str) -> None:
    result = run_baton("generate", "hello", "--timeout", timeout)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("Error: Invalid value for '--timeout': ")


@pytest.mark.parametrize("command", [["nodes"], ["describe", "decode-0"], ["drain", "decode-0", "--wait"], ["chat"]])
@pytest.mark.parametrize("timeout", ["nan", "inf", "-inf", "0", "0.0001", "-1", "86401", "soon"])
def test_every_command_refuses_such_a_timeout(command: list[str], timeout: str) -> None:
    """Each in the same words, before anybody is called."""
    made = import_command(command[0])
    with pytest.raises(click.UsageError) as caught:
        made.make_context(command[0], [*command[1:], "--timeout", timeout])
    assert caught.value.format_message().startswith("Invalid value for '--timeout': ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["up", "--engine-kind", "mock"],
            "error: Wrong configuration:\n  --prefill: makes 1001 nodes with decode and mixed; at most 64\n",
        ),
        (["demo"], "error: prefill makes 1001 nodes with decode and mixed; at most 64.\n"),
    ],
)
def test_more_nodes_than_one_supervisor_starts(command: list[str], message: str) -> None:
    """Before anything is written or started."""
    check([*command, "--prefill", "1000", "--decode", "1"], 2, message)


def test_where_up_is_to_listen() -> None:
    """A port that there is not, and one port for two: known before anything is started."""
    up = ["up", "--engine-kind", "mock", "--blocks", "64"]
    check(
        [*up, "--listen", "127.0.0.1:99999"],
        2,
        "error: Wrong configuration:\n  listen of router-0: '127.0.0.1:99999' is not a usable endpoint: "
        "the port must be a number from 0 to 65535.\n",
    )
    check(
        [*up, "--listen", "127.0.0.1:7000", "--directory-listen", "127.0.0.1:7000"],
        2,
        "error: Wrong configuration:\n  listen of router-0: 127.0.0.1:7000 is where directory is to listen\n",
    )
    check(
        [*up, "--http", "127.0.0.1:7000"],
        2,
        "error: Wrong configuration:\n  listen of router-0 over HTTP: 127.0.0.1:7000 is where router-0 is to listen\n",
    )
    check(
        [*up, "--http", "8000"],
        2,
        "error: Wrong configuration:\n  listen of router-0 over HTTP: '8000' is not a usable endpoint: "
        "expected host:port, as in 127.0.0.1:7000.\n",
    )


def test_what_is_wrong_of_several_services_of_up(tmp_path: Path) -> None:
    """Settings of the router, of prefill and of decode nodes, and where the directory listens: one message names all of
    them, what two nodes have in common once."""
    path = tmp_path / "baton.toml"
    path.write_text(
        "[router]\nstop_grace_ms = 'long'\n[prefill]\nengine.blocks = 1\n[decode]\nlissten = '127.0.0.1:0'\n"
    )
    up = ["up", "--engine-kind", "mock", "--prefill", "2", "--decode", "2", "--directory-listen", "7070"]
    result = run_baton(*up, "--config", str(path), env={"BATON_DECODE_ENGINE__NUM_BLOCKS": "many"})
    assert (result.returncode, result.stdout) == (2, "")
    first, *problems = result.stderr.splitlines()
    assert first == "error: Wrong configuration:"
    assert [line.partition(": ")[0].strip() for line in problems] == [
        f"{path}:router.stop_grace_ms",
        f"{path}:prefill.engine.blocks",
        f"{path}:decode.lissten",
        "BATON_DECODE_ENGINE__NUM_BLOCKS",
        "listen of directory",
    ]


@pytest.mark.parametrize(
    ("flag", "value", "most"),
    [
        ("--layers", "100000000", 64),
        ("--hidden-size", "100000000", 4096),
        ("--vocab-size", "999999999", 131072),
        ("--context", "10000000000", 1048576),
    ],
)
def test_a_demo_model_that_is_too_large(tmp_path: Path, flag: str, value: str, most: int) -> None:
    """Refused by the flag's limit, and nothing is written."""
    result = run_baton("demo-model", str(tmp_path / "model"), flag, value)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith(f"Error: Invalid value for '{flag}': {value} is not in the range 1<=x<={most}.\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "arguments"), [("click", ["--version"]), ("grpc", ["generate", "hello"]), ("numpy", ["demo-model", "x"])]
)
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, module: str, arguments: list[str]) -> None:
    """In the middle of an import, the first ones and those of a command: status 130, and not a word."""
    (tmp_path / f"{module}.py").write_text(f"import os\nos.kill(os.getpid(), {signal.SIGINT:d})\nprint('survived')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    check(arguments, 130, "", env={"PYTHONPATH": path})


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    """`up` asks for a model before it starts anything; a node names the folder that is missing."""
    check(
        ["up"],
        2,
        "error: Wrong configuration:\n"
        "  BATON_PREFILL_ENGINE__MODEL or --model: is not set; name a folder or a model on the hub\n"
        "  BATON_DECODE_ENGINE__MODEL or --model: is not set; name a folder or a model on the hub\n",
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
