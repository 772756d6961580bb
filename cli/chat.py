"""`baton chat`: a conversation in the terminal, or one that a script pipes in."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

import click
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from baton.rpc import ChannelLimits, Channels
from cli.client import (
    Answer,
    AnswerBuilder,
    InferenceClient,
    StreamPrinter,
    answer_data,
    answer_timeout_option,
    logprobs_text,
    no_router,
    router_option,
    stats_line,
    stats_text,
)
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import Output, output_option
from cli.parameters import check_utf8, not_utf8
from cli.sampling import sampling_choice, sampling_options
from cli.signals import StopSignals

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""One message; four times as many characters as routers take by default."""
PROMPT: Final = "> "


class LineSource(Protocol):
    """Where messages come from."""

    interactive: bool
    """A user sits there."""

    def next(self) -> str | None:
        """The next line without its end, None at the end of input. Blocks. Raises KeyboardInterrupt, UsageError."""


class TypedLines:
    """From a terminal, with line editing and earlier lines where Python has readline."""

    interactive = True

    def __init__(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  (`input` uses it once it is there)

    def next(self) -> str | None:
        try:
            return input(PROMPT)
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise not_utf8("the line") from None


class PipedLines:
    """From stdin when it or the output is not a terminal: reads lines only and shows no prompt."""

    def __init__(self, *, interactive: bool) -> None:
        self.interactive = interactive
        self._read = 0

    def next(self) -> str | None:
        assert sys.stdin is not None
        raw = sys.stdin.buffer.readline(LINE_BYTES_MAX + 1)
        if not raw:
            return None
        self._read += 1
        if len(raw) > LINE_BYTES_MAX:
            raise click.UsageError(f"line {self._read} of stdin is longer than {LINE_BYTES_MAX} bytes.")
        try:
            return raw.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise not_utf8(f"line {self._read} of stdin") from None


def open_lines() -> LineSource:
    """Raises UsageError where stdin is closed."""
    if sys.stdin is None:
        raise click.UsageError("stdin is closed; messages were to come from there.")
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TypedLines()
    return PipedLines(interactive=sys.stdin.isatty())


MARK: Final = "/"
"""A line that begins with it is an order to the command; twice, and it is a message that begins with it."""


class Order(Enum):
    """What a line orders."""

    HELP = "help"
    RESET = "reset"
    SYSTEM = "system"
    STATS = "stats"
    EXIT = "exit"


ORDERS_HELP: Final = (
    "/reset        begin again; the system message stays\n"
    "/system TEXT  set the system message; without TEXT there is none\n"
    "/stats        what happened to the last request\n"
    "/help         this list\n"
    "/exit         end (or Ctrl-D)\n"
    "//...         a message that begins with /\n"
    "Ctrl-C stops an answer and keeps the conversation; a second one ends it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of input: an order with its text, or a message to the model (`order` None)."""

    order: Order | None
    text: str


class UnknownOrder(ValueError):
    """The line orders something that there is not; the message says so."""


def parse_line(line: str) -> Line | None:
    """None for a line with nothing in it. Raises UnknownOrder."""
    text = line.strip()
    if not text:
        return None
    if text.startswith(MARK * 2):
        return Line(order=None, text=text.removeprefix(MARK))
    if not text.startswith(MARK):
        return Line(order=None, text=text)
    word, _, rest = text.removeprefix(MARK).partition(" ")
    if word not in {order.value for order in Order}:
        raise UnknownOrder(f"There is no {MARK}{word[:40]}; {MARK}help lists what there is.")
    return Line(order=Order(word), text=rest.strip())


class Conversation:
    """The system message, and the turns that were answered. Bounded by the model's context, which the router checks."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """Empty: none."""
        self._turns: list[tuple[str, str]] = []

    def __len__(self) -> int:
        """Turns."""
        return len(self._turns)

    def messages(self, said: str) -> inference_pb2.Chat:
        """All of it, with `said` as the user's next message."""
        chat = inference_pb2.Chat()
        if self.system:
            chat.messages.add(role="system", content=self.system)
        for user, assistant in self._turns:
            chat.messages.add(role="user", content=user)
            chat.messages.add(role="assistant", content=assistant)
        chat.messages.add(role="user", content=said)
        return chat

    def keep(self, said: str, answer: str) -> None:
        """The turn belongs to the conversation from now on."""
        self._turns.append((said, answer))

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns.clear()


_LEFT_OUT: Final = "The message is left out of the conversation."
_HINTS: Final = {
    Reason.PROMPT_TOO_LONG: "/reset begins a new conversation.",
    Reason.NO_CHAT_TEMPLATE: "`baton generate` sends plain prompts.",
}


@click.command()
@router_option
@click.option("--system", default="", metavar="TEXT", help="A system message before the conversation.")
@sampling_options
@click.option("--model", help="Refuse answers of any other model.")
@answer_timeout_option
@click.option("--stats", is_flag=True, help="Say on stderr what happened to each request.")
@output_option
def chat(
    router: str, system: str, model: str | None, timeout_s: float, stats: bool, output: str, **sampling: Any
) -> int:
    """Talk with the model: each line is a message, each answer comes as it is written.

    The router makes the prompt with the model's chat template; what it has in common with the last one is in the prefix
    cache. Lines that begin with / are orders: /help lists them. Ctrl-C stops an answer, and what was written of
    it stays in the conversation; a second Ctrl-C, or Ctrl-D, ends. From a pipe each line is a message too; the
    exit status is 1 if one of them was not answered. With -o json each turn is an object on a line of its own.

    \b
    Example:
      baton chat --system "Be brief." --temperature 0.7 --stats
      printf 'Who are you?\\nSince when?\\n' | baton chat --max-tokens 32 -o json
    """
    for text, what in ((router, "--router"), (system, "--system"), (model or "", "--model")):
        check_utf8(text, what)
    template = inference_pb2.GenerateRequest(sampling=sampling_choice(sampling).to_proto(), model=model)
    lines = open_lines()
    # One loop for all turns, at rest while a line is read: the terminal and Ctrl-C then are the line editor's alone.
    with asyncio.Runner() as runner:
        channels = runner.run(_open_channels())
        try:
            client = InferenceClient(router, channels=channels, timeout_s=timeout_s)
            screen = Screen(as_json=Output(output) is Output.JSON, stats=stats)
            session = ChatSession(
                runner, client, Conversation(system.strip()), screen, template=template, router=router
            )
            return session.run(lines)
        finally:
            runner.run(channels.close())


async def _open_channels() -> Channels:
    return Channels(limits=ChannelLimits())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """How a message was answered: wholly, up to a signal, or not."""

    text: str = ""
    taken: bool = True
    """The router has taken the request."""
    answer: Answer | None = None
    stopped_by: signal.Signals | None = None
    error: BatonError | None = None


class Screen:
    """Where turns are shown: text on stdout as it comes and remarks on stderr, or JSON lines on stdout."""

    def __init__(self, *, as_json: bool, stats: bool) -> None:
        self._as_json = as_json
        self._stats = stats

    def printer(self) -> StreamPrinter:
        return StreamPrinter(io.StringIO() if self._as_json else sys.stdout, as_ids=False, as_text=True)

    def remark(self, text: str) -> None:
        click.echo(text, err=True)

    def show(self, number: int, said: str, turn: _Turn) -> None:
        """What is left to show of a turn, the number `number`."""
        if self._as_json:
            click.echo(json.dumps({"turn": number, "user": said, **_turn_data(turn)}, ensure_ascii=False))
        elif turn.error is not None:
            self.remark(_error_text(turn))
        elif turn.answer is None:
            self.remark("Stopped." if turn.text else f"Stopped before it began. {_LEFT_OUT}")
        else:
            self._show_answer(number, turn.answer)

    def _show_answer(self, number: int, answer: Answer) -> None:
        if not answer.text:
            self.remark("(An answer without text.)")
        if answer.logprobs:
            self.remark(logprobs_text(answer))
        if self._stats:
            self.remark(f"turn {number}: {stats_line(answer)}")


class ChatSession:
    """Reads lines and has them answered, until the input ends or the user ends it."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: InferenceClient,
        conversation: Conversation,
        screen: Screen,
        *,
        template: inference_pb2.GenerateRequest,
        router: str,
    ) -> None:
        """`template` is every request without its messages; `router` is what errors name."""
        self._runner = runner
        self._client = client
        self._conversation = conversation
        self._screen = screen
        self._template = template
        self._router = router
        self._sent = 0
        """Messages so far, those that were not answered too."""
        self._reached = False
        """The router has answered something."""
        self._failed = False
        self._last: Answer | None = None

    def run(self, lines: LineSource) -> int:
        """The exit status. Raises BatonError where no router answers the first message, UsageError for input that is no
        text."""
        interrupted = False
        while True:
            try:
                line = lines.next()
            except KeyboardInterrupt:
                self._screen.remark("")
                if interrupted or not lines.interactive:
                    return EXIT_INTERRUPTED
                interrupted = True
                self._screen.remark("Ctrl-C again, or Ctrl-D, ends the conversation.")
                continue
            if line is None:
                return EXIT_ERROR if self._failed and not lines.interactive else 0
            status, stopped = self._take(line, lines)
            if status is not None:
                return status
            interrupted = stopped

    def _take(self, line: str, lines: LineSource) -> tuple[int | None, bool]:
        """The exit status where the line ends it all, and whether Ctrl-C has stopped its answer."""
        try:
            check_utf8(line, "the line")
            parsed = parse_line(line)
        except (UnknownOrder, click.UsageError) as error:
            self._failed = True
            self._screen.remark(str(error))
            return None, False
        if parsed is None:
            return None, False
        if parsed.order is not None:
            return self._obey(parsed.order, parsed.text, lines), False
        turn = self._ask(parsed.text)
        if turn.stopped_by is None:
            return None, False
        ends = turn.stopped_by is not signal.SIGINT or not lines.interactive
        return (128 + turn.stopped_by if ends else None), True

    def _obey(self, order: Order, text: str, lines: LineSource) -> int | None:
        """The exit status where it ends the conversation."""
        tell = self._screen.remark
        if order is Order.EXIT:
            return EXIT_ERROR if self._failed and not lines.interactive else 0
        if order is Order.HELP:
            tell(ORDERS_HELP)
        elif order is Order.RESET:
            self._conversation.reset()
            tell("A new conversation.")
        elif order is Order.SYSTEM:
            self._conversation.system = text
            tell("The system message is set." if text else "There is no system message now.")
        elif order is Order.STATS:
            tell(stats_text(self._last) if self._last is not None else "Nothing has been answered yet.")
        return None

    def _ask(self, said: str) -> _Turn:
        """One turn. Raises BatonError where no router has ever answered."""
        self._sent += 1
        turn = self._runner.run(self._answer(said))
        if turn.error is not None:
            said_for_all = no_router(turn.error, self._router)
            if said_for_all is not turn.error and not turn.taken and not self._reached:
                raise said_for_all
            self._failed = True
        self._reached = True
        if turn.answer is not None:
            self._last = turn.answer
        # What the user has seen of an answer that was stopped is part of the conversation; a broken one is not.
        if turn.answer is not None or (turn.error is None and turn.text):
            self._conversation.keep(said, turn.text)
        self._screen.show(self._sent, said, turn)
        return turn

    async def _answer(self, said: str) -> _Turn:
        request = inference_pb2.GenerateRequest(chat=self._conversation.messages(said))
        request.MergeFrom(self._template)
        printer = self._screen.printer()
        builder = AnswerBuilder()
        with StopSignals() as signals:
            try:
                if await signals.unless_stopped(self._listen(request, builder, printer)):
                    return _Turn(text=builder.text, answer=builder.answer())
                return _Turn(text=builder.text, stopped_by=signals.received)
            except BatonError as error:
                return _Turn(text=builder.text, taken=bool(builder.request_id), error=error)
            finally:
                printer.end()

    async def _listen(
        self, request: inference_pb2.GenerateRequest, builder: AnswerBuilder, printer: StreamPrinter
    ) -> None:
        async with aclosing(self._client.events(request)) as events:
            async for event in events:
                builder.push(event)
                if event.HasField("tokens"):
                    printer.show(event.tokens)


def _turn_data(turn: _Turn) -> dict[str, object]:
    if turn.error is not None:
        error = turn.error
        facts = {"reason": error.reason.value, "message": error.message, "retry_after_ms": error.retry_after_ms}
        return {"error": facts}
    if turn.answer is None:
        return {"finish": "cancelled", "text": turn.text}
    return answer_data(turn.answer)


def _error_text(turn: _Turn) -> str:
    """What went wrong, what became of the message, what may help."""
    error = turn.error
    assert error is not None
    when = "The answer broke off. " if turn.taken else ""
    retry = f" Try again in {error.retry_after_ms} ms." if error.retry_after_ms is not None else ""
    hint = f" {_HINTS[error.reason]}" if error.reason in _HINTS else ""
    return f"error: {when}{error.message} (reason {error.reason.name}){retry} {_LEFT_OUT}{hint}"
