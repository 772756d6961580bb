"""`baton generate`: one prompt, one answer or several."""

from __future__ import annotations

import asyncio
import io
import secrets
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any, TextIO

import click
from batonpb import inference_pb2

from baton.errors import BatonError
from cli.client import (
    Answer,
    AnswerBuilder,
    InferenceClient,
    StreamPrinter,
    answer_data,
    answer_timeout_option,
    api_key_option,
    is_unreached,
    logprobs_text,
    no_router,
    open_channels,
    read_api_key,
    router_option,
    stats_text,
)
from cli.invocation import EXIT_INTERRUPTED
from cli.output import JSON, output_option, print_json
from cli.parameters import IntegerList, check_utf8, read_stdin
from cli.sampling import sampling_message, sampling_options
from cli.signals import StopSignals
from router.choices import Answer as Events
from router.choices import run_choices
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
      baton generate "the sea in the evening" --max-tokens 32 --temperature 0 --stats
      baton generate --token-ids 5,6,7,8 --seed 7 --no-stream
      baton generate "Once upon a time" -n 3 --top-p 0.9 --stop "." --include-stop -o json
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("Give either a PROMPT or --token-ids.")
    if answers > 1 and no_stream:
        raise click.UsageError("--no-stream is for one answer; leave it out, or --answers.")
    for text, what in ((router, "--router"), (model or "", "--model"), (prompt or "", "the prompt")):
        check_utf8(text, what)
    request = inference_pb2.GenerateRequest(sampling=sampling_message(sampling), model=model)
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    else:
        request.text = read_stdin("the prompt") if prompt == "-" else str(prompt)
    as_json = output == JSON
    printer = AnswerPrinter(
        io.StringIO() if as_json else sys.stdout,
        as_ids=True if ids else False if token_ids is None else None,
        answers=answers,
        stats=stats and not as_json,
    )
    done = asyncio.run(_run(request, printer, router, timeout_s, api_key=read_api_key(api_key_file), unary=no_stream))
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

    def show(self, tokens: inference_pb2.Tokens) -> None:
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
                printer.show(inference_pb2.Tokens(ids=ready.ids, text=ready.text))
            printer.end()
            if ready.logprobs and self._stream is sys.stdout:
                click.echo(logprobs_text(ready), err=True)
            if self._stats:
                click.echo(stats_text(ready), err=True)


async def _run(
    request: inference_pb2.GenerateRequest,
    printer: AnswerPrinter,
    router: str,
    timeout_s: float,
    *,
    api_key: str | None,
    unary: bool,
) -> list[Answer] | None:
    """None when the user has cancelled. Raises BatonError."""
    async with open_channels() as channels:
        client = InferenceClient(router, channels=channels, timeout_s=timeout_s, api_key=api_key)
        working = asyncio.ensure_future((_unary if unary else _stream)(client, request, printer))
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
                if is_unreached(error, router):
                    raise no_router(router) from error
                raise


async def _unary(
    client: InferenceClient, request: inference_pb2.GenerateRequest, printer: AnswerPrinter
) -> list[Answer]:
    answer = await client.generate_unary(request)
    printer.show(inference_pb2.Tokens(ids=answer.ids, text=answer.text))
    printer.complete(0, answer)
    return [answer]


async def _stream(
    client: InferenceClient, request: inference_pb2.GenerateRequest, printer: AnswerPrinter
) -> list[Answer]:
    """All answers, from one seed; the first one's prompt is in the caches before the others begin."""
    if printer.answers > 1 and not request.sampling.HasField("seed"):
        request.sampling.seed = secrets.randbits(64)

    def ask(message: inference_pb2.GenerateRequest, choice: int) -> Events:
        own = inference_pb2.GenerateRequest()
        own.CopyFrom(message)
        own.sampling.choice = choice
        return client.events(own)

    builders = [AnswerBuilder() for _ in range(printer.answers)]
    async with aclosing(run_choices(ask, [request], printer.answers)) as events:
        async for index, event in events:
            builders[index].push(event)
            if event.HasField("tokens"):
                printer.show(event.tokens)
            elif event.HasField("finished"):
                printer.complete(index, builders[index].answer)
    assert all(builder.complete for builder in builders), "the stream ended without an end of the answer"
    return [builder.answer for builder in builders]
