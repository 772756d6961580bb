"""`baton chat`: a conversation in the terminal, or one that a script pipes in."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from baton.client import Answer, AsyncClient, BatonError, Message, Reason, Sampling
from cli.client import (
    StreamPrinter,
    answer_data,
    answer_timeout_option,
    api_key_option,
    is_unreached,
    logprobs_text,
    no_router,
    open_client,
    read_api_key,
    router_option,
    stats_text,
)
from cli.invocation import EXIT_ERROR, EXIT_INTERRUPTED
from cli.output import JSON, output_option
from cli.parameters import check_utf8, not_utf8
from cli.sampling import sampling_of, sampling_options
from cli.signals import StopSignals

LINE_BYTES_MAX: Final = 8 * 1024 * 1024
"""One message; four times as many characters as routers take by default."""


class Lines:
    """Messages: from a terminal with line editing, where Python has readline; else from stdin, without a prompt."""

    def __init__(self) -> None:
        """Raises UsageError where stdin is closed."""
        if sys.stdin is None:
            raise click.UsageError("stdin is closed; messages were to come from there.")
        self.interactive = sys.stdin.isatty()
        """A user sits there."""
        self._edited = self.interactive and sys.stdout.isatty()
        self._read = 0
        if self._edited:
            with suppress(ImportError):
                import readline  # noqa: F401  (`input` uses it once it is there)

    def next(self) -> str | None:
        """The next line without its end, None at the end of input. Blocks. Raises KeyboardInterrupt, UsageError."""
        self._read += 1
        try:
            if self._edited:
                return input("> ")
            raw = sys.stdin.buffer.readline(LINE_BYTES_MAX + 1)
            if len(raw) > LINE_BYTES_MAX:
                raise click.UsageError(f"line {self._read} of stdin is longer than {LINE_BYTES_MAX} bytes.")
            return raw.decode().rstrip("\r\n") if raw else None
        except EOFError:
            return None
        except UnicodeDecodeError:
            raise not_utf8(f"line {self._read} of stdin") from None


ORDERS: Final = ("reset", "system", "stats", "help", "exit")
ORDERS_HELP: Final = (
    "/reset        begin again; the system message stays\n"
    "/system TEXT  set the system message; without TEXT there is none\n"
    "/stats        what happened to the last request\n"
    "/help         this list\n"
    "/exit         end (or Ctrl-D)\n"
    "//...         a message that begins with /\n"
    "Ctrl-C stops an answer and keeps the conversation; a second one ends it."
)


class UnknownOrder(ValueError):
    """The line orders something that there is not; the message says so."""


def parse_line(line: str) -> tuple[str, str]:
    """An order and its text, or "" and a message to the model; the message is empty for an empty line. Raises
    UnknownOrder."""
    text = line.strip()
    if text.startswith("//") or not text.startswith("/"):
        return "", text.removeprefix("/")
    order, _, rest = text.removeprefix("/").partition(" ")
    if order not in ORDERS:
        raise UnknownOrder(f"There is no /{order[:40]}; /help lists what there is.")
    return order, rest.strip()


class Conversation:
    """The system message, and the turns that were answered. Bounded by the model's context, which the router checks."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """Empty: none."""
        self.turns: list[Message] = []

    def messages(self, said: str) -> list[Message]:
        """All of it, with `said` as the user's next message."""
        system = [Message(role="system", content=self.system)] if self.system else []
        return [*system, *self.turns, Message(role="user", content=said)]

    def keep(self, said: str, answer: str) -> None:
        """The turn belongs to the conversation from now on."""
        self.turns += [Message(role="user", content=said), Message(role="assistant", content=answer)]


@click.command()
@router_option
@api_key_option
@click.option("--system", default="", metavar="TEXT", help="A system message before the conversation.")
@sampling_options
@click.option("--model", help="Refuse answers of any other model.")
@answer_timeout_option
@click.option("--stats", is_flag=True, help="Say on stderr what happened to each request.")
@output_option
def chat(
    router: str,
    api_key_file: Path | None,
    system: str,
    model: str | None,
    timeout_s: float,
    stats: bool,
    output: str,
    **sampling: Any,
) -> int:
    """Talk with the model: each line is a message, each answer comes as it is written.

    The router makes the prompt with the model's chat template; the part that it shares with the last prompt is in the
    prefix cache. Lines that begin with / are orders: /help lists them. Ctrl-C stops an answer, and what was written of
    it stays in the conversation; a second Ctrl-C, or Ctrl-D, ends. From a pipe each line is a message too; the
    exit status is 1 if one of them was not answered. With -o json each turn is an object on a line of its own.

    \b
    Example:
      baton chat --system "Be brief." --temperature 0.7 --stats
      printf 'Who are you?\\nSince when?\\n' | baton chat --max-tokens 32 -o json
    """
    for text, what in ((router, "--router"), (system, "--system"), (model or "", "--model")):
        check_utf8(text, what)
    drawn = sampling_of(sampling)
    lines, api_key = Lines(), read_api_key(api_key_file)
    # One loop for all turns, at rest while a line is read: the terminal and Ctrl-C then are the line editor's alone.
    with asyncio.Runner() as runner:
        client = open_client(router, timeout_s=timeout_s, api_key=api_key)
        try:
            session = ChatSession(
                runner, client, drawn, model=model, router=router, as_json=output == JSON, stats=stats
            )
            session.conversation.system = system.strip()
            return session.run(lines)
        finally:
            runner.run(client.close())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """How a message was answered: wholly, up to a signal, or up to an error."""

    answer: Answer
    """What there is of it; without a request id where the router has not taken the request."""
    stopped_by: signal.Signals | None = None
    error: BatonError | None = None

    @property
    def whole(self) -> bool:
        return self.stopped_by is None and self.error is None


class ChatSession:
    """Reads lines and has them answered, until the input ends or the user ends it.

    Shows text on stdout as it comes and remarks on stderr, or JSON lines on stdout.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        client: AsyncClient,
        sampling: Sampling,
        *,
        model: str | None = None,
        router: str,
        as_json: bool = False,
        stats: bool = False,
    ) -> None:
        """`router` is what errors name."""
        self.conversation = Conversation()
        self._runner = runner
        self._client = client
        self._sampling = sampling
        self._model = model
        self._router = router
        self._as_json = as_json
        self._stats = stats
        self._sent = 0
        """Messages so far, those that were not answered too."""
        self._reached = False
        """The router has answered something."""
        self._failed = False
        self._last: Answer | None = None

    def run(self, lines: Lines) -> int:
        """The exit status. Raises BatonError where no router answers the first message, UsageError for input that is no
        text."""
        interrupted = False
        while True:
            try:
                line = lines.next()
            except KeyboardInterrupt:
                _remark("")
                if interrupted or not lines.interactive:
                    return EXIT_INTERRUPTED
                interrupted = True
                _remark("Ctrl-C again, or Ctrl-D, ends the conversation.")
                continue
            interrupted = False
            try:
                order, text = ("exit", "") if line is None else _parse(line)
            except (UnknownOrder, click.UsageError) as error:
                self._failed = True
                _remark(str(error))
                continue
            if order == "exit":
                return EXIT_ERROR if self._failed and not lines.interactive else 0
            if order:
                self._obey(order, text)
            elif text:
                stopped_by = self._ask(text).stopped_by
                if stopped_by is not None and (stopped_by is not signal.SIGINT or not lines.interactive):
                    return 128 + stopped_by
                interrupted = stopped_by is not None

    def _obey(self, order: str, text: str) -> None:
        if order == "help":
            _remark(ORDERS_HELP)
        elif order == "reset":
            self.conversation.turns.clear()
            _remark("A new conversation.")
        elif order == "system":
            self.conversation.system = text
            _remark("The system message is set." if text else "There is no system message now.")
        else:
            _remark(stats_text(self._last) if self._last is not None else "Nothing has been answered yet.")

    def _ask(self, said: str) -> _Turn:
        """One turn. Raises BatonError where no router has ever answered."""
        self._sent += 1
        turn = self._runner.run(self._answer(said))
        if turn.error is not None:
            if is_unreached(turn.error) and not turn.answer.request_id and not self._reached:
                raise no_router(self._router)
            self._failed = True
        self._reached = True
        if turn.whole:
            self._last = turn.answer
        # What the user has seen of an answer that was stopped is part of the conversation; a broken one is not.
        if turn.whole or (turn.error is None and turn.answer.text):
            self.conversation.keep(said, turn.answer.text)
        if self._as_json:
            click.echo(json.dumps({"turn": self._sent, "user": said, **_turn_data(turn)}, ensure_ascii=False))
        else:
            self._show(turn)
        return turn

    async def _answer(self, said: str) -> _Turn:
        messages = self.conversation.messages(said)
        pieces = self._client.stream(messages, sampling=self._sampling, model=self._model)
        printer = StreamPrinter(io.StringIO() if self._as_json else sys.stdout, as_ids=False)

        async def show() -> None:
            async with pieces:
                async for piece in pieces:
                    printer.show(piece)

        with StopSignals() as signals:
            try:
                whole = await signals.unless_stopped(show())
                return _Turn(answer=pieces.answer, stopped_by=None if whole else signals.received)
            except BatonError as error:
                return _Turn(answer=pieces.answer, error=error)
            finally:
                printer.end()
                await self._client.settle()

    def _show(self, turn: _Turn) -> None:
        """What is left to show of a turn whose text is on the screen."""
        answer = turn.answer
        if turn.error is not None:
            _remark(_error_text(turn.error, taken=bool(answer.request_id)))
        elif turn.stopped_by is not None:
            _remark("Stopped." if answer.text else f"Stopped before it began. {_LEFT_OUT}")
        else:
            if not answer.text:
                _remark("(An answer without text.)")
            if answer.logprobs:
                _remark(logprobs_text(answer))
            if self._stats:
                _remark(f"turn {self._sent}: {_stats_line(answer)}")


def _parse(line: str) -> tuple[str, str]:
    check_utf8(line, "the line")
    return parse_line(line)


def _remark(text: str) -> None:
    click.echo(text, err=True)


def _stats_line(answer: Answer) -> str:
    stats = answer.stats
    return (
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_tokens_cached} cached; answer {stats.output_tokens} tokens"
        f"; TTFT {stats.ttft_ms:.1f} ms, mean ITL {stats.itl_mean_ms:.1f} ms"
    )


def _turn_data(turn: _Turn) -> dict[str, object]:
    if turn.error is not None:
        error = turn.error
        facts = {"reason": error.reason.value, "message": error.message, "retry_after_ms": error.retry_after_ms}
        return {"error": facts}
    if turn.stopped_by is not None:
        return {"finish": "cancelled", "text": turn.answer.text}
    return answer_data(turn.answer)


_LEFT_OUT: Final = "The message is left out of the conversation."
_HINTS: Final = {
    Reason.PROMPT_TOO_LONG: " /reset begins a new conversation.",
    Reason.NO_CHAT_TEMPLATE: " `baton generate` sends plain prompts.",
}


def _error_text(error: BatonError, *, taken: bool) -> str:
    """What went wrong, what became of the message, what may help."""
    when = "The answer broke off. " if taken else ""
    retry = f" Try again in {error.retry_after_ms} ms." if error.retry_after_ms is not None else ""
    hint = _HINTS.get(error.reason, "")
    return f"error: {when}{error.message} (reason {error.reason.name}){retry} {_LEFT_OUT}{hint}"
