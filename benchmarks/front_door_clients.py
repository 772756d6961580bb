"""The clients of benchmarks/front_door.py: one process, one thread, raw sockets. Reads jobs as lines of JSON, answers
each with one.

The same for all servers, and cheap: it counts events and does not look into them, but where a job asks how old tokens
are. Over gRPC it speaks as much HTTP/2 as a client must. Every stream has a connection of its own, from one of many
addresses of this machine.
"""

from __future__ import annotations

import json
import random
import re
import resource
import select
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from batonpb import inference_pb2

from benchmarks.front_door_cpu import Spent, add, connections, difference, memory_bytes, spent_by_all, tree
from benchmarks.front_door_tokens import age_ms

PROMPT_TOKENS: Final = 16
WARM_EVENTS: Final = 8
"""Of every stream, before tokens are measured apart from requests."""
STARTING_MAX: Final = 32
"""Streams that wait for their first token at the same time: what a server does with a burst is not the question."""
SILENCE_S_MAX: Final = 45.0
SAMPLE_S: Final = 5.0
AGES_MS_MAX: Final = 4_000
AGED_OF: Final = 4
"""One stream of so many is read, where ages are asked for: reading costs the clients more than all else."""
FILES_OF_STREAM: Final = 3
"""A router has three for a connection of gRPC."""
FILES_SPARE: Final = 256
ADDRESSES_MAX: Final = 2_000
_ERROR: Final = re.compile(rb'"message": ?"([^"]*)')
_TEXT: Final = re.compile(rb'"text": ?"([ 0-9]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    door: str
    """http or grpc."""
    address: str
    pids: dict[str, int]
    """Of the processes to measure, by name."""
    streams: int
    tokens: int
    model: str = "mock"
    waves: int = 1
    """Answers of each stream; the next ones begin when all have ended."""
    streaming: bool = True
    seconds: float = 0.0
    """Streams ask again and again for so long, in place of waves. Their first answers have all lengths, so that they
    do not end together."""
    ages: bool = False
    """How old tokens are, and whether each has come once: from when all answers may have had their full length."""
    balance: str = ""
    """The process whose children's connections are counted."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    requests: int = 0
    tokens: int = 0
    events: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    all: Spent = field(default_factory=dict)
    window: Spent = field(default_factory=dict)
    """While every stream had its first tokens and none had ended."""
    window_events: int = 0
    window_s: float = 0.0
    took_s: float = 0.0
    window_client_s: float = 0.0
    """What the clients have used in it."""
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    settled_s: float = 0.0
    """When the first answers of all streams had ended, of those with `seconds`."""
    ages: list[float] = field(default_factory=list)
    """p50, p99 and the maximum, ms."""
    held: list[int] = field(default_factory=list)


class Stream(ABC):
    """One connection, with one request at a time."""

    def __init__(self, job: Job, number: int) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.bind((f"127.0.{1 + number // 250 % 8}.{1 + number % 250}", 0))
        self.job = job
        self.tokens = job.tokens
        self.is_open = False
        self.aged = job.ages and number % AGED_OF == 0
        self.events = 0
        self.starting = False
        self.ended = False
        self.error = ""
        self.texts: list[int] = []
        self.read_tokens = 0

    def ask(self, prompt: Sequence[int], tokens: int) -> None:
        if not self.is_open:  # only now: servers do not wait long for the first request
            host, _, port = self.job.address.rpartition(":")
            self.sock.connect((host, int(port)))
            self.sock.setblocking(False)
            self.is_open = True
            self._opened()
        self.tokens, self.read_tokens = tokens, 0
        self.events, self.ended, self.error = 0, False, ""
        self.sock.send(self._request(prompt))

    def read(self) -> int:
        """Events that came."""
        try:
            data = self.sock.recv(262_144)
        except OSError as error:
            data, self.error = b"", type(error).__name__
        if not data:
            self.error = self.error or "closed"
            self.ended = True
            return 0
        found = self._take(data)
        self.events += found
        self.read_tokens += len(self.texts)
        if self.ended and self.aged and self.read_tokens != self.tokens and not self.error:
            self.error = "an answer with tokens too few or too many"
        return found

    def _opened(self) -> None:
        """Sends nothing of its own."""
        return

    @abstractmethod
    def _request(self, prompt: Sequence[int]) -> bytes: ...

    @abstractmethod
    def _take(self, data: bytes) -> int: ...


class HttpStream(Stream):
    _tail = b""

    def _request(self, prompt: Sequence[int]) -> bytes:
        asked = {
            "model": self.job.model, "prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True,
            "temperature": 0, "stream": self.job.streaming,
        }  # fmt: skip
        body = json.dumps(asked).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: front\r\ncontent-type: application/json\r\n"
        return head + b"content-length: %d\r\n\r\n" % len(body) + body

    def _take(self, data: bytes) -> int:
        if data.startswith(b"HTTP/1.1") and not data.startswith(b"HTTP/1.1 200"):
            self.error, self.ended = f"{data[9:60].splitlines()[0].decode()} {_message(data)}", True
        data = self._tail + data
        if not self.job.streaming:
            self._tail = data
            head, _, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            self.ended = self.ended or (length is not None and len(body) >= int(length[1]))
            self._tail = b"" if self.ended else data
            return int(self.ended)
        if data.endswith(b"0\r\n\r\n"):
            self.ended, self._tail = True, b""
            if b"data: [DONE]" not in data[-64:]:
                self.error = self.error or f"an answer without its end {_message(data)}"
        else:
            cut = data.rfind(b"\n") + 1
            # All of an end stays together.
            cut = data.rfind(b"data: [DONE]") if b"data: [DONE]" in data[-64:] else cut
            self._tail, data = data[cut:], data[:cut]
        if self.aged:
            self.texts += [int(each) for text in _TEXT.findall(data) for each in text.split()]
        return data.count(b'data: {"')


def _message(data: bytes) -> str:
    """Of an error, short, and without the ids that make each of its kind another text."""
    found = _ERROR.search(data)
    return "" if found is None else re.sub(r"[0-9a-f]{16,}", "ID", found[1].decode(errors="replace"))[:200]


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


class GrpcStream(Stream):
    """HTTP/2 with windows so large that they need no updates."""

    def __init__(self, job: Job, number: int) -> None:
        super().__init__(job, number)
        self._number = -1
        self._frames = self._messages = b""
        pairs = (
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/baton.v1.Inference/Generate"),
            (b":authority", b"front"), (b"te", b"trailers"), (b"content-type", b"application/grpc"),
        )  # fmt: skip
        self._head = b"".join(_header(name, value) for name, value in pairs)

    def _opened(self) -> None:
        settings = struct.pack(">HI", 4, 2**31 - 1) + struct.pack(">HI", 3, 0)
        window = _frame(8, 0, 0, struct.pack(">I", 2**31 - 65_536))
        self.sock.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, settings) + window)

    def _request(self, prompt: Sequence[int]) -> bytes:
        self._number += 2
        sampling = inference_pb2.Sampling(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        asked = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
        body = asked.SerializeToString()
        message = b"\0" + struct.pack(">I", len(body)) + body
        return _frame(1, 4, self._number, self._head) + _frame(0, 1, self._number, message)

    def _take(self, data: bytes) -> int:
        data = self._frames + data
        at, found = 0, 0
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if len(data) < end:
                break
            kind, flags = data[at + 3], data[at + 4]
            payload = data[at + 9 : end]
            at = end
            if kind == 0:
                found += self._messages_of(payload)
            elif kind == 1 and flags & 1:
                self._end()
            elif kind in (4, 6) and not flags & 1:
                self.sock.send(_frame(kind, 1, 0, payload if kind == 6 else b""))
            elif kind in (3, 7):
                self.error, self.ended = f"frame {kind}", True
        self._frames = data[at:]
        return found

    def _messages_of(self, payload: bytes) -> int:
        data = self._messages + payload
        at, found = 0, 0
        while len(data) - at >= 5:
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if len(data) < end:
                break
            tag = data[at + 5] if end > at + 5 else 0
            if tag == 0x12:
                found += 1
                if self.aged:
                    self.texts += inference_pb2.GenerateEvent.FromString(data[at + 5 : end]).tokens.ids
            elif tag == 0x1A:
                self._finished = True
            at = end
        self._messages = data[at:]
        return found

    def _end(self) -> None:
        self.ended = True
        if not self._finished:
            self.error = "a call without its end"
        self._finished = False

    _finished = False


class Clients:
    """Plays one job."""

    def __init__(self, job: Job) -> None:
        problem = files_problem(job.streams)
        assert problem is None, problem
        self._job = job
        self._rng = random.Random(job.streams)
        self._poll = select.epoll()
        kind = HttpStream if job.door == "http" else GrpcStream
        self._streams: dict[int, Stream] = {}
        for number in range(job.streams):
            stream = kind(job, number)
            self._streams[stream.sock.fileno()] = stream
        self._out = Outcome()
        self._ages: Counter[int] = Counter()
        self._first = set(self._streams) if job.seconds else set()
        self._mark: tuple[Spent, int, float, float] | None = None

    def play(self) -> Outcome:
        job, out = self._job, self._out
        begin_s, before = time.monotonic(), spent_by_all(job.pids)
        self._until_s, self._sampled_s = begin_s + job.seconds, begin_s
        self._begin_s = begin_s
        for _ in range(job.waves):
            self._wave()
        self._close_window()
        out.all = difference(spent_by_all(job.pids), before)
        out.took_s = time.monotonic() - begin_s
        if job.balance:
            port = int(job.address.rpartition(":")[2])
            out.held = [connections(child, port) for child in tree(job.pids[job.balance])]
        if self._ages:
            out.ages = [_percentile(self._ages, share) / 10 for share in (0.5, 0.99, 1.0)]
        for stream in self._streams.values():
            stream.sock.close()
        self._poll.close()
        return out

    def _wave(self) -> None:
        waiting = deque(self._streams.values())
        self._cold, self._starting, self._running, self._mark = len(waiting), 0, len(waiting), None
        self._start(waiting)
        while self._running:
            ready = self._poll.poll(SILENCE_S_MAX)
            if not ready:
                self._error("silence")
                return
            for handle, _ in ready:
                self._turn(self._streams[handle], waiting)
            now_s = time.monotonic()
            if self._job.seconds and now_s > self._sampled_s + SAMPLE_S:
                self._sample(now_s)
            if self._job.seconds and now_s > self._until_s:
                return  # whatever still runs: all have ended often enough

    def _sample(self, now_s: float) -> None:
        self._sampled_s = now_s
        memory = {name: memory_bytes(pid) for name, pid in self._job.pids.items()}
        self._out.memory.append((now_s - self._begin_s, memory))

    def _start(self, waiting: deque[Stream]) -> None:
        at_once = max(STARTING_MAX, self._job.streams // 16 if self._job.seconds else 0)
        while waiting and self._starting < at_once:
            stream = waiting.popleft()
            stream.starting = True
            is_first = stream.sock.fileno() in self._first
            self._ask(stream, self._rng.randint(1, self._job.tokens) if is_first else self._job.tokens)
            self._starting += 1

    def _ask(self, stream: Stream, tokens: int) -> None:
        prompt = [self._job.streams, *(self._rng.randrange(3, 500) for _ in range(PROMPT_TOKENS - 1))]
        stream.ask(prompt, tokens)
        # Not while it is idle: a server may close it then.
        self._poll.register(stream.sock, select.EPOLLIN)
        self._out.requests += 1

    def _turn(self, stream: Stream, waiting: deque[Stream]) -> None:
        before = stream.events
        found = stream.read()
        self._out.events += found
        if stream.texts:
            if self._out.settled_s:
                now_s = time.monotonic()
                for each in stream.texts:
                    self._ages[min(int(10 * age_ms(each, now_s)), 10 * AGES_MS_MAX)] += 1
            stream.texts.clear()
        if stream.starting and (found or stream.ended):
            stream.starting = False
            self._starting -= 1
            self._start(waiting)
        if before < WARM_EVENTS <= stream.events:
            self._cold -= 1
            if self._cold == 0 and not self._job.seconds and self._running == len(self._streams):
                self._open_window()
        if stream.ended:
            self._ended(stream)

    def _open_window(self) -> None:
        self._mark = spent_by_all(self._job.pids), self._out.events, time.monotonic(), time.process_time()

    def _close_window(self) -> None:
        if self._mark is None:
            return
        spent_before, events, begin_s, used_s = self._mark
        self._mark = None
        out = self._out
        out.window_client_s += time.process_time() - used_s
        out.window_s += time.monotonic() - begin_s
        add(out.window, difference(spent_by_all(self._job.pids), spent_before))
        out.window_events += out.events - events

    def _ended(self, stream: Stream) -> None:
        self._poll.unregister(stream.sock)
        if stream.error:
            self._error(stream.error)
        else:
            self._out.tokens += stream.tokens
        if not self._job.seconds:
            self._close_window()
        elif not stream.error:
            self._settle(stream)
            self._ask(stream, self._job.tokens)
            return
        self._running -= 1

    def _settle(self, stream: Stream) -> None:
        """Once all first answers have ended the streams are at all places of their answers."""
        self._first.discard(stream.sock.fileno())
        if not self._first and not self._out.settled_s:
            now_s = time.monotonic()
            self._out.settled_s = now_s - self._begin_s
            self._sample(now_s)
            self._open_window()

    def _error(self, what: str) -> None:
        self._out.errors[what] = self._out.errors.get(what, 0) + 1


def _percentile(counts: Counter[int], share: float) -> int:
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            break
    return value


def files_problem(streams: int) -> str | None:
    """Why this machine cannot have so many connections, or None; then this process may."""
    needed = streams + FILES_SPARE
    if streams > ADDRESSES_MAX:
        return f"{streams} streams are more than the {ADDRESSES_MAX} addresses that the clients have"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_OF_STREAM * streams + FILES_SPARE:
        return (
            f"{streams} streams need {FILES_OF_STREAM * streams + FILES_SPARE} open files in a process, and {hard} are "
            "allowed: raise the limit (ulimit -Hn), or ask for fewer streams"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(asdict(Clients(Job(**json.loads(line))).play())), flush=True)


if __name__ == "__main__":
    main()
