"""`baton chat` and chat messages over gRPC, on a cluster with a real model: turns, their cached prefixes, bad input."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from baton.rpc import rpc_errors
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from router.text import TextCodec
from tests.support.cli_harness import BATON, RUN_S_MAX, Terminal, clean_env, run_baton
from tests.support.cluster_harness import CALL_S_MAX, RunningCluster, assert_conserved, collect, running

BLOCK: Final = 16
CONTEXT: Final = 512
LONG: Final = "Tell me of the sea in the evening, and of all the boats that sail on it before the storm."
GREEDY: Final = ("--temperature", "0", "--ignore-eos", "--max-tokens", "24")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "tiny"
    write_demo_model(
        folder,
        DemoModelParams(
            num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600, context_len_max=CONTEXT
        ),
    )
    return folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[RunningCluster]:
    with running(
        ClusterSpec(model=str(model), engine_kind=EngineKind.MODEL, prefill=1, decode=1, blocks=256)
    ) as cluster:
        yield cluster


def chat(cluster: RunningCluster, stdin: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_baton("chat", "--router", cluster.cluster.router, *arguments, stdin=stdin)


def turns(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.stdout.splitlines()]


def chat_request(*messages: tuple[str, str], **sampling: Any) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(sampling=inference_pb2.Sampling(temperature=0, ignore_eos=True, **sampling))
    request.chat.SetInParent()
    for role, content in messages:
        request.chat.messages.add(role=role, content=content)
    return request


def test_messages_over_grpc(cluster: RunningCluster, model: Path) -> None:
    """Streamed and unary, the answer is the one to the rendered template as token ids."""
    ids = list(TextCodec.load(model).encode_chat(f"<|begin|>system: Be brief.\nuser: {LONG}\nassistant:"))
    request = chat_request(("system", "Be brief."), ("user", LONG), max_tokens=12)

    async def ask() -> None:
        wanted = await cluster.client.generate(ids, max_tokens=12, ignore_eos=True)
        streamed = await collect(cluster.client.stub.Generate(request, timeout=CALL_S_MAX))
        unary = await cluster.client.stub.GenerateUnary(request, timeout=CALL_S_MAX)
        assert streamed.ids == list(unary.ids) == wanted.ids
        assert streamed.text == unary.text == wanted.text
        assert streamed.stats.prompt_tokens == len(ids)

    cluster.run(ask())


@pytest.mark.parametrize(
    ("messages", "reason", "field"),
    [
        ([], Reason.EMPTY_PROMPT, "chat.messages"),
        ([("user", "a"), ("narrator", "b")], Reason.BAD_FIELD, "chat.messages.1.role"),
        ([("user", "")], Reason.BAD_FIELD, "chat.messages.0.content"),
        ([("user", "sea " * CONTEXT)], Reason.PROMPT_TOO_LONG, "chat"),
        ([("user", "a")] * 4097, Reason.PROMPT_TOO_LONG, "chat.messages"),
    ],
)
def test_messages_that_are_refused(
    cluster: RunningCluster, messages: list[tuple[str, str]], reason: Reason, field: str
) -> None:
    """With the status of a wrong request, the reason and the field."""

    async def ask() -> BatonError:
        with pytest.raises(BatonError) as caught, rpc_errors("router"):
            await cluster.client.stub.GenerateUnary(chat_request(*messages), timeout=CALL_S_MAX)
        return caught.value

    error = cluster.run(ask())
    assert (error.code.name, error.reason, error.field) == ("INVALID_ARGUMENT", reason, field)


def test_each_turn_finds_the_one_before_in_the_cache(cluster: RunningCluster, model: Path) -> None:
    """Three turns on one prefill node (of two, a router may choose the faster one): every full block of a turn's prompt
    is cached for the next one. The answers were written on the decode node: the prefill node computes them again, once.
    """
    done = chat(cluster, f"{LONG}\nAnd the boats?\nWhy?\n", "-o", "json", *GREEDY, "--system", "A first conversation.")
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = turns(done)
    assert [turn["turn"] for turn in (first, second, third)] == [1, 2, 3]
    prompts = [turn["stats"]["prompt_tokens"] for turn in (first, second, third)]
    cached = [turn["stats"]["prompt_tokens_cached"] for turn in (first, second, third)]
    assert prompts[0] > 2 * BLOCK
    assert cached == [0, prompts[0] // BLOCK * BLOCK, prompts[1] // BLOCK * BLOCK]
    assert len({turn["stats"]["prefill_node"] for turn in (first, second, third)}) == 1
    skipped = [turn["stats"]["blocks_skipped"] for turn in (first, second, third)]
    assert skipped[0] == 0
    assert skipped[1] >= prompts[0] // BLOCK
    assert skipped[2] >= prompts[1] // BLOCK
    text = (
        f"<|begin|>system: A first conversation.\nuser: {LONG}\nassistant: {first['text'].strip()}\n"
        "user: And the boats?\nassistant:"
    )
    ids = list(TextCodec.load(model).encode_chat(text))
    again = cluster.run(cluster.client.generate(ids, max_tokens=24, ignore_eos=True))
    assert (prompts[1], second["ids"], second["text"]) == (len(ids), again.ids, again.text)
    cluster.run(assert_conserved(cluster))


def test_a_script_pipes_messages_in(cluster: RunningCluster) -> None:
    """Text on stdout, remarks on stderr; empty lines are nothing, orders are obeyed, and the reset is one."""
    done = chat(cluster, "one\r\n\n  \n/reset\none\n/stats\n//etc\n/exit\nnever sent\n", *GREEDY, "--stats")
    assert done.returncode == 0
    first, again, third = done.stdout.splitlines()
    assert first == again != third
    remarks = done.stderr.splitlines()
    assert remarks[0].startswith("turn 1: prompt ")
    assert remarks[1] == "A new conversation."
    assert remarks[2].startswith("turn 2: prompt ")
    assert remarks[3].startswith("request  ")
    assert remarks[-1].startswith("turn 3: prompt ")
    assert remarks[0].split(", ")[0].partition(": ")[2] == remarks[2].split(", ")[0].partition(": ")[2]


def test_a_conversation_beyond_the_context(cluster: RunningCluster) -> None:
    """Said in one line, with what to do; the message is left out, and the conversation goes on."""
    long = "sea " * CONTEXT
    done = chat(cluster, f"one\n{long}\ntwo\n/reset\none\n", *GREEDY)
    assert done.returncode == 1
    (reported, reset) = done.stderr.splitlines()
    assert reported.startswith("error: This model's maximum context length is ")
    assert reported.endswith("The message is left out of the conversation. /reset begins a new conversation.")
    assert reset == "A new conversation."
    one, two, again = done.stdout.splitlines()
    assert one == again != two
    data = turns(chat(cluster, f"one\n{long}\ntwo\n", "-o", "json", *GREEDY))
    assert [turn["turn"] for turn in data] == [1, 2, 3]
    assert (data[1]["error"]["reason"], data[1]["user"]) == ("PROMPT_TOO_LONG", long.strip())
    assert [turn["text"] for turn in (data[0], data[2])] == [one.strip("\n"), two.strip("\n")]


def test_lines_that_are_not_sent(cluster: RunningCluster) -> None:
    """An unknown order is told and makes the status 1; the lines around it are answered."""
    done = chat(cluster, "/resett\none\n", *GREEDY)
    assert (done.returncode, done.stderr) == (1, "There is no /resett; /help lists what there is.\n")
    assert len(done.stdout.splitlines()) == 1


def test_wrong_sampling_is_told_for_each_message(cluster: RunningCluster) -> None:
    done = chat(cluster, "one\n", "--top-p", "7")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: top_p is 7.0; it must be above 0 and at most 1")


@pytest.mark.parametrize(
    ("stdin", "why"),
    [(b"\x00\xff\xfe\n", "line 1 of stdin is not UTF-8"), (b"a" * ((8 << 20) + 1), "line 1 of stdin is longer than ")],
)
def test_stdin_that_is_no_text(cluster: RunningCluster, stdin: bytes, why: str) -> None:
    """Ends at once, with the status of wrong usage, and no traceback."""
    done = subprocess.run(
        [*BATON, "chat", "--router", cluster.cluster.router],
        input=stdin,
        env=clean_env(),
        capture_output=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().splitlines()[-1].startswith(f"Error: {why}")


def test_typed_in_a_terminal(cluster: RunningCluster) -> None:
    """A prompt, an answer under it, orders, Ctrl-D: status 0."""
    with Terminal("chat", "--router", cluster.cluster.router, *GREEDY, "--stats") as terminal:
        terminal.wait_for("> ")
        terminal.press("one\n")
        shown = terminal.wait_for("\n> ")
        assert "\nturn 1: prompt " in shown
        terminal.press("/help\n")
        assert "/system TEXT" in terminal.wait_for("\n> ")
        terminal.press("/system Be brief.\n")
        assert "The system message is set." in terminal.wait_for("\n> ")
        terminal.press("/nonsense\n")
        assert "There is no /nonsense" in terminal.wait_for("\n> ")
        terminal.press("two\n")
        assert "turn 2: prompt " in terminal.wait_for("\n> ")
        terminal.press("/stats\n")
        assert "\nfinish           length\n" in terminal.wait_for("\n> ")
        terminal.press("\x04")
        status, _ = terminal.end()
        assert status == 0


def test_several_answers_and_log_probabilities(cluster: RunningCluster) -> None:
    """`generate -n 3` draws three answers from one seed, the first that of n = 1; each is an object of the list."""
    sampling = ["--seed", "7", "--temperature", "1.5", "--max-tokens", "12", "--ignore-eos", "--logprobs", "2"]
    ask = ["generate", LONG, "--router", cluster.cluster.router, *sampling]
    one, three, unary = (run_baton(*ask, "-o", "json", *more) for more in ([], ["-n", "3"], ["--no-stream"]))
    assert (one.stderr, three.stderr, unary.stderr) == ("", "", "")
    single, several = json.loads(one.stdout), json.loads(three.stdout)
    assert json.loads(unary.stdout)["ids"] == single["ids"]
    for entry, same in zip(json.loads(unary.stdout)["logprobs"], single["logprobs"], strict=True):
        assert entry["logprob"] == pytest.approx(same["logprob"], abs=1e-4)
    assert [len(answer["ids"]) for answer in several] == [12] * 3
    assert several[0]["ids"] == single["ids"]
    assert len({tuple(answer["ids"]) for answer in several}) == 3
    assert [[entry["id"] for entry in answer["logprobs"]] for answer in several] == [a["ids"] for a in several]
    assert {len(entry["top"]) for answer in several for entry in answer["logprobs"]} == {2}
    shown = run_baton(*ask, "-n", "2")
    assert shown.stdout == f"--- 1 of 2\n{several[0]['text']}\n--- 2 of 2\n{several[1]['text']}\n"
    assert shown.stderr.count("TOKEN  ") == 2
    cluster.run(assert_conserved(cluster))
