"""`baton generate`: one prompt, one answer or several."""

from __future__ import annotations

import asyncio
import io
import secrets
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from baton.client import Answer, AsyncClient, AsyncStream, BatonError, Piece, Prompt
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
from cli.invocation import EXIT_INTERRUPTED
from cli.output import JSON, output_option, print_json
from cli.parameters import IntegerList, check_utf8, read_stdin
from cli.sampling import sampling_of, sampling_options
from cli.signals import StopSignals
from router.openai import CHOICES_MAX


@click.command()
@click.argument("prompt", required=False)
@router_option
@api_key_option
@click.option("--token-ids", type=IntegerList(), help="The prompt as token ids, in place of text.")
@sampling_options
@click.option(
    "-n", "--answers", type=click.IntRange(1, CHOICES_MAX), default=1, show_default=True,
    help="Answers to the prompt, each drawn anew.",
)  # fmt: skip
@click.option("--model", help="Refuse an answer of any other model.")
@answer_timeout_option
@click.option("--ids", is_flag=True, help="Print token ids even where there is text.")
@click.option("--stats", is_flag=True, help="Say on stderr what happened to the request.")
@click.option("--no-stream", is_flag=True, help="Use the unary call: the answer comes at once.")
@output_option
def generate(
    prompt: str | None,
    router: str,
    api_key_file: Path | None,
    token_ids: tuple[int, ...] | None,
    answers: int,
    model: str | None,
    timeout_s: float,
    ids: bool,
    stats: bool,
    no_stream: bool,
    output: str,
    **sampling: Any,
) -> int:
    """Send PROMPT to a cluster and print the answer as it comes; `-` reads the prompt from stdin.

    Prints text, or token ids where the router has no tokenizer; with -o json one object with both and the statistics,
    when the answer is complete (with --answers above 1 a list of such objects). Statistics and log-probabilities go to
    stderr. Ctrl-C cancels the request.

    \b
    Example:
      baton generate "Once upon a time" --max-tokens 32 --temperature 0 --stats
      baton generate --token-ids 5,6,7,8 --seed 7 --no-stream
      baton generate "Once upon a time" -n 3 --top-p 0.9 --stop "." --include-stop -o json
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("Give either a PROMPT or --token-ids.")
    if answers > 1 and no_stream:
        raise click.UsageError("--no-stream is for one answer; leave it out, or --answers.")
    for text, what in ((router, "--router"), (model or "", "--model"), (prompt or "", "the prompt")):
        check_utf8(text, what)
    if prompt == "-":
        prompt = read_stdin("the prompt")
    asked: Prompt = (prompt or "") if token_ids is None else token_ids
    drawn = sampling_of(sampling)
    if answers > 1 and drawn.seed is None:
        drawn = replace(drawn, seed=secrets.randbits(64))
    client = open_client(router, timeout_s=timeout_s, api_key=read_api_key(api_key_file))

    def ask(choice: int) -> AsyncStream:
        return client.stream(asked, sampling=replace(drawn, choice=choice), model=model)

    async def whole() -> list[Answer]:
        answer = await client.generate(asked, sampling=drawn, model=model, resumable=False)
        printer.show(Piece(answer.ids, answer.text))
        printer.complete(0, answer)
        return [answer]

    as_json = output == JSON
    printer = AnswerPrinter(
        io.StringIO() if as_json else sys.stdout,
        as_ids=True if ids else False if token_ids is None else None,
        answers=answers,
        stats=stats and not as_json,
    )
    done = asyncio.run(_run(client, whole() if no_stream else all_answers(ask, printer), printer, router))
    if done is None:
        click.echo("Cancelled.", err=True)
        return EXIT_INTERRUPTED
    if as_json:
        data = [answer_data(answer) for answer in done]
        print_json(data if answers > 1 else data[0])
    return 0


class AnswerPrinter:
    """Shows one answer as it comes; of several each when it is complete, in order, under its number."""

    def __init__(self, stream: TextIO, *, as_ids: bool | None, answers: int, stats: bool) -> None:
        self.answers = answers
        self.live = StreamPrinter(stream, as_ids=as_ids)
        """Shows the only answer."""
        self._stream = stream
        self._as_ids = as_ids
        self._stats = stats
        self._waiting: dict[int, Answer] = {}
        self._next = 0

    def show(self, tokens: Piece) -> None:
        if self.answers == 1:
            self.live.show(tokens)

    def complete(self, index: int, answer: Answer) -> None:
        self._waiting[index] = answer
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            printer = self.live
            if self.answers > 1:
                print(f"--- {self._next} of {self.answers}", file=self._stream)
                printer = StreamPrinter(self._stream, as_ids=self._as_ids)
                printer.show(Piece(ready.ids, ready.text))
            printer.end()
            if ready.logprobs and self._stream is sys.stdout:
                click.echo(logprobs_text(ready), err=True)
            if self._stats:
                click.echo(stats_text(ready), err=True)


Ask = Callable[[int], AsyncStream]
"""One answer, by its number."""


async def _run(
    client: AsyncClient, work: Coroutine[Any, Any, list[Answer]], printer: AnswerPrinter, router: str
) -> list[Answer] | None:
    """None when the user has cancelled. Raises BatonError."""
    async with client:
        working = asyncio.ensure_future(work)
        with StopSignals() as signals:
            try:
                if await signals.unless_stopped(working):
                    return working.result()
                printer.live.end()
                return None
            except BatonError as error:
                printer.live.end()
                if not printer.live.empty:
                    raise error.reworded(f"The answer broke off. {error.message}") from error
                if is_unreached(error):
                    raise no_router(router) from error
                raise


async def all_answers(ask: Ask, printer: AnswerPrinter) -> list[Answer]:
    """The first one goes ahead until it has its second token: its prompt is in the caches before the others begin.
    Raises BatonError, when all have ended."""
    ahead = asyncio.Event()

    async def answer(choice: int) -> Answer:
        if choice > 0:
            await ahead.wait()
        async with ask(choice) as pieces:
            async for piece in pieces:
                if piece.first_index > 0:
                    ahead.set()
                printer.show(piece)
        ahead.set()
        printer.complete(choice, pieces.answer)
        return pieces.answer

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(choice)) for choice in range(printer.answers)]
    except* BatonError as failed:
        failure = failed.exceptions[0]
    if failure is not None:
        raise failure
    return [task.result() for task in tasks]
