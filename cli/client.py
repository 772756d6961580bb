"""What the commands that ask for answers share: their options, and how they show an answer, on the screen and as
data."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final, TextIO

import click
from batonpb import common_pb2

from baton.client import Answer, AsyncClient, BatonError, Piece, Reason, TokenLogprobs
from baton.client.asynchronous import UNREACHED_KEY
from cli.output import format_pairs, format_table, message_data
from cli.parameters import timeout_option

HELD_TOKENS_MAX: Final = 4
"""Tokens without text that are held back before an answer counts as one without text: a character of UTF-8 has at most
four bytes, so a tokenizer shows something by then."""
LOGPROB_MIN: Final = -9999.0
"""Stands for minus infinity, which JSON does not have; as in the OpenAI endpoints."""

CONNECT_S_MAX: Final = 1.0
"""More than gRPC's pause between two tries to connect: a router that has just started is found."""

router_option: Final = click.option(
    "--router", multiple=True, default=("127.0.0.1:7000",), show_default=True, metavar="HOST:PORT",
    callback=lambda _context, _option, given: ",".join(given),
    help="Where the router is. Of several (repeat it, or write commas) any may answer.",
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


def open_client(router: str, *, timeout_s: float, api_key: str | None = None) -> AsyncClient:
    """For a user who waits: where no router answers at all, that is said soon. Raises BatonError BAD_ENDPOINT."""
    return AsyncClient(router, timeout_s=timeout_s, api_key=api_key, connect_timeout_s=CONNECT_S_MAX)


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

    def show(self, tokens: Piece) -> None:
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


def answer_data(answer: Answer) -> dict[str, object]:
    """An answer as plain data, its statistics under the names of baton.v1.RequestStats; `logprobs` where asked for."""
    data: dict[str, object] = {
        "request": answer.request_id,
        "finish": answer.finish,
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


def _best(of: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(of.top_ids, of.top_logprobs, strict=True))


def _sources_text(sources: common_pb2.PromptSources) -> str:
    """Where it came from, in tokens."""
    cached = (("device", sources.cached_device), ("host", sources.cached_host), ("disk", sources.cached_disk))
    parts = [f"computed {sources.computed}", *(f"cached: {tier} {tokens}" for tier, tokens in cached if tokens)]
    if sources.fetched:
        parts.append(f"fetched {sources.fetched} from {sources.fetched_from}")
    return ", ".join(parts)


def stats_text(answer: Answer) -> str:
    """All that is known of a request, a line each."""
    stats = answer.stats
    return format_pairs([
        ("request", answer.request_id),
        ("finish", answer.finish),
        ("prefill node", stats.prefill_node),
        ("decode node", stats.decode_node or "none: the first token ended it"),
        ("transport", stats.transport or "none"),
        ("blocks", f"{stats.blocks_written} written ({stats.bytes_written} bytes), {stats.blocks_skipped} skipped"),
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.prompt_tokens_cached} of them cached"),
        ("prompt's KV", _sources_text(stats.sources)),
        ("answer", f"{stats.output_tokens} tokens"),
        ("priority", common_pb2.Priority.Name(stats.priority).removeprefix("PRIORITY_").lower()),
        ("in line", f"{stats.line_ms:.1f} ms"),
        ("TTFT", f"{stats.ttft_ms:.1f} ms"),
        ("mean ITL", f"{stats.itl_mean_ms:.1f} ms"),
        ("handoff exposed", f"{stats.handoff_exposed_ms:.1f} ms"),
    ])  # fmt: skip


def no_router(router: str) -> BatonError:
    """No router answers at this address."""
    return BatonError(
        Reason.PEER_UNREACHABLE,
        f"No router answers at {router}. Is the cluster running (`baton up`), and the router neither cordoned nor "
        "drained (`baton nodes`)? Name another place with --router HOST:PORT.",
    )


def is_unreached(error: BatonError) -> bool:
    """Whether no router answered. The same reason may come from one, about another node."""
    return error.reason is Reason.PEER_UNREACHABLE and UNREACHED_KEY in error.metadata
