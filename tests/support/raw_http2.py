"""HTTP/2 frames by hand, to say to a gRPC server what no client of it would say."""

from __future__ import annotations

import asyncio
import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 0, 1, 3, 4, 6, 7, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
CANCEL: Final = struct.pack(">I", 8)
GREETING: Final = PREFACE + b"\0\0\0\4\0\0\0\0\0"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """Kind, flags, stream and payload of the next one. Raises asyncio.IncompleteReadError at the end."""
    head = await reader.readexactly(9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream, await reader.readexactly(int.from_bytes(head[:3], "big"))


def header(name: bytes, value: bytes) -> bytes:
    """A literal without indexing."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def call_head(path: str, *extra: tuple[bytes, bytes]) -> bytes:
    """The header block of a gRPC call."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"attacker"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *extra,
    ]
    return b"".join(header(name, value) for name, value in headers)


def message(body: bytes) -> bytes:
    """As a call carries it."""
    return b"\0" + struct.pack(">I", len(body)) + body


def _length(value: int) -> bytes:
    if value < 127:
        return bytes([value])
    value, out = value - 127, [127]
    while value >= 128:
        out.append(value % 128 | 128)
        value //= 128
    return bytes([*out, value])
