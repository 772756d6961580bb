"""A parser that strangers reach, as what is fuzzed: bytes in, nothing out. It raises where a property does not hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from baton.errors import BatonError, Code
from baton.status import to_status
from router.openai import error_headers, error_json, error_status

SEEDS: Final = Path(__file__).parent / "seeds"
CLIENTS_OWN: Final = frozenset(
    {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED}
)
ERROR_BYTES_MAX: Final = 4_096
"""Whatever was sent, little of it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    name: str
    check: Callable[[bytes], None]
    """Raises AssertionError, or whatever else a parser must not raise."""
    inputs: st.SearchStrategy[bytes]
    samples: Sequence[bytes]
    """Good ones, which mutations begin with."""
    repeats: Sequence[tuple[bytes, bytes, bytes]] = ()
    """Begin, part and end: with ten times as many parts it must take no more than about ten times as long."""

    def seeds(self) -> list[Path]:
        """Inputs that once failed, or nearly."""
        return sorted((SEEDS / self.name).glob("*"))

    def examples(self) -> st.SearchStrategy[bytes]:
        """Of the target's own kind, changed good ones, and anything."""
        known = [*self.samples, *(path.read_bytes() for path in self.seeds() if path.stat().st_size <= 4_096)]
        return st.one_of(self.inputs, changed(known), st.binary(max_size=200))


@contextmanager
def refusal_is_typed() -> Iterator[None]:
    """An error of the client's own is one that both APIs can send, and short."""
    try:
        yield
    except BatonError as error:
        assert error.code in CLIENTS_OWN, repr(error)[:400]
        assert 400 <= error_status(error) < 500, repr(error)[:400]
        sent = [
            json.dumps(error_json(error)),
            json.dumps(error_headers(error)),
            str(to_status(error).trailing_metadata),
        ]
        assert max(map(len, sent)) <= ERROR_BYTES_MAX, repr(error)[:400]


@st.composite
def changed(draw: st.DrawFn, known: Sequence[bytes]) -> bytes:
    """One of these with parts cut out, doubled, overwritten, or taken from another."""
    data = draw(st.sampled_from(list(known)))
    for _ in range(draw(st.integers(0, 6))):
        low = draw(st.integers(0, len(data)))
        high = min(len(data), low + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(("cut", "double", "write", "take", "flip")))
        if kind == "cut":
            data = data[:low] + data[high:]
        elif kind == "double":
            data = data[:high] + data[low:high] * draw(st.integers(1, 50)) + data[high:]
        elif kind == "write":
            data = data[:low] + draw(PARTS) + data[high:]
        elif kind == "flip" and low < len(data):
            data = data[:low] + bytes([data[low] ^ 1 << draw(st.integers(0, 7))]) + data[low + 1 :]
        else:
            other = draw(st.sampled_from(list(known)))
            data = data[:low] + other[draw(st.integers(0, len(other))) :][:200]
    return data


PARTS: Final[st.SearchStrategy[bytes]] = st.one_of(
    st.binary(max_size=8),
    st.sampled_from(
        [
            b'"',
            b"\\",
            b"\\ud800",
            b"{",
            b"[[[[",
            b"]",
            b"null",
            b"-0",
            b"1e999",
            b"NaN",
            b"9" * 30,
            b"\r\n",
            b"\0",
            b":",
        ]
        + [b"\xff", b"\xed\xa0\x80", "\U000c0000".encode(), "𓀀".encode(), b"<|im_start|>", b"</s>", b",", b" " * 300]
        + [b"0.0.0.0", b"%", b"Transfer-Encoding: chunked", b"Content-Length: 5", b"\xf8\xff\xff\xff\xff\x01"]
    ),
)


def jsons(leaves: st.SearchStrategy[Any], *, size: int = 12) -> st.SearchStrategy[Any]:
    """Any JSON of such leaves."""
    keys = st.text(max_size=6) | st.sampled_from(["role", "content", "type", "text", "5", "</s>"])
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=size,
    )


def written(value: Any) -> bytes:
    """Its JSON, with halves of characters where it has some."""
    return json.dumps(value).encode("utf-8", "surrogatepass")
