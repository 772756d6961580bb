"""`baton chat` when an answer does not come to its end: Ctrl-C, a router that dies, one that is not there.

The engine is the mock, whose tokens take their time; the tokenizer and the chat template are the demo model's.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from cli.supervisor import ROUTER_NAME
from engine.demo_model import DemoModelParams, write_demo_model
from engine.mock import MockConfig
from tests.support.cli_harness import BATON, RUN_S_MAX, Terminal, clean_env, free_endpoint, run_baton
from tests.support.cluster_harness import RunningCluster, assert_conserved, mock_spec, running, wait_for

LONG_ANSWER: Final = ("--max-tokens", "3000", "--ignore-eos")
LAYER_MS: Final = 5.0
OTHER_PROMPT: Final = re.compile(r"turn \d+: prompt (\d+) tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with as many tokens as the mock draws from, and a chat template."""
    folder = tmp_path_factory.mktemp("breaks") / "tokenizer"
    params = DemoModelParams(num_layers=1, hidden_size=32, num_heads=2, head_dim=16, vocab_size=MockConfig().vocab_size)
    write_demo_model(folder, params)
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RunningCluster]:
    spec = mock_spec(both={"engine.mock_layer_delay_ms": LAYER_MS}, router_flags={"model": str(folder)})
    with running(spec) as cluster:
        yield cluster


async def answering(cluster: RunningCluster) -> bool:
    statuses = await cluster.statuses()
    return statuses["decode-0"].requests > 0


def prompt_tokens(shown: str) -> int:
    found = OTHER_PROMPT.search(shown)
    assert found is not None, shown
    return int(found[1])


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(cluster: RunningCluster) -> None:
    """In the middle of an answer of 3,000 tokens: the nodes let go of it, and the prompt is there again. A second
    Ctrl-C ends the chat."""
    with Terminal("chat", "--router", cluster.cluster.router, *LONG_ANSWER) as terminal:
        terminal.wait_for("> ")
        terminal.press("one\n")
        terminal.wait_for("one\n")
        terminal.wait_for_more()
        terminal.press("\x03")
        terminal.wait_for("Stopped.")
        terminal.wait_for("\n> ")
        cluster.run(assert_conserved(cluster))
        terminal.interrupt()
        status, _ = terminal.end()
        assert status == 130
    cluster.run(assert_conserved(cluster))


def test_a_lone_ctrl_c_at_the_prompt_does_not_end_it(cluster: RunningCluster) -> None:
    """An answer is in the next prompt; a Ctrl-C with a message after it is forgotten."""
    short = ("--max-tokens", "2", "--ignore-eos", "--stats")
    with Terminal("chat", "--router", cluster.cluster.router, *short) as terminal:
        terminal.wait_for("> ")
        terminal.interrupt()
        assert "Ctrl-C again, or Ctrl-D, ends the conversation." in terminal.wait_for("\n> ")
        terminal.press("one\n")
        first = prompt_tokens(terminal.wait_for("\n> "))
        terminal.interrupt()
        terminal.wait_for("ends the conversation.\n> ")
        terminal.press("one\n")
        assert prompt_tokens(terminal.wait_for("\n> ")) > first + 2
        terminal.interrupt()
        terminal.wait_for("ends the conversation.\n> ")
        terminal.interrupt()
        assert terminal.end()[0] == 130


def test_sigint_ends_a_script(cluster: RunningCluster) -> None:
    """Nobody sits there to go on: the answer is given up on the nodes, and the status says interrupted."""
    command = [*BATON, "chat", "--router", cluster.cluster.router, *LONG_ANSWER, "-o", "json"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=clean_env(), text=True, **pipes) as script:  # type: ignore[call-overload]
        try:
            script.stdin.write("one\ntwo\n")
            script.stdin.flush()
            cluster.run(wait_for(lambda: answering(cluster), "the answer to be written"))
            script.send_signal(signal.SIGINT)
            out, err = script.communicate(timeout=RUN_S_MAX)
        finally:
            script.kill()
    assert (script.returncode, err) == (130, "")
    (turn,) = [json.loads(line) for line in out.splitlines()]
    assert (turn["turn"], turn["user"], turn["finish"]) == (1, "one", "cancelled")
    cluster.run(assert_conserved(cluster))


def test_sigterm_ends_a_chat(cluster: RunningCluster) -> None:
    """At a terminal too: it is the end of the process that is asked for, not of the answer."""
    with Terminal("chat", "--router", cluster.cluster.router, *LONG_ANSWER) as terminal:
        terminal.wait_for("> ")
        terminal.press("one\n")
        cluster.run(wait_for(lambda: answering(cluster), "the answer to be written"))
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end()[0] == 128 + signal.SIGTERM
    cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_the_router_dies_in_the_middle_of_an_answer(folder: Path) -> None:
    """And none is there again in time: the message is told and left out. When a router is there again the conversation
    goes on, with the same next prompt as if nothing had been asked."""
    endpoint = free_endpoint()
    spec = mock_spec(
        both={"engine.mock_layer_delay_ms": LAYER_MS}, router_flags={"model": str(folder), "listen": endpoint}
    )
    with (
        running(spec) as cluster,
        Terminal(
            "chat", "--router", endpoint, "--max-tokens", "100", "--ignore-eos", "--stats", "--timeout", "8"
        ) as terminal,
    ):
        terminal.wait_for("> ")
        terminal.press("one\n")
        terminal.wait_for("one\n")
        terminal.wait_for_more()
        cluster.send_signal(ROUTER_NAME, signal.SIGKILL)
        reported = terminal.wait_for("The message is left out of the conversation.")
        late = f"There was no whole answer within 8 s. The last try: The router at {endpoint} does not answer: "
        assert f"error: The answer broke off. {late}" in reported
        assert "Traceback" not in reported
        terminal.wait_for("\n> ")
        cluster.run(cluster.wait_exit(ROUTER_NAME))
        cluster.run(cluster.cluster.start_process(ROUTER_NAME))
        terminal.press("one\n")
        terminal.wait_for("turn 2: prompt ")
        terminal.wait_for("\n> ")
        terminal.press("\x04")
        assert terminal.end()[0] == 0


def test_no_router() -> None:
    """As `generate` says it, at the first message; nothing goes on after it."""
    endpoint = free_endpoint()
    done = run_baton("chat", "--router", endpoint, stdin="one\ntwo\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: No router answers at {endpoint}. Is the cluster running (`baton up`), and the router neither cordoned "
        "nor drained (`baton nodes`)? Name another place with --router HOST:PORT. (reason PEER_UNREACHABLE)\n"
    )


def test_a_router_without_a_template() -> None:
    """A mock cluster has neither tokenizer nor template: said, with what works there."""
    with running(mock_spec()) as cluster:
        done = run_baton("chat", "--router", cluster.cluster.router, stdin="one\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: The router has no chat template: ")
    assert done.stderr.endswith("`baton generate` sends plain prompts.\n")


@pytest.mark.parametrize(("arguments", "why"), [(["--system", b"\xff"], "--system"), (["--stop", b"\xff"], "--stop")])
def test_flags_that_are_not_utf8(arguments: list[str | bytes], why: str) -> None:
    done = subprocess.run(
        [*BATON, "chat", *arguments],
        input=b"one\n",
        env=clean_env(),
        capture_output=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().splitlines()[-1] == f"Error: {why} is not UTF-8"


def test_stdin_is_closed() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *BATON, "chat"],
        env=clean_env(), capture_output=True, text=True, timeout=RUN_S_MAX, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "Error: stdin is closed; messages were to come from there."
