"""The client's side of Generate, for `baton generate`, `baton chat` and the demo, and how they show an
answer: on the screen and as data."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, TextIO

import click
from batonpb import common_pb2, inference_pb2, inference_pb2_grpc

from baton.errors import BatonError, Reason
from baton.rpc import Channels, rpc_errors
from cli.output import format_table
from cli.parameters import timeout_option

HELD_TOKENS_MAX: Final = 4
"""Tokens without text that are held back before an answer counts as one without text: a character of UTF-8 has at most
four bytes, so a tokenizer shows something by then."""
LOGPROB_MIN: Final = -9999.0
"""Stands for minus infinity, which JSON does not have; as in the OpenAI endpoints."""


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
        "stats": {field.name: getattr(answer.stats, field.name) for field in answer.stats.DESCRIPTOR.fields},
    }
    if answer.logprobs:
        data["logprobs"] = [
            {
                "id": token,
                "logprob": _finite(of.logprob),
                "top": [{"id": other, "logprob": _finite(value)} for other, value in _best(of)],
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


def stats_text(answer: Answer) -> str:
    """All that is known of a request, a line each."""
    stats = answer.stats
    rows = [
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
    ]
    return "\n".join(f"{name.ljust(16)} {value}" for name, value in rows)


def stats_line(answer: Answer) -> str:
    """What is worth knowing of one turn of a conversation."""
    stats = answer.stats
    return (
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_tokens_cached} cached; answer {stats.output_tokens} tokens"
        f"; TTFT {stats.ttft_ms:.1f} ms, mean ITL {stats.itl_mean_ms:.1f} ms"
    )


def _best(of: common_pb2.TokenLogprobs) -> Sequence[tuple[int, float]]:
    return list(zip(of.top_ids, of.top_logprobs, strict=True))


def _finite(value: float) -> float:
    return max(value, LOGPROB_MIN)


router_option: Final = click.option(
    "--router", default="127.0.0.1:7000", show_default=True, metavar="HOST:PORT", help="Where the router is.",
)  # fmt: skip
answer_timeout_option: Final = timeout_option(300.0, "How long a whole answer may take.")

Show = Callable[[inference_pb2.Tokens], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    request_id: str
    ids: tuple[int, ...]
    text: str
    reason: common_pb2.FinishReason
    stats: inference_pb2.RequestStats
    logprobs: tuple[common_pb2.TokenLogprobs, ...] = ()
    """One for each id where they were asked for."""


class AnswerBuilder:
    """Puts an answer together from its events.

    Asserts what every client is promised: each token index once and in order, one end.
    """

    def __init__(self) -> None:
        self.text = ""
        """What there is so far."""
        self.request_id = ""
        """Set as soon as the router has taken the request."""
        self._ids: list[int] = []
        self._logprobs: list[common_pb2.TokenLogprobs] = []
        self._finished: inference_pb2.Finished | None = None

    def push(self, event: inference_pb2.GenerateEvent) -> None:
        assert self._finished is None, "an event after the end"
        kind = event.WhichOneof("event")
        if kind == "started":
            self.request_id = event.started.request_id
        elif kind == "tokens":
            assert event.tokens.first_index == len(self._ids), (event.tokens.first_index, len(self._ids))
            self._ids += event.tokens.ids
            self._logprobs += event.tokens.logprobs
            self.text += event.tokens.text
        elif kind == "finished":
            self._finished = event.finished

    def answer(self) -> Answer:
        """The whole answer, when its stream has ended."""
        assert self._finished is not None, "the stream ended without an end of the answer"
        return Answer(
            request_id=self.request_id,
            ids=tuple(self._ids),
            text=self.text,
            reason=self._finished.reason,
            stats=self._finished.stats,
            logprobs=tuple(self._logprobs),
        )


class InferenceClient:
    """Calls one router. Does not own `channels`."""

    def __init__(self, router: str, *, channels: Channels, timeout_s: float) -> None:
        """Raises BatonError BAD_ENDPOINT."""
        self._peer = _named(router)
        self._stub = inference_pb2_grpc.InferenceStub(channels.get(router))
        self._timeout_s = timeout_s

    async def events(self, request: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        """The events of one streamed request. Closing the generator, or cancelling its task, cancels the request.

        Raises BatonError: the router's, or PEER_UNREACHABLE or DEADLINE.
        """
        call = self._stub.Generate(request, timeout=self._timeout_s)
        try:
            with rpc_errors(self._peer):
                async for event in call:
                    yield event
        finally:
            call.cancel()

    async def generate(self, request: inference_pb2.GenerateRequest, show: Show | None = None) -> Answer:
        """Run one request to its end over the stream; `show` is called with each batch of tokens. Raises BatonError."""
        builder = AnswerBuilder()
        async with aclosing(self.events(request)) as events:
            async for event in events:
                builder.push(event)
                if show is not None and event.HasField("tokens"):
                    show(event.tokens)
        return builder.answer()

    async def generate_unary(self, request: inference_pb2.GenerateRequest) -> Answer:
        """Run one request to its end with the unary call. Raises BatonError."""
        with rpc_errors(self._peer):
            reply: inference_pb2.GenerateResponse = await self._stub.GenerateUnary(request, timeout=self._timeout_s)
        return Answer(
            request_id=reply.request_id,
            ids=tuple(reply.ids),
            text=reply.text,
            reason=reply.reason,
            stats=reply.stats,
            logprobs=tuple(reply.logprobs),
        )


def no_router(error: BatonError, router: str) -> BatonError:
    """What to say instead of `error` where no router answers at all; `error` itself where it is something else.

    The same reason may come from the router itself, about another node; that text stands.
    """
    if error.reason is not Reason.PEER_UNREACHABLE or not error.message.startswith(_named(router)):
        return error
    return BatonError(
        error.reason,
        f"No router answers at {router}. Is the cluster running (`baton up`)? Name another place with --router "
        "HOST:PORT.",
    )


def unreached(router: str) -> BatonError:
    """The error that `no_router` describes: no connection was made."""
    return BatonError(Reason.PEER_UNREACHABLE, f"{_named(router)} does not answer.")


def broken_off(error: BatonError) -> BatonError:
    """The same error, of an answer that the user has seen a part of."""
    return BatonError(
        error.reason,
        f"The answer broke off. {error.message}",
        code=error.code,
        field=error.field,
        retry_after_ms=error.retry_after_ms,
        metadata=error.metadata,
    )


def _named(router: str) -> str:
    return f"The router at {router}"
