"""What the lines of a conversation mean, and what sampling flags become. Pure parts of `baton chat` and `generate`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Iterable

import click
import pytest
from batonpb import common_pb2, inference_pb2
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from baton.client import Answer, Message, Sampling
from cli.chat import ChatSession, Conversation, Lines, UnknownOrder, parse_line
from cli.client import answer_data, logprobs_text
from cli.sampling import sampling_of, sampling_options
from tests.support.scripted_router import Events, ScriptedClient, broken, started


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("", ("", "")),
        ("  \t", ("", "")),
        (" Where to? ", ("", "Where to?")),
        ("//usr/bin is what?", ("", "/usr/bin is what?")),
        ("/reset", ("reset", "")),
        ("/system  Be brief. ", ("system", "Be brief.")),
        ("/system", ("system", "")),
        ("/exit", ("exit", "")),
    ],
)
def test_what_a_line_means(line: str, meant: tuple[str, str]) -> None:
    """An order and its text; "" and a message."""
    assert parse_line(line) == meant


@pytest.mark.parametrize("line", ["/", "/quit", "/Reset", "/ reset", "/usr/bin is what?"])
def test_an_order_that_there_is_not(line: str) -> None:
    """Refused rather than sent: a mistyped order is no message."""
    with pytest.raises(UnknownOrder, match=r"^There is no /.*; /help lists what there is\.$"):
        parse_line(line)


@given(st.text())
def test_no_line_is_lost_or_changed(line: str) -> None:
    """What is no order comes through, but for the space around it; any message can be written with a second slash."""
    text = line.strip()
    if text and not text.startswith("/"):
        assert parse_line(line) == ("", text)
    elif text and not text.startswith("//"):
        assert parse_line("/" + text) == ("", text)


def roles(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_conversation_grows_by_what_was_answered() -> None:
    """A message that was not answered leaves no trace; a reset keeps the system message."""
    conversation = Conversation("Be brief.")
    conversation.messages("never answered")
    conversation.keep("one", "uno")
    assert roles(conversation.messages("two")) == [
        ("system", "Be brief."), ("user", "one"), ("assistant", "uno"), ("user", "two"),
    ]  # fmt: skip
    conversation.turns.clear()
    assert roles(conversation.messages("three")) == [("system", "Be brief."), ("user", "three")]
    conversation.system = ""
    assert roles(conversation.messages("four")) == [("user", "four")]


class Answers:
    """Up to half of the first message's, then Ctrl-C comes; breaks the second off; answers the third."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, str]]] = []

    async def __call__(self, request: inference_pb2.GenerateRequest) -> Events:
        self.seen.append([(message.role, message.content) for message in request.chat.messages])
        yield started()
        yield inference_pb2.GenerateEvent(tokens=inference_pb2.Tokens(ids=[5], text="half"))
        if len(self.seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        if len(self.seen) == 2:
            raise broken()
        yield inference_pb2.GenerateEvent(finished=inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP))


class ScriptedLines(Lines):
    def __init__(self, *lines: str) -> None:
        self.interactive = True
        self._lines = iter(lines)

    def next(self) -> str | None:
        return next(self._lines, None)


def test_what_was_stopped_stays_and_what_broke_off_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The part of an answer that the user has seen before Ctrl-C is in the next prompt; that of a lost connection is
    not, nor its message."""
    answers = Answers()
    with asyncio.Runner() as runner:
        session = ChatSession(runner, ScriptedClient(answers), Sampling(), model="m", router="nowhere")
        assert session.run(ScriptedLines("one", "two", "three", "four")) == 0
    stopped = [("user", "one"), ("assistant", "half")]
    assert answers.seen == [
        [("user", "one")],
        [*stopped, ("user", "two")],
        [*stopped, ("user", "three")],
        [*stopped, ("user", "three"), ("assistant", "half"), ("user", "four")],
    ]
    shown = capsys.readouterr()
    assert shown.out == "half\n" * 4
    assert shown.err == (
        "Stopped.\n"
        "error: The answer broke off. The router at nowhere:1 has closed the connection in the middle of the call. "
        "(reason PEER_UNREACHABLE) "
        "The message is left out of the conversation.\n"
    )


def parsed(*arguments: str) -> Sampling | str:
    """What a command with all sampling options gets, or the message that refuses them."""
    got: list[Sampling] = []

    @click.command()
    @sampling_options
    def command(**options: object) -> None:
        got.append(sampling_of(options))

    result = CliRunner().invoke(command, list(arguments))
    return got[0] if got else result.output.splitlines()[-1]


def test_every_sampling_flag_arrives() -> None:
    """Each field of baton.v1.Sampling has its flag but `choice`, which is `--answers`, and those for programs."""
    drawn = parsed(
        "--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1",
        "--presence-penalty", "-0.5", "--frequency-penalty", "0.25", "--logit-bias", "7=-1.5", "--logit-bias", "8=2",
        "--seed", str((1 << 64) - 1), "--max-tokens", "9", "--min-tokens", "2", "--stop", "end", "--stop", "\n",
        "--stop-token-id", "3", "--include-stop", "--ignore-eos", "--logprobs", "2",
    )  # fmt: skip
    assert isinstance(drawn, Sampling)
    message = drawn.message()
    assert {field.name for field, _ in message.ListFields()} == {
        field.name for field in inference_pb2.Sampling.DESCRIPTOR.fields
    } - {"choice", "grammar", "prompt_logprobs"}
    assert (message.presence_penalty, dict(message.logit_bias), list(message.stop)) == (
        -0.5, {7: -1.5, 8: 2.0}, ["end", "\n"],
    )  # fmt: skip
    assert (message.seed, list(message.stop_token_ids), message.logprobs) == ((1 << 64) - 1, [3], 2)


def test_without_flags_all_is_left_to_the_router() -> None:
    """Not set is another thing than 0 for a temperature or a seed."""
    drawn = parsed()
    assert isinstance(drawn, Sampling)
    message = drawn.message()
    unset = ("temperature", "top_k", "top_p", "seed", "max_tokens", "min_tokens", "logprobs", "repetition_penalty")
    assert [name for name in unset if message.HasField(name)] == []
    assert (list(message.stop), dict(message.logit_bias)) == ([], {})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--temperature", "nan"], "'nan' is no finite number"),
        (["--top-p", "-inf"], "'-inf' is no finite number"),
        (["--min-p", "x"], "'x' is not a valid float."),
        (["--top-k", "-1"], "-1 is not in the range 0<=x<=4294967295."),
        (["--seed", "18446744073709551616"], "18446744073709551616 is not in the range 0<=x<=18446744073709551615."),
        (["--stop-token-id", "4294967296"], "4294967296 is not in the range 0<=x<=4294967295."),
        (["--logit-bias", "7"], "'7' is no bias of a token id; write it like 17=-2.5"),
        (["--logit-bias", "=1"], "'=1' is no bias of a token id; write it like 17=-2.5"),
        (["--logit-bias", "-3=1"], "-3 is not in the range 0<=x<=4294967295."),
        (["--logit-bias", "4294967296=1"], "4294967296 is not in the range 0<=x<=4294967295."),
        (["--logit-bias", "3=inf"], "'inf' is no finite number"),
        (["--logit-bias", "3=1", "--logit-bias", "3=2"], "--logit-bias names token 3 more than once."),
        (["--stop", "\udcff"], "--stop is not UTF-8"),
        (["--logprobs", "21"], "21 is not in the range 0<=x<=20."),
    ],
)
def test_flags_that_are_refused_at_once(arguments: list[str], why: str) -> None:
    """Before anything is sent, in words that name the value."""
    refused = parsed(*arguments)
    assert isinstance(refused, str)
    assert refused.startswith("Error: ")
    assert refused.endswith(why)


def test_log_probabilities_are_shown() -> None:
    """As a table for people, as numbers for JSON, where minus infinity is -9999."""
    logprobs = [
        common_pb2.TokenLogprobs(logprob=math.log(0.5), top_ids=[5, 7], top_logprobs=[math.log(0.5), math.log(0.25)]),
        common_pb2.TokenLogprobs(logprob=-math.inf),
    ]
    answer = Answer(
        request_id="r",
        ids=[5, 60],
        finish="length",
        logprobs=logprobs,
    )
    assert logprobs_text(answer) == (
        "TOKEN  ID  LOGPROB   PROB  BEST\n"
        "    0   5   -0.693  50.0%  5 -0.693  7 -1.386\n"
        "    1  60     -inf   0.0%"
    )  # fmt: skip
    data = json.loads(json.dumps(answer_data(answer), allow_nan=False))["logprobs"]
    assert data == [
        {
            "id": 5,
            "logprob": math.log(0.5),
            "top": [{"id": 5, "logprob": math.log(0.5)}, {"id": 7, "logprob": math.log(0.25)}],
        },
        {"id": 60, "logprob": -9999.0, "top": []},
    ]
