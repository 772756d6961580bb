"""A process that throws garbage at ports until its time is over: seeded, bounded in connections at once and in bytes.

    python -m tests.soak.garbage SEED SECONDS KIND=ENDPOINT ...

KIND is http, grpc, data or shm (then ENDPOINT is the beginning of an abstract socket's name). It prints how many
connections of each sort it has made.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
import random
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import batonpb
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.endpoint import split_endpoint
from tests.support.attacks import FRAMES, call_frames, http2_frame, http2_preface

AT_ONCE: Final = 12
READ_S_MAX: Final = 0.1
HALF_OPEN_S_MAX: Final = 3.0
BURST: Final = 40
BURST_SHARE: Final = 0.02
FLOOD_SHARE: Final = 0.005
"""Of a flood of frames, cut to FLOOD_BYTES_MAX."""
FLOOD_BYTES_MAX: Final = 100_000
BYTES_MAX: Final = 20_000
PAUSE_S_MAX: Final = 0.05
SOURCES: Final = tuple(f"127.0.0.{last}" for last in range(66, 74))
_BELIEVED: Final = frozenset({"/baton.v1.Directory/Push"})
"""Of whoever reaches the directory's port: a node that somebody made up would be asked to serve. Certificates are for
that."""

Make = Callable[[random.Random], bytes]


def random_bytes(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([1, 9, 64, 1_000, BYTES_MAX]))


def _value(rng: random.Random, field: Any, depth: int) -> Any:
    kinds = FieldDescriptor
    if field.type == kinds.TYPE_MESSAGE:
        return random_message(rng, GetMessageClass(field.message_type), depth - 1)
    if field.type in (kinds.TYPE_STRING, kinds.TYPE_BYTES):
        text = rng.choice(["", "a", "prefill-0", "decode-0", "é\u0000", "x" * rng.randrange(500)])
        return text if field.type == kinds.TYPE_STRING else text.encode()
    if field.type == kinds.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == kinds.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if field.type in (kinds.TYPE_DOUBLE, kinds.TYPE_FLOAT):
        return rng.choice([0.0, -1.0, 1e300 if field.type == kinds.TYPE_DOUBLE else 1e30, float("nan"), rng.random()])
    bits = 32 if "32" in str(field.cpp_type) or field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    signed = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_INT64)
    return rng.choice([0, 1, rng.randrange(1000), (1 << (bits - 1)) - 1, *(() if signed else ((1 << bits) - 1,))])


def random_message(rng: random.Random, kind: type[Message], depth: int = 4) -> Message:
    """Some of its fields set, with values that may mean something."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if rng.random() < 0.4 or (depth <= 0 and field.type == FieldDescriptor.TYPE_MESSAGE):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            values = [_value(rng, field, depth) for _ in range(rng.choice([0, 1, 3, 40]))]
            getattr(message, field.name).extend(values)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(_value(rng, field, depth))
        else:
            setattr(message, field.name, _value(rng, field, depth))
    return message


def _methods() -> list[tuple[str, type[Message]]]:
    found = []
    for module in pkgutil.iter_modules(batonpb.__path__):
        if module.name.endswith("_pb2"):
            for service in importlib.import_module(f"batonpb.{module.name}").DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    path = f"/{service.full_name}/{method.name}"
                    if path not in _BELIEVED:
                        found.append((path, GetMessageClass(method.input_type)))
    return found


_METHODS: Final = _methods()


def grpc_call(rng: random.Random) -> bytes:
    """A whole call of some method, a message with random fields, perhaps cut off or with some bytes changed."""
    path, kind = rng.choice(_METHODS)
    raw = bytearray(random_message(rng, kind).SerializeToString())
    if raw and rng.random() < 0.3:
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        del raw[rng.randrange(len(raw) + 1) :]
    length = len(raw) if rng.random() < 0.9 else rng.randrange(1 << 32)
    whole = http2_preface() + call_frames(path, bytes([0]) + length.to_bytes(4, "big") + bytes(raw), stream=1)
    return whole if rng.random() < 0.8 else whole[: rng.randrange(len(whole))]


def frames(rng: random.Random) -> bytes:
    """Frames of any kind with random flags, streams and payloads."""
    return http2_preface() + b"".join(
        http2_frame(
            rng.randrange(12), rng.randrange(256), rng.choice([0, 1, 3, 2, 1 << 30]), rng.randbytes(rng.randrange(60))
        )
        for _ in range(rng.randrange(1, 60))
    )


def frame_flood(rng: random.Random) -> bytes:
    return http2_preface() + FRAMES[rng.choice(sorted(FRAMES))]()[:FLOOD_BYTES_MAX]


def _json(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.4:
        return rng.choice([None, True, 0, -1, 1e308, 1 << 70, "", "a" * rng.randrange(300), "\ud800", "<|begin|>"])
    if rng.random() < 0.5:
        return [_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["type", "text", "role", "x"]): _json(rng, depth - 1) for _ in range(3)}


_FIELDS: Final = (
    "model", "prompt", "messages", "max_tokens", "n", "stream", "stream_options", "logprobs", "stop", "temperature",
    "seed", "logit_bias", "top_k", "chat_template_kwargs", "cache_salt", "min_tokens", "tools",
)  # fmt: skip


def http_call(rng: random.Random) -> bytes:
    """A call whose fields are right here and there, perhaps cut off."""
    body: dict[str, Any] = {"prompt": [1, 2, 3], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for name in rng.sample(_FIELDS, rng.randrange(4)):
        body[name] = _json(rng, 3)
    raw = json.dumps(body).encode()
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/x"])
    length = len(raw) if rng.random() < 0.8 else rng.randrange(1 << 20)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\n"
    if rng.random() < 0.3:
        head += rng.choice(
            ["transfer-encoding: chunked\r\n", "expect: 100-continue\r\n", "authorization: Bearer x\r\n"]
        )
    whole = head.encode() + b"\r\n" + raw
    return whole if rng.random() < 0.7 else whole[: rng.randrange(len(whole))]


def http_garbage(rng: random.Random) -> bytes:
    lines = [
        b"GET / HTTP/1.1", b"GET", b"POST /v1/completions HTTP/9.9", b"host: a", b": b", b"a" * 9_000,
        b"content-length: -1",
        b"transfer-encoding: chunked", b"\x00\xff", b"", b"zz", b"5", b"hello", b"0",
    ]  # fmt: skip
    return b"\r\n".join(rng.choices(lines, k=rng.randrange(1, 12))) + b"\r\n\r\n"


_SORTS: Final[dict[str, tuple[Make, ...]]] = {
    "http": (random_bytes, http_call, http_call, http_garbage, grpc_call),
    "grpc": (random_bytes, grpc_call, grpc_call, grpc_call, frames, http_call),
    "data": (random_bytes, random_bytes, http_garbage),
    "shm": (random_bytes,),
}


class Thrower:
    def __init__(self, rng: random.Random, targets: list[tuple[str, str]]) -> None:
        self._rng = rng
        self._targets = targets
        self.thrown: Counter[str] = Counter()

    async def throw_until(self, end_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < end_s:
            kind, endpoint = self._rng.choice(self._targets)
            with suppress(OSError, TimeoutError):
                if kind == "shm":
                    self._throw_shm(endpoint)
                elif self._rng.random() < BURST_SHARE:
                    await asyncio.gather(*(self._throw(kind, endpoint, silent=True) for _ in range(BURST)))
                else:
                    await self._throw(kind, endpoint, silent=self._rng.random() < 0.1)
            await asyncio.sleep(self._rng.random() * PAUSE_S_MAX)

    async def _throw(self, kind: str, endpoint: str, *, silent: bool) -> None:
        rng = self._rng
        make = rng.choice(_SORTS[kind])
        if kind == "grpc" and rng.random() < FLOOD_SHARE:
            make = frame_flood
        source = rng.choice(SOURCES)
        reader, writer = await asyncio.open_connection(*split_endpoint(endpoint), local_addr=(source, 0))
        self.thrown[f"{kind}: {'nothing' if silent else make.__name__}"] += 1
        try:
            if silent:
                await asyncio.sleep(rng.random() * HALF_OPEN_S_MAX)
                return
            writer.write(make(rng))
            async with asyncio.timeout(READ_S_MAX):
                while await reader.read(1 << 16):
                    pass
        finally:
            writer.transport.abort()

    def _throw_shm(self, name: str) -> None:
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if name in line]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
            made.setblocking(False)
            made.connect("\0" + self._rng.choice(names)[1:])
            made.send(random_bytes(self._rng))
            self.thrown["shm: random_bytes"] += 1


async def _main(seed: int, seconds: float, targets: list[tuple[str, str]]) -> Counter[str]:
    end_s = asyncio.get_running_loop().time() + seconds
    throwers = [Thrower(random.Random(f"{seed} {i}"), targets) for i in range(AT_ONCE)]
    async with asyncio.TaskGroup() as group:
        for each in throwers:
            group.create_task(each.throw_until(end_s))
    return sum((each.thrown for each in throwers), Counter())


if __name__ == "__main__":
    pairs = [(kind, endpoint) for kind, _, endpoint in (argument.partition("=") for argument in sys.argv[3:])]
    print(json.dumps(asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]), pairs))))
