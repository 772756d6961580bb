"""What the commands write while they work: answers as they come, progress, tables, the demo's verdict."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace

import click
import pytest
from batonpb import common_pb2, directory_pb2, inference_pb2, node_pb2

from baton.client import Answer, Piece
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import NodeRecord, Role
from cli.client import StreamPrinter, answer_data
from cli.demo import held_by
from cli.nodes import KERNELS_DIFFER, NodeView, figure_text, kernels_note
from cli.output import format_table
from cli.parameters import IntegerList
from cli.services import ProgressPrinter
from cli.up import StartBoard
from tests.support.cli_harness import run_baton
from tests.support.router_records import MODEL

Tokens = Piece


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(*tokens: Piece, as_ids: bool | None = None) -> list[str]:
    """What is on the screen after each message, and at the end."""
    screen = io.StringIO()
    printer = StreamPrinter(screen, as_ids=as_ids)
    seen = []
    for message in tokens:
        printer.show(message)
        seen.append(screen.getvalue())
    printer.end()
    return [*seen, screen.getvalue()]


def test_text_is_written_as_it_comes() -> None:
    messages = [Tokens(ids=[5], text="the"), Tokens(ids=[6], text=""), Tokens(ids=[7, 8], text=" sea")]
    assert printed(*messages, as_ids=False) == ["the", "the", "the sea", "the sea\n"]
    assert printed(*messages) == ["the", "the", "the sea", "the sea\n"]
    assert printed(*messages, as_ids=True) == ["5", "5 6", "5 6 7 8", "5 6 7 8\n"]


def test_half_a_character_is_no_reason_to_show_ids() -> None:
    """The first tokens of an answer may be bytes of one character: they are held back until it shows."""
    assert printed(Tokens(ids=[1]), Tokens(ids=[2, 3]), Tokens(ids=[4], text="日")) == ["", "", "日", "日\n"]


def test_ids_where_there_is_no_text() -> None:
    """Four tokens without text: there is no tokenizer, and from here on ids come as they are drawn."""
    assert printed(Tokens(ids=[1, 2]), Tokens(ids=[3, 4]), Tokens(ids=[5])) == [
        "",
        "1 2 3 4",
        "1 2 3 4 5",
        "1 2 3 4 5\n",
    ]
    assert printed(Tokens(ids=[1, 2])) == ["", "1 2\n"]


def test_nothing_is_written_for_no_answer() -> None:
    assert printed(as_ids=False) == [""]


@pytest.mark.parametrize(("text", "ids"), [("1", (1,)), ("1,2, 3", (1, 2, 3)), ("4294967295", (4294967295,))])
def test_token_ids_are_read(text: str, ids: tuple[int, ...]) -> None:
    assert IntegerList().convert(text, None, None) == ids


@pytest.mark.parametrize("text", ["", "1,,2", "-1", "4294967296", "1.5", "a"])
def test_what_is_no_list_of_token_ids_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        IntegerList().convert(text, None, None)


def test_progress_of_a_service() -> None:
    """For a supervisor JSON, a percent at a time; for people a line every 25 percent, or one that is rewritten."""
    steps = [("loading", done, 1000) for done in (0, 4, 10, 249, 250, 999, 1000)] + [("prefaulting", 0, 0)]

    def run(stderr: io.StringIO, *, supervised: bool) -> tuple[list[str], str]:
        stdout = io.StringIO()
        printer = ProgressPrinter(name="decode-0", supervised=supervised, stdout=stdout, stderr=stderr)
        for step in steps:
            printer(*step)
        return stdout.getvalue().splitlines(), stderr.getvalue()

    lines, nothing = run(io.StringIO(), supervised=True)
    reported = [json.loads(line.removeprefix("progress ")) for line in lines]
    assert [progress["done"] for progress in reported] == [0, 10, 249, 250, 999, 1000, 0]
    assert nothing == ""

    assert run(io.StringIO(), supervised=False) == (
        [],
        "decode-0: loading 0%\ndecode-0: loading 25%\ndecode-0: loading 75%\ndecode-0: loading 100%\n"
        "decode-0: prefaulting 100%\n",
    )

    _, screen = run(Terminal(), supervised=False)
    assert screen.count("\n") == 2
    assert screen.endswith("\r\x1b[Kdecode-0: loading 100%\n\r\x1b[Kdecode-0: prefaulting 100%\n")


def test_progress_of_a_service_whose_log_is_json(caplog: pytest.LogCaptureFixture) -> None:
    """On a terminal too: nothing but events of the log."""
    stdout, stderr = io.StringIO(), Terminal()
    printer = ProgressPrinter(name="decode-0", supervised=False, stdout=stdout, stderr=stderr, logs=True)
    with caplog.at_level(logging.INFO):
        for done in (0, 4, 249, 250, 1000):
            printer("loading", done, 1000)
    assert (stdout.getvalue(), stderr.getvalue()) == ("", "")
    reported = [record.baton_fields for record in caplog.records]  # type: ignore[attr-defined]
    assert reported == [{"what": "loading", "percent": percent} for percent in (0, 25, 100)]


def test_the_board_on_a_terminal_rewrites_lines() -> None:
    """Two processes: the cursor goes up to the line of the one that changes, and back."""
    screen = Terminal()
    board = StartBoard(("directory", "decode-0"), screen)
    board.progress("decode-0", "loading", 1, 2)
    board.ready("directory", "127.0.0.1:7070")
    assert screen.getvalue() == (
        "  directory  starting\n  decode-0   starting\n"
        "\x1b[1A\r\x1b[K  decode-0   loading 50%\x1b[1B\r"
        "\x1b[2A\r\x1b[K  directory  ready at 127.0.0.1:7070\x1b[2B\r"
    )


def test_the_board_elsewhere_tells_what_takes_long() -> None:
    """A line for each that is ready; progress only two seconds after the last line of the same process."""
    now_s = 0.0
    lines = io.StringIO()
    board = StartBoard(("directory", "decode-0"), lines, now_s=lambda: now_s)
    for now_s in (0.5, 1.9, 2.1, 3.0, 4.2):
        board.progress("decode-0", "loading", int(now_s * 10), 50)
    board.ready("decode-0", "127.0.0.1:9")
    assert lines.getvalue() == (
        "  decode-0   loading 42%\n  decode-0   loading 84%\n  decode-0   ready at 127.0.0.1:9\n"
    )


def test_a_table() -> None:
    """Columns as wide as their widest cell, numbers to the right, no spaces at the ends of lines."""
    table = format_table(("NAME", "N", "WHY"), [["a", "10", ""], ["bcdef", "7", "so"]], right={1})
    assert table == "NAME    N  WHY\na      10\nbcdef   7  so"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (33554432, "33554432"), (2**40, "1099511627776"), (4.11665, "4.12"), (0.25, "0.25"), (12345.6, "12346")],
)
def test_a_figure(value: float, text: str) -> None:
    """Bytes and counts keep their digits."""
    assert figure_text(value) == text


def test_what_a_node_holds() -> None:
    """An idle node holds nothing, however much it has cached; anything else is named with its count."""
    record = NodeRecord(
        name=NodeName("decode-0"), role=Role.DECODE, incarnation=Incarnation(7), endpoint="127.0.0.1:9",
        lifecycle=Lifecycle.READY,
    )  # fmt: skip
    idle = common_pb2.BlockCounts(cached=5, free=3)
    busy = common_pb2.BlockCounts(held=1, writer_owned=2, quarantined=3, promised=4)

    def view(blocks: common_pb2.BlockCounts, **counts: int) -> NodeView:
        own = directory_pb2.NodeRecord(load=directory_pb2.NodeLoad(blocks=blocks))
        return NodeView(record=record, status=node_pb2.NodeStatus(record=own, **counts))  # type: ignore[arg-type]

    assert held_by(view(idle)) == ""
    assert held_by(view(busy, requests=5, grants_received=6, conservation_errors=7)) == (
        "5 requests, 6 grants received, 1 blocks held, 2 blocks owned by a writer, 3 blocks quarantined, "
        "4 blocks promised, 7 conservation errors"
    )
    assert held_by(NodeView(record=record, status=None, problem="gone")) == "does not answer: gone"


def test_an_answer_as_data() -> None:
    """What `-o json` prints of an answer: text and ids, and every figure of the statistics."""
    stats = inference_pb2.RequestStats(prefill_node="prefill-0", prompt_tokens=3, output_tokens=2)
    data = answer_data(Answer(request_id="r", ids=[5, 6], text="the sea", finish="length", stats=stats))
    reported = data.pop("stats")
    assert isinstance(reported, dict) and reported["sources"] == {
        "computed": 0, "cached_device": 0, "cached_host": 0, "cached_disk": 0, "fetched": 0, "fetched_from": "",
    }  # fmt: skip
    assert data == {"request": "r", "finish": "length", "text": "the sea", "ids": [5, 6]}
    assert {name: value for name, value in reported.items() if value and name != "sources"} == {
        "prefill_node": "prefill-0", "prompt_tokens": 3, "output_tokens": 2,
    }  # fmt: skip
    assert json.loads(json.dumps(reported)) == reported


@pytest.mark.parametrize(
    ("words", "completed"), [("baton unc", "plain,uncordon\n"), ("baton ch", "plain,chat\n"), ("baton nope", "\n")]
)
def test_the_shell_completes_commands(words: str, completed: str) -> None:
    """As the script of `baton completion bash` asks, with the words typed so far."""
    done = run_baton(env={"_BATON_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "1"})
    assert done.stdout == completed
    values = run_baton(
        env={"_BATON_COMPLETE": "bash_complete", "COMP_WORDS": "baton decode --engine-kind m", "COMP_CWORD": "3"}
    )
    assert values.stdout == "plain,model\nplain,mock\n"
    script = run_baton("completion", "zsh")
    assert (script.returncode, script.stdout.splitlines()[0]) == (0, "#compdef baton")


def test_nodes_of_different_kernels_are_named() -> None:
    """By what they compute with. Nodes that do not say, such as the mock engine's, differ from nobody."""

    def view(name: str, kernel_set: str | None) -> NodeView:
        model = None if kernel_set is None else replace(MODEL, kernel_set=kernel_set)
        record = NodeRecord(
            name=NodeName(name), role=Role.PREFILL if model else Role.ROUTER, incarnation=Incarnation(1),
            endpoint="127.0.0.1:1", lifecycle=Lifecycle.READY, model=model,
        )  # fmt: skip
        return NodeView(record=record, status=None)

    alike = [view("decode-0", "amx"), view("decode-1", ""), view("prefill-0", "amx"), view("router-0", None)]
    assert kernels_note(alike) == ""
    told = "Nodes compute with different kernels (amx: decode-0, prefill-0; avx2: prefill-1). "
    assert kernels_note([*alike, view("prefill-1", "avx2")]) == told + KERNELS_DIFFER
