"""The client's side of Generate, for `baton generate`, `baton chat` and the demo, and how they show an
answer: on the screen and as data."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final, TextIO

import click
from batonpb import common_pb2, inference_pb2, inference_pb2_grpc

from baton.errors import BatonError, Reason
from baton.rpc import ChannelLimits, Channels, rpc_errors
from baton.tls import Tls
from cli.output import format_pairs, format_table, message_data
from cli.parameters import timeout_option

HELD_TOKENS_MAX: Final = 4
"""Tokens without text that are held back before an answer counts as one without text: a character of UTF-8 has at most
four bytes, so a tokenizer shows something by then."""
LOGPROB_MIN: Final = -9999.0
"""Stands for minus infinity, which JSON does not have; as in the OpenAI endpoints."""

router_option: Final = click.option(
    "--router", default="127.0.0.1:7000", show_default=True, metavar="HOST:PORT", help="Where the router is.",
)  # fmt: skip
API_KEY_VARIABLE: Final = "BATON_API_KEY"


def read_api_key(path: Path | None) -> str | None:
    """The key in the file, or in the environment. Raises UsageError."""
    try:
        key = (os.environ.get(API_KEY_VARIABLE, "") if path is None else path.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--api-key-file: {path} cannot be read: {error}.") from error
    if not all("!" <= character <= "~" for character in key):
        raise click.UsageError(f"{path or API_KEY_VARIABLE} has no API key: one line of ASCII without spaces.")
    return key or None


api_key_option: Final = click.option(
    "--api-key-file", type=click.Path(path_type=Path), metavar="FILE",
    help=f"File with the API key to send.  [default: the key in {API_KEY_VARIABLE}, or none]",
)  # fmt: skip
answer_timeout_option: Final = timeout_option(300.0, "How long a whole answer may take.")

Answer = inference_pb2.GenerateResponse
"""A whole answer; `logprobs` has one for each id where they were asked for."""
Show = Callable[[inference_pb2.Tokens], None]


class StreamPrinter:
    """Writes an answer as it comes: its text, or its ids where there is no text."""

    def __init__(self, stream: TextIO, *, as_ids: bool | None) -> None:
        """`as_ids` None: decide by the first tokens."""
        self._stream = stream
        self._as_ids = as_ids
        self._held: list[int] = []
        self._ids_written = 0
        self.empty = True
        """Nothing has been written so far."""

    def show(self, tokens: inference_pb2.Tokens) -> None:
        self._held += tokens.ids
        if self._as_ids is None:
            if not tokens.text and len(self._held) < HELD_TOKENS_MAX:
                return
            self._as_ids = not tokens.text
        self._write(tokens.text)

    def end(self) -> None:
        """The answer is complete, or will never be."""
        if self._as_ids is None:
            self._as_ids = True
            self._write("")
        if not self.empty:
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, text: str) -> None:
        if self._as_ids:
            text = "".join(f"{' ' if self._ids_written + i else ''}{token}" for i, token in enumerate(self._held))
            self._ids_written += len(self._held)
        self._held.clear()
        if text:
            self.empty = False
            self._stream.write(text)
            self._stream.flush()


def finish_name(answer: Answer) -> str:
    """ "stop" or "length"."""
    return common_pb2.FinishReason.Name(answer.reason).removeprefix("FINISH_REASON_").lower()


def answer_data(answer: Answer) -> dict[str, object]:
    """An answer as plain data, its statistics under the names of baton.v1.RequestStats; `logprobs` where asked for."""
    data: dict[str, object] = {
        "request": answer.request_id,
        "finish": finish_name(answer),
        "text": answer.text,
        "ids": list(answer.ids),
        "stats": message_data(answer.stats),
    }
    if answer.logprobs:
        data["logprobs"] = [
            {
                "id": token,
                "logprob": max(of.logprob, LOGPROB_MIN),
                "top": [{"id": other, "logprob": max(value, LOGPROB_MIN)} for other, value in _best(of)],
            }
            for token, of in zip(answer.ids, answer.logprobs, strict=True)
        ]
    return data


def logprobs_text(answer: Answer) -> str:
    """One line a token: its place, id, log-probability and probability, then the best tokens, best first."""
    rows = [
        [
            str(i),
            str(token),
            f"{of.logprob:.3f}",
            f"{math.exp(of.logprob):.1%}",
            "  ".join(f"{other} {value:.3f}" for other, value in _best(of)),
        ]
        for i, (token, of) in enumerate(zip(answer.ids, answer.logprobs, strict=True))
    ]
    return format_table(("TOKEN", "ID", "LOGPROB", "PROB", "BEST"), rows, right=range(4))


def _best(of: common_pb2.TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(of.top_ids, of.top_logprobs, strict=True))


def stats_text(answer: Answer) -> str:
    """All that is known of a request, a line each."""
    stats = answer.stats
    return format_pairs([
        ("request", answer.request_id),
        ("finish", finish_name(answer)),
        ("prefill node", stats.prefill_node),
        ("decode node", stats.decode_node or "none: the first token ended it"),
        ("transport", stats.transport or "none"),
        ("blocks", f"{stats.blocks_written} written ({stats.bytes_written} bytes), {stats.blocks_skipped} skipped"),
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.prompt_tokens_cached} of them cached"),
        ("answer", f"{stats.output_tokens} tokens"),
        ("TTFT", f"{stats.ttft_ms:.1f} ms"),
        ("mean ITL", f"{stats.itl_mean_ms:.1f} ms"),
        ("handoff exposed", f"{stats.handoff_exposed_ms:.1f} ms"),
    ])  # fmt: skip


class AnswerBuilder:
    """Puts an answer together from its events.

    Asserts what every client is promised: each token index once and in order, one end.
    """

    def __init__(self) -> None:
        self.answer = Answer()
        """What there is so far; the request id as soon as the router has taken the request."""
        self.complete = False

    def push(self, event: inference_pb2.GenerateEvent) -> None:
        assert not self.complete, "an event after the end"
        answer, kind = self.answer, event.WhichOneof("event")
        if kind == "started":
            answer.request_id = event.started.request_id
        elif kind == "tokens":
            assert event.tokens.first_index == len(answer.ids), (event.tokens.first_index, len(answer.ids))
            answer.ids.extend(event.tokens.ids)
            answer.logprobs.extend(event.tokens.logprobs)
            answer.text += event.tokens.text
        elif kind == "finished":
            answer.reason = event.finished.reason
            answer.stats.CopyFrom(event.finished.stats)
            self.complete = True


@asynccontextmanager
async def open_channels(tls: Tls | None = None) -> AsyncIterator[Channels]:
    """Channels with the limits of a client, closed at the end; with `tls`, to nodes."""
    channels = Channels(limits=ChannelLimits(), tls=tls)
    try:
        yield channels
    finally:
        await channels.close()


class InferenceClient:
    """Calls one router. Does not own `channels`."""

    def __init__(self, router: str, *, channels: Channels, timeout_s: float, api_key: str | None = None) -> None:
        """Raises BatonError BAD_ENDPOINT."""
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._peer = _named(router)
        self._stub = inference_pb2_grpc.InferenceStub(channels.get(router))
        self._timeout_s = timeout_s

    async def events(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        """The events of one streamed request. Closing the generator, or cancelling its task, cancels the request.

        Raises BatonError: the router's, or PEER_UNREACHABLE or DEADLINE.
        """
        call = self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata)
        try:
            with rpc_errors(self._peer):
                async for event in call:
                    yield event
        finally:
            call.cancel()

    async def generate(
        self, request: inference_pb2.GenerateRequest, show: Show | None = None, builder: AnswerBuilder | None = None
    ) -> Answer:
        """Run one request to its end over the stream. Raises BatonError.

        `show` is called with each batch of tokens; `builder` has what there is of an answer that breaks off.
        """
        builder = builder or AnswerBuilder()
        async with aclosing(self.events(request)) as events:
            async for event in events:
                builder.push(event)
                if show is not None and event.HasField("tokens"):
                    show(event.tokens)
        assert builder.complete, "the stream ended without an end of the answer"
        return builder.answer

    async def generate_unary(self, request: inference_pb2.GenerateRequest) -> Answer:
        """Run one request to its end with the unary call. Raises BatonError."""
        with rpc_errors(self._peer):
            answer: Answer = await self._stub.GenerateUnary(request, timeout=self._timeout_s, metadata=self._metadata)
        return answer


def no_router(router: str) -> BatonError:
    """No router answers at this address."""
    return BatonError(
        Reason.PEER_UNREACHABLE,
        f"No router answers at {router}. Is the cluster running (`baton up`)? Name another place with --router "
        "HOST:PORT.",
    )


def is_unreached(error: BatonError, router: str) -> bool:
    """Whether `router` did not answer. The same reason may come from the router, about another node."""
    return error.reason is Reason.PEER_UNREACHABLE and error.message.startswith(_named(router))


def _named(router: str) -> str:
    return f"The router at {router}"
