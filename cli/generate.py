"""`baton generate`: one prompt, one answer."""

from __future__ import annotations

import asyncio
import io
import math
import sys
from typing import Any, Final, TextIO

import click
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason
from baton.rpc_client import ChannelLimits, Channels
from cli.client import Answer, InferenceClient, SamplingChoice
from cli.invocation import EXIT_INTERRUPTED
from cli.output import Output, output_option, print_json
from cli.signals import StopSignals

HELD_TOKENS_MAX: Final = 4
"""Tokens without text that are held back before an answer counts as one without text: a character of UTF-8 has at most
four bytes, so a tokenizer shows something by then."""

TIMEOUT_S_MAX: Final = 86_400.0


class Seconds(click.FloatRange):
    """A time above 0 and up to TIMEOUT_S_MAX."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=TIMEOUT_S_MAX)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):  # which is in no range and outside of none
            self.fail(f"'{value}' is no time", param, ctx)
        return seconds


class IntegerList(click.ParamType[tuple[int, ...]]):
    """Whole numbers from 0 up, with commas between them."""

    name = "1,2,3"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}' is no list of numbers; write it like 1,2,3", param, ctx)
        if any(number < 0 or number >= 1 << 32 for number in numbers):
            self.fail(f"'{value}' has a number that is no token id (0 to {(1 << 32) - 1})", param, ctx)
        return numbers


class StreamPrinter:
    """Writes an answer as it comes: its text, or its ids where there is no text."""

    def __init__(self, stream: TextIO, *, as_ids: bool, as_text: bool) -> None:
        """Neither `as_ids` nor `as_text`: decide by the first tokens."""
        assert not (as_ids and as_text)
        self._stream = stream
        self._as_ids: bool | None = True if as_ids else False if as_text else None
        self._held: list[int] = []
        self._ids_written = 0
        self.empty = True
        """Nothing has been written so far."""

    def show(self, tokens: inference_pb2.Tokens) -> None:
        if self._as_ids is None:
            self._held += tokens.ids
            if not tokens.text and len(self._held) < HELD_TOKENS_MAX:
                return
            self._as_ids = not tokens.text
            self._write(self._held, tokens.text)
        else:
            self._write(list(tokens.ids), tokens.text)

    def end(self) -> None:
        """The answer is complete, or will never be."""
        if self._as_ids is None:
            self._as_ids = True
            self._write(self._held, "")
        if not self.empty:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, ids: list[int], text: str) -> None:
        if self._as_ids:
            text = "".join(f"{' ' if self._ids_written + i else ''}{token}" for i, token in enumerate(ids))
            self._ids_written += len(ids)
        if text:
            self.empty = False
            self._stream.write(text)
            self._stream.flush()


@click.command()
@click.argument("prompt", required=False)
@click.option("--router", default="127.0.0.1:7000", show_default=True, metavar="HOST:PORT", help="Where the router is.")
@click.option("--token-ids", type=IntegerList(), help="The prompt as token ids, in place of text.")
@click.option("--max-tokens", type=int, help="Tokens of the answer, at most.  [default: the router's]")
@click.option("--temperature", type=float, help="0 always takes the best token.  [default: 1]")
@click.option("--top-k", type=int, help="Draw from the K best tokens only; 0 is off.  [default: 0]")
@click.option("--top-p", type=float, help="Draw from the best tokens of this total probability.  [default: 1]")
@click.option("--seed", type=int, help="The same seed gives the same answer.  [default: random]")
@click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token; repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token.")
@click.option("--model", help="Refuse an answer of any other model.")
@click.option(
    "--timeout", "timeout_s", type=Seconds(), default=300.0, show_default=True, metavar="SECONDS",
    help="How long the whole answer may take.",
)  # fmt: skip
@click.option("--ids", is_flag=True, help="Print token ids even where there is text.")
@click.option("--stats", is_flag=True, help="Say on stderr what happened to the request.")
@click.option("--no-stream", is_flag=True, help="Use the unary call: the answer comes at once.")
@output_option
def generate(
    prompt: str | None,
    router: str,
    token_ids: tuple[int, ...] | None,
    model: str | None,
    timeout_s: float,
    ids: bool,
    stats: bool,
    no_stream: bool,
    output: str,
    **sampling: object,
) -> int:
    """Send PROMPT to a cluster and print the answer as it comes; `-` reads the prompt from stdin.

    Prints text, or token ids where the router has no tokenizer; with -o json one object with both and the statistics,
    when the answer is complete. Ctrl-C cancels the request.

    \b
    Example:
      baton generate "the sea in the evening" --max-tokens 32 --temperature 0 --stats
      baton generate --token-ids 5,6,7,8 --seed 7 --no-stream
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("Give either a PROMPT or --token-ids.")
    _check_utf8(router, "--router")
    _check_utf8(model or "", "--model")
    request = inference_pb2.GenerateRequest(sampling=_sampling(sampling).to_proto(), model=model)
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    else:
        request.text = _text(str(prompt))
    as_json = Output(output) is Output.JSON
    screen = io.StringIO() if as_json else sys.stdout
    printer = StreamPrinter(screen, as_ids=ids, as_text=token_ids is None and not ids)
    answer = asyncio.run(_run(request, printer, router=router, timeout_s=timeout_s, no_stream=no_stream))
    if answer is None:
        click.echo("Cancelled.", err=True)
        return EXIT_INTERRUPTED
    if as_json:
        print_json(answer_data(answer))
    elif stats:
        click.echo(_stats_text(answer), err=True)
    return 0


def _text(prompt: str) -> str:
    """The prompt itself, for a command line argument."""
    if prompt != "-":
        _check_utf8(prompt, "the prompt")
        return prompt
    if sys.stdin is None:
        raise click.UsageError("stdin is closed; the prompt was to come from there.")
    try:
        # Not the locale's encoding, which may let anything pass. Line ends as text has them.
        return sys.stdin.buffer.read().decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise _not_utf8("the prompt") from None


def _check_utf8(text: str, what: str) -> None:
    """Bytes of the command line that are no UTF-8 arrive as lone surrogates (PEP 383)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _not_utf8(what) from None


def _not_utf8(what: str) -> click.UsageError:
    return click.UsageError(f"{what} is not UTF-8")


def _sampling(options: dict[str, object]) -> SamplingChoice:
    """The options of this command are the fields of SamplingChoice."""
    choice = SamplingChoice(**options)  # type: ignore[arg-type]
    for name, bits in (("top_k", 32), ("max_tokens", 32), ("seed", 64)):
        value = getattr(choice, name)
        if value is not None and not 0 <= value < 1 << bits:
            raise click.BadParameter(
                f"{value} is out of range: 0 to {(1 << bits) - 1}", param_hint="--" + name.replace("_", "-")
            )
    for token in choice.stop_token_ids:
        if not 0 <= token < 1 << 32:
            raise click.BadParameter(f"{token} is no token id", param_hint="--stop-token-id")
    return choice


async def _run(
    request: inference_pb2.GenerateRequest, printer: StreamPrinter, *, router: str, timeout_s: float, no_stream: bool
) -> Answer | None:
    """None when the user has cancelled. Raises BatonError."""
    channels = Channels(limits=ChannelLimits())
    try:
        client = InferenceClient(router, channels=channels, timeout_s=timeout_s)
        with StopSignals() as signals:
            running = client.generate_unary(request) if no_stream else client.generate(request, printer.show)
            working = asyncio.ensure_future(running)
            try:
                if not await signals.unless_stopped(working):
                    return None
                answer = working.result()
                if no_stream:
                    printer.show(inference_pb2.Tokens(ids=answer.ids, text=answer.text))
                return answer
            except BatonError as error:
                # The same reason may come from the router itself, about another node; that text stands.
                if printer.empty and error.message.startswith(f"router at {router}"):
                    raise _no_router(error, router) from error
                raise
            finally:
                printer.end()
    finally:
        await channels.close()


def _no_router(error: BatonError, router: str) -> BatonError:
    if error.reason is not Reason.PEER_UNREACHABLE:
        return error
    return BatonError(
        error.reason,
        f"No router answers at {router}. Is the cluster running (`baton up`)? Name another place with --router "
        "HOST:PORT.",
    )


def _finish_name(answer: Answer) -> str:
    return common_pb2.FinishReason.Name(answer.reason).removeprefix("FINISH_REASON_").lower()


def answer_data(answer: Answer) -> dict[str, object]:
    """An answer as plain data, its statistics under the names of baton.v1.RequestStats."""
    return {
        "request": answer.request_id,
        "finish": _finish_name(answer),
        "text": answer.text,
        "ids": list(answer.ids),
        "stats": {field.name: getattr(answer.stats, field.name) for field in answer.stats.DESCRIPTOR.fields},
    }


def _stats_text(answer: Answer) -> str:
    stats = answer.stats
    finish = _finish_name(answer)
    rows = [
        ("request", answer.request_id),
        ("finish", finish),
        ("prefill node", stats.prefill_node),
        ("decode node", stats.decode_node or "none: the first token ended it"),
        ("transport", stats.transport or "none"),
        ("blocks", f"{stats.blocks_written} written ({stats.bytes_written} bytes), {stats.blocks_skipped} skipped"),
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.prompt_tokens_cached} of them cached"),
        ("answer", f"{stats.output_tokens} tokens"),
        ("TTFT", f"{stats.ttft_ms:.1f} ms"),
        ("mean ITL", f"{stats.itl_mean_ms:.1f} ms"),
        ("handoff exposed", f"{stats.handoff_exposed_ms:.1f} ms"),
    ]
    return "\n".join(f"{name.ljust(16)} {value}" for name, value in rows)
