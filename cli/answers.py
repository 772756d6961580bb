"""Answers on the screen and as data: what `baton generate` and `baton chat` show alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TextIO

from batonpb import common_pb2, inference_pb2

from cli.client import Answer
from cli.table import format_table

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
