"""The socket between a router's parent process and one of its workers: messages, open sockets, questions and answers.

Each frame is a length, whether a socket comes with it, and a message. What one side has not taken yet waits in the
other one's memory, up to a limit: a peer that lets so much wait is as good as gone.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

from batonpb import worker_pb2

from baton.errors import BatonError, Code, Reason
from baton.log import get_log
from baton.tasks import Tasks

log = get_log("workers")

MESSAGE_BYTES_MAX: Final = 64 << 20
UNSENT_BYTES_MAX: Final = 128 << 20
"""What may wait for a peer that does not read."""
QUESTIONS_MAX: Final = 65_536
"""Of one side without an answer."""
READ_BYTES: Final = 256 << 10
FRAMES_PER_SEND_MAX: Final = 64
RETRY_MS_MAX: Final = (1 << 32) - 1
"""Longer retry times are told as this one, 49 days."""
_HEAD: Final = struct.Struct("<I?")

SentT = TypeVar("SentT", worker_pb2.ToWorker, worker_pb2.FromWorker)
HeardT = TypeVar("HeardT", worker_pb2.ToWorker, worker_pb2.FromWorker)


class WorkerChannel(Generic[SentT, HeardT]):
    """One side. Lives on the running loop. Who makes it registers a handler for each kind of message that may come, by
    its name in the protocol, before the loop turns."""

    def __init__(
        self, sock: socket.socket, sent: type[SentT], heard: type[HeardT], *, on_lost: Callable[[str], None]
    ) -> None:
        """Owns `sock`. `on_lost` is called once, with the reason, when the other side is gone or takes nothing; not
        after `close`."""
        sock.setblocking(False)
        self._sock = sock
        self._sent: type[SentT] = sent
        self._heard: type[HeardT] = heard
        self._on_lost = on_lost
        self._loop = loop = asyncio.get_running_loop()
        self._tell: dict[str, Callable[[Any], None]] = {}
        self._tell_with_socket: dict[str, Callable[[Any, socket.socket | None], None]] = {}
        self._answer: dict[str, Callable[[Any], SentT]] = {}
        self._answer_later: dict[str, Callable[[Any], Awaitable[SentT]]] = {}
        self._begin: dict[str, Callable[[Any], None]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        self._unsent_bytes = 0
        self._unread = bytearray()
        self._fds: deque[int | None] = deque()
        """Of sockets whose messages are not whole yet. None: this process had no descriptor left for one."""
        self._answering = Tasks(loop, log, broken="an answer to another process of this router broke off")
        self.open = True
        loop.add_reader(sock, self._read)

    def on(self, kind: str, handler: Callable[[Any], None]) -> None:
        self._tell[kind] = handler

    def on_socket(self, kind: str, handler: Callable[[Any, socket.socket | None], None]) -> None:
        """The handler owns the socket. None: this process had no descriptor left, and does not have it."""
        self._tell_with_socket[kind] = handler

    def on_question(self, kind: str, answer: Callable[[Any], SentT]) -> None:
        """A BatonError that `answer` raises is raised where it was asked."""
        self._answer[kind] = answer

    def on_long_question(
        self,
        kind: str,
        answer: Callable[[Any], Awaitable[SentT]],
        *,
        begin: Callable[[Any], None] = lambda _asked: None,
    ) -> None:
        """As `on_question`; cancelled when the channel is closed. `answer` begins in a later turn of the loop, when
        further messages may have been taken. `begin` is called before those."""
        self._answer_later[kind] = answer
        self._begin[kind] = begin

    def send(self, message: SentT, sock: socket.socket | None = None) -> None:
        """In the order of these calls. A copy of `sock` goes with it: the caller keeps its own open until the other
        side says that it has one. Dropped once the channel is not open."""
        if not self.open:
            return
        body = message.SerializeToString()
        assert len(body) <= MESSAGE_BYTES_MAX, len(body)
        frame = memoryview(_HEAD.pack(len(body), sock is not None) + body)
        idle = not self._unsent
        self._unsent.append((frame, None if sock is None else sock.fileno()))
        self._unsent_bytes += len(frame)
        if self._unsent_bytes > UNSENT_BYTES_MAX:
            self._lose(f"it lets {self._unsent_bytes} bytes wait")
        elif idle:
            self._write()

    async def ask(self, message: SentT) -> Any:
        """What the other side answers with. The caller bounds the time.

        Raises BatonError as the other side did; PEER_UNREACHABLE where it is gone, TOO_MANY_CALLS.
        """
        if not self.open:
            raise _gone()
        if len(self._questions) >= QUESTIONS_MAX:
            raise BatonError(
                Reason.TOO_MANY_CALLS,
                f"{QUESTIONS_MAX} questions wait for another process of this router, the limit. Try again later.",
                retry_after_ms=1_000,
            )
        self._number += 1
        number = message.number = self._number
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._questions[number] = answer
        try:
            self.send(message)
            return await answer
        finally:
            self._questions.pop(number, None)

    async def close(self) -> None:
        """Idempotent. Questions without an answer fail."""
        self._shut()
        await self._answering.cancel()

    def _shut(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        for fd in self._fds:
            if fd is not None:
                socket.close(fd)
        self._fds.clear()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(_gone())

    def _lose(self, why: str) -> None:
        if self.open:
            self._shut()
            self._on_lost(why)

    def _write(self) -> None:
        try:
            while self._unsent:
                self._took(self._send_some())
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._write)
        except OSError as error:
            self._lose(f"it takes nothing: {error.strerror}")
        else:
            self._loop.remove_writer(self._sock)

    def _send_some(self) -> int:
        """A socket goes with the first byte of its own frame, so that it is there when the frame is read."""
        frame, fd = self._unsent[0]
        if fd is not None:
            sent = socket.send_fds(self._sock, [frame], [fd])
            self._unsent[0] = (frame, None)
            return sent
        frames: list[memoryview] = []
        for each, its_fd in self._unsent:
            if its_fd is not None or len(frames) == FRAMES_PER_SEND_MAX:
                break
            frames.append(each)
        return self._sock.sendmsg(frames)

    def _took(self, sent: int) -> None:
        self._unsent_bytes -= sent
        while sent:
            frame, fd = self._unsent.popleft()
            if sent < len(frame):
                self._unsent.appendleft((frame[sent:], fd))
                return
            sent -= len(frame)

    def _read(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"it cannot be read: {error.strerror}")
            return
        # The kernel gives one message's socket at a time. Without a descriptor left it drops it, and says so.
        self._fds.extend([None] if flags & socket.MSG_CTRUNC and not fds else fds)
        if not data:
            self._lose("it has ended")
            return
        self._unread += data
        begin = 0
        try:
            while self.open and begin + _HEAD.size <= len(self._unread):
                length, with_socket = _HEAD.unpack_from(self._unread, begin)
                assert length <= MESSAGE_BYTES_MAX, length
                end = begin + _HEAD.size + length
                if end > len(self._unread):
                    break
                message = self._heard.FromString(bytes(self._unread[begin + _HEAD.size : end]))
                begin = end
                self._take(message, with_socket)
        finally:
            del self._unread[:begin]  # nothing is taken twice, whatever happened

    def _take(self, message: HeardT, with_socket: bool) -> None:
        kind = message.WhichOneof("message")
        assert kind is not None
        value = getattr(message, kind)
        if message.answers:
            self._take_answer(message.answers, value)
            return
        try:
            if with_socket:
                fd = self._fds.popleft()
                sock = None if fd is None else socket.socket(fileno=fd)
                self._tell_with_socket[kind](value, sock)
            elif not message.number:
                self._tell[kind](value)
            elif kind in self._answer_later:
                self._begin[kind](value)
                self._answering.spawn(self._answer_in_time(message.number, self._answer_later[kind], value))
            else:
                self._reply(message.number, self._answer[kind](value))
        except Exception as error:
            # A bug with one message ends no other's work.
            refused = isinstance(error, BatonError) and bool(message.number)
            if not refused:
                log.exception("a message of another process of this router was not taken", kind=kind)
            if message.number:
                failure = error if isinstance(error, BatonError) else _internal()
                self._reply(message.number, self._sent(error=_error_to_proto(failure)))

    async def _answer_in_time(self, number: int, answer: Callable[[Any], Awaitable[SentT]], value: Any) -> None:
        try:
            reply = await answer(value)
        except BatonError as error:
            reply = self._sent(error=_error_to_proto(error))
        except Exception:
            log.exception("a question of another process of this router was not answered")
            reply = self._sent(error=_error_to_proto(_internal()))
        self._reply(number, reply)

    def _reply(self, number: int, reply: SentT) -> None:
        reply.answers = number
        self.send(reply)

    def _take_answer(self, number: int, value: Any) -> None:
        answer = self._questions.get(number)
        if answer is None or answer.done():  # who asked has given up
            return
        if isinstance(value, worker_pb2.PeerError):
            answer.set_exception(_error_from_proto(value))
        else:
            answer.set_result(value)


def _gone() -> BatonError:
    return BatonError(Reason.PEER_UNREACHABLE, "Another process of this router has ended. Try again.", retry_after_ms=0)


def _internal() -> BatonError:
    return BatonError(Reason.INTERNAL, "A process of this router failed to answer another one; its log says why.")


def _error_to_proto(error: BatonError) -> worker_pb2.PeerError:
    return worker_pb2.PeerError(
        reason=error.reason.value,
        code=error.code,
        text=error.message,
        field=error.field or "",
        retry_after_ms=None if error.retry_after_ms is None else min(error.retry_after_ms, RETRY_MS_MAX),
        metadata=error.metadata,
    )


def _error_from_proto(error: worker_pb2.PeerError) -> BatonError:
    return BatonError(
        Reason(error.reason),
        error.text,
        code=Code(error.code),
        field=error.field or None,
        retry_after_ms=error.retry_after_ms if error.HasField("retry_after_ms") else None,
        metadata=error.metadata,
    )
