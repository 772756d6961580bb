"""Cutting a stream of bytes into messages: a header with magic, version, kind and length, then the body. Pure.

Used by the connections for words of rdma and ucx, whose messages differ in length; each wire has its own bodies, limits
and errors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Generic, TypeVar

_HEADER = struct.Struct("<4sHHI")

KindT = TypeVar("KindT", bound=IntEnum)
MessageT = TypeVar("MessageT")


class Malformed(Exception):
    """Bytes that are none of a wire's messages. Each wire has its own, with its reason to refuse them."""


class Framing(Generic[KindT]):
    """The header of one wire. `malformed` and `other_version` make the error from its text."""

    def __init__(
        self,
        *,
        magic: bytes,
        version: int,
        kinds: type[KindT],
        body_bytes_max: int,
        malformed: Callable[[str], Malformed],
        other_version: Callable[[str], Malformed],
    ) -> None:
        self._magic = magic
        self._version = version
        self._kinds = kinds
        self._body_bytes_max = body_bytes_max
        self._malformed = malformed
        self._other_version = other_version

    def pack(self, kind: KindT, body: bytes) -> bytes:
        assert len(body) <= self._body_bytes_max, len(body)
        return _HEADER.pack(self._magic, self._version, kind, len(body)) + body

    def head(self, received: bytearray) -> tuple[KindT, int]:
        """Kind and length of the body. Raises what `malformed` or `other_version` make."""
        magic, version, code, nbytes = _HEADER.unpack_from(received)
        if magic != self._magic:
            raise self._malformed(f"magic {magic!r}")
        if version != self._version:
            raise self._other_version(f"protocol version {version}, ours is {self._version}")
        if nbytes > self._body_bytes_max:
            raise self._malformed(f"a body of {nbytes} bytes, at most {self._body_bytes_max} are possible")
        try:
            return self._kinds(code), nbytes
        except ValueError as error:
            raise self._malformed(f"kind {code}") from error


class MessageStream(Generic[KindT, MessageT]):
    """What has come of one stream. Not thread-safe."""

    def __init__(self, framing: Framing[KindT], decode: Callable[[KindT, bytes], MessageT]) -> None:
        self._framing = framing
        self._decode = decode
        self._received = bytearray()

    @property
    def empty(self) -> bool:
        """No beginning of a message waits for the rest of it."""
        return not self._received

    def feed(self, data: bytes) -> Iterator[MessageT]:
        """The messages that are whole now. Raises the wire's error, after which the stream is of no use."""
        self._received += data
        while len(self._received) >= _HEADER.size:
            kind, nbytes = self._framing.head(self._received)
            if len(self._received) < _HEADER.size + nbytes:
                return
            body = bytes(self._received[_HEADER.size : _HEADER.size + nbytes])
            del self._received[: _HEADER.size + nbytes]
            yield self._decode(kind, body)
