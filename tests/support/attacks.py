"""The attacks: each is what one client does to a front door, bounded in time and count, from ATTACKER.

An attack is done when all that it has sent is answered, refused or given up. It runs in a process of its own
(`AttackerProcess`), or it would keep the loop of the bystanders from turning, and not the router's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final

import grpc.aio
from batonpb import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.attack import Target, attacker_channel, attacker_connection, http_attack, post

MIB: Final = 1 << 20
BODY_BYTES: Final = 4 * MIB
"""The largest body that the router reads."""
BOUND_S_MAX: Final = 60.0
ATTACK_S_MAX: Final = 90.0
_OPTIONS: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

Attack = Callable[[Target], Coroutine[Any, Any, list[str] | None]]
COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"


def _filled(head: str, unit: str, tail: str, count: int = BODY_BYTES) -> bytes:
    """`unit` as often as the body takes."""
    return (head + unit * ((count - len(head) - len(tail)) // len(unit)) + tail).encode()


def _lists() -> bytes:
    return _filled('{"prompt":[', "[],", "[]]}")


def _objects() -> bytes:
    return _filled('{"prompt":[', "{},", "{}]}")


def _depth() -> bytes:
    return _filled('{"prompt":', "[", "")


def _digits() -> bytes:
    return _filled('{"prompt":[', "1", "]}")


def _numbers() -> bytes:
    return _filled('{"prompt":[', "1,", "1]}")


def _floats() -> bytes:
    return _filled('{"prompt":[', "1e9,", "1]}")


def _keys() -> bytes:
    pairs = ",".join(f'"k{i}":0' for i in range(300_000))
    return ("{" + pairs[: BODY_BYTES - 30] + ',"prompt":[1],"max_tokens":1}').encode()[:BODY_BYTES]


def _few_keys() -> bytes:
    """As many as are let through."""
    return ("{" + ",".join(f'"k{i}":0' for i in range(60_000)) + ',"prompt":[1],"max_tokens":1}').encode()


def _strings() -> bytes:
    return _filled('{"prompt":[', '"a",', '"a"]}')


def _few_lists() -> bytes:
    """As many as are let through."""
    return ('{"prompt":[' + "[]," * 65_000 + "[]]}").encode()


def _few_numbers() -> bytes:
    return ('{"prompt":[' + "1," * 500_000 + "1]}").encode()


def _few_strings() -> bytes:
    return ('{"prompt":[' + '"a",' * 65_000 + '"a"]}').encode()


def _escapes() -> bytes:
    return _filled('{"prompt":"', "\\u0041", '"}')


def _surrogates() -> bytes:
    return _filled('{"prompt":"', "\\ud83d\\ude00", '"}')


def _quotes() -> bytes:
    return _filled('{"prompt":"', '\\"[', '"}')


def _backslashes() -> bytes:
    return _filled('{"prompt":"', "\\\\", '"}')


def _not_utf8() -> bytes:
    return b'{"prompt":"' + b"\xff" * (BODY_BYTES - 20) + b'"}'


def _spaces() -> bytes:
    return _filled('{"prompt":[1],"max_tokens":1', " ", "}")


def _words() -> bytes:
    return _filled('{"prompt":"', "the sea in the evening ", '"}', 1_900_000)


def _one_word() -> bytes:
    return _filled('{"prompt":"', "a", '"}', 1_900_000)


def _specials() -> bytes:
    return _filled('{"prompt":"', "<|begin|>", '"}', 1_900_000)


def _messages() -> bytes:
    message = '{"role":"user","content":"the sea"}'
    return _filled('{"messages":[', message + ",", message + "]}", len(message) * 4_000)


def _special_messages() -> bytes:
    return _filled('{"messages":[{"role":"user","content":"', "<|begin|>", '"}]}', 1_900_000)


def _nested_content() -> bytes:
    return _filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":"a"},',
                   '{"type":"text","text":"a"}]}]}', 900_000)  # fmt: skip


def _template_variables() -> bytes:
    pairs = ",".join(f'"k{i}":[[[["<|begin|>"]]]]' for i in range(12_000))
    return (
        '{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"chat_template_kwargs":{' + pairs + "}}"
    ).encode()


BODIES: Final[Mapping[str, tuple[str, Callable[[], bytes]]]] = {
    make.__name__[1:]: (path, make)
    for path, makes in (
        (COMPLETIONS, (_lists, _objects, _depth, _digits, _numbers, _floats, _keys, _few_keys, _strings, _few_lists,
                       _few_numbers, _few_strings, _escapes, _surrogates, _quotes, _backslashes, _not_utf8, _spaces,
                       _words, _one_word, _specials)),
        (CHATS, (_messages, _special_messages, _nested_content, _template_variables)),
    )
    for make in makes
}  # fmt: skip
"""Bodies that are long to parse, check or tokenise: by name, where they are sent, and what makes them."""
BODIES_AT_ONCE: Final = 4


def body_attack(name: str, *, at_once: int = BODIES_AT_ONCE) -> Attack:
    """Some connections send this body at once."""
    path, make = BODIES[name]

    async def attack(target: Target) -> list[str]:
        raw = await asyncio.to_thread(lambda: post(path, make()))
        return await asyncio.gather(*(_status(target, raw) for _ in range(at_once)))

    return attack


async def _status(target: Target, raw: bytes) -> str:
    status, body = await http_attack(target, raw, timeout_s=BOUND_S_MAX)
    return f"{status} {body[:100].decode(errors='replace')}" if status >= 400 else str(status)


def _message(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**fields)


def _ids(count: int) -> inference_pb2.GenerateRequest:
    return _message(token_ids=inference_pb2.TokenIds(ids=[1] * count))


def _sampling(**fields: Any) -> inference_pb2.GenerateRequest:
    return _message(token_ids=inference_pb2.TokenIds(ids=[1]), sampling=inference_pb2.Sampling(**fields))


MESSAGES: Final[Mapping[str, Callable[[], inference_pb2.GenerateRequest]]] = {
    "ids": lambda: _ids(4 * MIB - 100),
    "ids of 16 MiB": lambda: _ids(16 * MIB - 100),
    "stops": lambda: _sampling(stop=["a"] * 1_000_000),
    "empty stops": lambda: _sampling(stop=[""] * 2_000_000),
    "stop tokens": lambda: _sampling(stop_token_ids=range(1_000_000)),
    "biases": lambda: _sampling(logit_bias=dict.fromkeys(range(270000), 1.0)),
    "text": lambda: _message(text="the sea " * (490_000)),
    "long text": lambda: _message(text="a" * (4 * MIB - 100)),
    "salt": lambda: _message(token_ids=inference_pb2.TokenIds(ids=[1]), cache_salt="a" * (4 * MIB - 100)),
    "chat": lambda: _message(
        chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="a")] * 300_000)
    ),
    "empty chat": lambda: _message(chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage()] * 2_000_000)),
}  # fmt: skip
"""Messages that are long to parse or to check."""


def message_attack(name: str, *, at_once: int = 4) -> Attack:
    """Some calls with this message at once, as clients that know of no limit send them."""

    async def attack(target: Target) -> list[str]:
        message = await asyncio.to_thread(MESSAGES[name])
        async with attacker_channel(target, *_OPTIONS) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            calls = [stub.GenerateUnary(message, timeout=BOUND_S_MAX) for _ in range(at_once)]
            return await asyncio.gather(*(_ended(call) for call in calls))

    return attack


async def _ended(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return f"{error.code()} {(error.details() or '')[:150]}"
    return "answered"


async def surplus_connections(target: Target) -> None:
    """Three thousand connections to the HTTP port, which say nothing."""
    await _connections(target.http, 3_000)


async def surplus_grpc_connections(target: Target) -> None:
    await _connections(target.grpc, 2_000)


async def _connections(endpoint: str, count: int, raw: bytes = b"", at_once: int = 200) -> None:
    writers = []
    try:
        for _ in range(count // at_once):
            made = await asyncio.gather(
                *(attacker_connection(endpoint) for _ in range(at_once)), return_exceptions=True
            )
            for each in made:
                if not isinstance(each, BaseException):
                    writers.append(each[1])
                    if raw:
                        each[1].write(raw)
    finally:
        for writer in writers:
            writer.transport.abort()


async def slow_heads(target: Target) -> None:
    """A thousand connections, each with a head that never ends."""
    await _connections(target.http, 1_000, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-a: b")


async def one_byte_chunks(target: Target) -> list[str]:
    """Four bodies of 256 KiB in chunks of a byte."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = head + b"1\r\n \r\n" * (256 << 10) + b"0\r\n\r\n"
    return await asyncio.gather(*(_status(target, raw) for _ in range(4)))


async def one_byte_pieces(target: Target) -> None:
    """A head and a body that come byte by byte, each in a packet of its own."""

    async def send() -> None:
        _, writer = await attacker_connection(target.http)
        try:
            for byte in post(COMPLETIONS, b" " * 3_000):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    await asyncio.gather(*(send() for _ in range(10)))


async def many_headers(target: Target) -> list[str]:
    """Heads of 30 KiB with thousands of headers, on 20 connections that are kept."""
    raw = b"GET /live HTTP/1.1\r\nhost: a\r\n" + b"a:b\r\n" * 6_000 + b"\r\n"
    return await asyncio.gather(*(_repeated(target.http, raw, 10) for _ in range(20)))


async def pipelined_calls(target: Target) -> None:
    """Ten connections with two thousand calls each, sent without waiting for answers."""
    raw = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n" * 2_000
    await asyncio.gather(*(_flood(target, raw) for _ in range(10)))


async def metrics_scrapes(target: Target) -> list[str]:
    """Four who read the metrics again and again."""
    raw = b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n"
    return await asyncio.gather(*(_repeated(target.metrics, raw, 40) for _ in range(4)))


async def bad_paths(target: Target) -> None:
    raw = b"GET /" + b"a/" * 10_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"
    await asyncio.gather(*(_repeated(target.http, raw, 40) for _ in range(4)))


async def endless_lines(target: Target) -> None:
    """A megabyte without the end of a line, on ten connections."""
    await asyncio.gather(*(_flood(target, b"A" * MIB) for _ in range(10)))


async def _repeated(endpoint: str, raw: bytes, count: int) -> str:
    """The last status."""
    reader, writer = await attacker_connection(endpoint)
    status = b""
    try:
        for _ in range(count):
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1]
            length = next(h for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
    except (EOFError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return status.decode()


async def _flood(target: Target, raw: bytes) -> None:
    """Send all, read for as long as something comes, five seconds at most."""
    reader, writer = await attacker_connection(target.http)
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(5):
            writer.write(raw)
            while await reader.read(1 << 16):
                pass
    writer.transport.abort()


async def health_watches(target: Target) -> None:
    """Two thousand watches of the health of a service, from one address."""
    async with attacker_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2_000)]
        await asyncio.sleep(1)
        for call in calls:
            call.cancel()


async def reflections(target: Target) -> None:
    """A thousand streams of reflection, each asked for a file."""

    async def ask(stub: Any) -> None:
        async def requests() -> Any:
            for _ in range(20):
                yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Inference")

        with suppress(grpc.aio.AioRpcError):
            async for _ in stub.ServerReflectionInfo(requests(), timeout=BOUND_S_MAX):
                pass

    async with attacker_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        await asyncio.gather(*(ask(stub) for _ in range(1_000)))


async def cancelled_calls(target: Target) -> None:
    """Two thousand calls that are cancelled as soon as they are made."""
    message = _message(token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]))
    async with attacker_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(40):
            calls = [stub.Generate(message, timeout=BOUND_S_MAX) for _ in range(50)]
            await asyncio.sleep(0.005)
            for call in calls:
                call.cancel()


async def refused_calls(target: Target) -> None:
    """Four thousand calls whose prompt is empty."""
    message = _message(token_ids=inference_pb2.TokenIds())
    async with attacker_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(20):
            await asyncio.gather(*(_ended(stub.GenerateUnary(message, timeout=BOUND_S_MAX)) for _ in range(200)))


async def slow_readers(target: Target) -> None:
    """Streams whose events nobody reads, for as long as the router lets them."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2_000, "stream": True, "logprobs": 5})
    async with AsyncExitStack() as stack:
        for _ in range(10):
            reader, writer = await attacker_connection(target.http)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            stack.callback(writer.transport.abort)
            writer.write(post(COMPLETIONS, body.encode()))
        await asyncio.sleep(3)


async def unread_answers(target: Target) -> None:
    """Whole answers that nobody reads: the list of models again and again."""
    raw = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 5_000
    async with AsyncExitStack() as stack:
        for _ in range(10):
            reader, writer = await attacker_connection(target.http)
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            stack.callback(writer.transport.abort)
            writer.write(raw)
        await asyncio.sleep(2)


async def internal_methods(target: Target) -> None:
    """What only nodes and operators call, on the public port."""
    async with attacker_channel(target) as channel:
        for _ in range(200):
            await asyncio.gather(
                _ended(decode_pb2_grpc.DecodeStub(channel).Cancel(decode_pb2.CancelRequest(), timeout=5)),
                _ended(node_pb2_grpc.NodeStub(channel).GetStatus(node_pb2.GetStatusRequest(), timeout=5)),
            )


async def long_metadata(target: Target) -> None:
    """Calls with as much metadata as gRPC takes, and more."""
    async with attacker_channel(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        message = _message(token_ids=inference_pb2.TokenIds())
        for size in (7_000, 60_000):
            metadata = [(f"x-{i}", "a" * 20) for i in range(size // 30)]
            for _ in range(10):
                await asyncio.gather(
                    *(_ended(stub.GenerateUnary(message, metadata=metadata, timeout=5)) for _ in range(50))
                )


_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def http2_preface() -> bytes:
    """What a client sends first."""
    return _PREFACE + http2_frame(4, 0, 0)


def call_frames(path: str, data: bytes, *, stream: int) -> bytes:
    """One whole call: its head, and all that its client says."""
    return http2_frame(1, 4, stream, _call_head(path.encode())) + http2_frame(0, 1, stream, data[:16_384])


def _call_head(path: bytes = b"/baton.v1.Inference/Generate") -> bytes:
    """HPACK, nothing indexed."""

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    return b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"a"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"grpc-timeout", b"5S"),
        )
    )


def _resets() -> bytes:
    head, reset = _call_head(), (8).to_bytes(4, "big")
    pairs = [http2_frame(1, 4, stream, head) + http2_frame(3, 0, stream, reset) for stream in range(1, 20_001, 2)]
    return b"".join(pairs)


def _indexed_heads() -> bytes:
    """Each byte of the block is one entry of the metadata: the one that the table of HPACK has taken up last."""
    block = _call_head() + b"\x40\x01x\x01y"
    block += b"\xbe" * (16_000 - len(block))
    return b"".join(http2_frame(1, 5, stream, block) for stream in range(1, 401, 2))


FRAMES: Final[Mapping[str, Callable[[], bytes]]] = {
    "indexed heads": _indexed_heads,
    "rapid resets": _resets,
    "settings": lambda: http2_frame(4, 0, 0) * 50_000,
    "pings": lambda: http2_frame(6, 0, 0, bytes(8)) * 50_000,
    "continuations": lambda: http2_frame(1, 0, 1, _call_head()) + http2_frame(9, 0, 1, b"\x00\x01a\x01b" * 200) * 5_000,
    "empty data": lambda: http2_frame(1, 4, 1, _call_head()) + http2_frame(0, 0, 1) * 100_000,
    "windows": lambda: http2_frame(8, 0, 0, (1).to_bytes(4, "big")) * 100_000,
    "priorities": lambda: b"".join(http2_frame(2, 0, stream, bytes(5)) for stream in range(1, 100_001, 2)),
    "open calls": lambda: b"".join(http2_frame(1, 4, stream, _call_head()) for stream in range(1, 20_001, 2)),
}  # fmt: skip
"""Frames of HTTP/2 that cost the receiver more than the sender."""


def frame_attack(name: str) -> Attack:
    async def attack(target: Target) -> None:
        raw = http2_preface() + await asyncio.to_thread(FRAMES[name])

        async def send() -> None:
            reader, writer = await attacker_connection(target.grpc)
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(3):
                    writer.write(raw)
                    await writer.drain()
                    while await reader.read(1 << 16):
                        pass
            writer.transport.abort()

        await asyncio.gather(*(send() for _ in range(4)))

    return attack


def _all() -> Iterator[tuple[str, Attack]]:
    for name in BODIES:
        yield f"body: {name}", body_attack(name)
    for name in MESSAGES:
        yield f"message: {name}", message_attack(name)
    for name in FRAMES:
        yield f"frames: {name}", frame_attack(name)
    for attack in (surplus_connections, surplus_grpc_connections, slow_heads, one_byte_chunks, one_byte_pieces,
                   many_headers, pipelined_calls, metrics_scrapes, bad_paths, endless_lines, health_watches,
                   reflections, cancelled_calls, refused_calls, slow_readers, unread_answers, internal_methods,
                   long_metadata):  # fmt: skip
        yield attack.__name__.replace("_", " "), attack


ATTACKS: Final[Mapping[str, Attack]] = dict(_all())


class AttackerProcess:
    """Plays attacks one after the other. Lives on the loop that started it; `close` ends it."""

    def __init__(self, process: asyncio.subprocess.Process, target: Target) -> None:
        self._process = process
        self._target = target

    @classmethod
    async def start(cls, target: Target) -> AttackerProcess:
        command = [sys.executable, "-m", "tests.support.attacks", target.grpc, target.http, target.metrics]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe), target)

    async def play(self, name: str) -> list[str]:
        """One attack, to its end. Its answers, each kind once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(name.encode() + b"\n")
        async with asyncio.timeout(ATTACK_S_MAX):
            line = await self._process.stdout.readline()
        assert line, f"the attacker has ended in the middle of '{name}'"
        answers: list[str] = json.loads(line)
        return answers

    async def close(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


def _play_all(target: Target) -> None:
    with asyncio.Runner() as runner:
        while name := sys.stdin.readline().strip():
            answers = runner.run(ATTACKS[name](target))
            print(json.dumps(sorted(set(answers or []))), flush=True)


if __name__ == "__main__":
    _play_all(Target(grpc=sys.argv[1], http=sys.argv[2], metrics=sys.argv[3]))
