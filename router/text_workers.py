"""Where bodies are parsed, chats rendered and prompts encoded: a few lines at once, short ones in threads, long ones in
processes.

Python's parser of JSON keeps the interpreter's lock, and so do parts of a tokenizer. With a few MiB of text no stream
of the router would go on for a tenth of a second and more, whichever thread did it.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from baton.errors import BatonError, Reason
from baton.log import get_log
from router.byte_shares import ByteShares, TextOwner
from router.owner_turns import OwnerTurns
from router.prompts import PromptEncoder
from router.text_process import LENGTH_BYTES, Failure, Setup

log = get_log("router")

_T = TypeVar("_T")
_P = ParamSpec("_P")
Work = Callable[Concatenate[PromptEncoder, bytes | bytearray, _P], _T]
"""A function of a module, which a process finds by its name; a text and what else it needs."""

THREADS: Final = 2
PROCESSES: Final = 2
INLINE_BYTES_MAX: Final = 2_048
"""Takes a millisecond at most, and to hand it to a thread and back costs as much as most of them take."""
SHORT_BYTES_MAX: Final = 16_384
"""Takes some milliseconds; a text of the largest size that is taken may take seconds."""
TEXT_MS_MAX: Final = 20_000
"""For one text in a process."""
HELD_BYTES_MAX: Final = 128 << 20
"""Of long texts that come, wait or are read, over HTTP and gRPC together."""
_PIECE_BYTES: Final = 1 << 16


class TextWorkers:
    """However many long texts wait, short ones wait for short ones only, and among long ones each owner has its turn.
    Lives on one event loop."""

    def __init__(self, prompts: PromptEncoder, spread: Callable[[], float]) -> None:
        """`spread` gives places from 0 to 1, for retry times."""
        self._prompts = prompts
        self._shares = ByteShares(HELD_BYTES_MAX, spread)
        # Threads of our own: the loop's resolve names of hosts.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        setup = Setup(folder=prompts.folder, chars_max=prompts.chars_max, tool_form=prompts.tool_form)
        self._idle = [_TextProcess(setup) for _ in range(PROCESSES)]
        self._free = PROCESSES
        self._turns: OwnerTurns[asyncio.Future[None]] = OwnerTurns()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def holding(self, owner: TextOwner) -> AbstractContextManager[Callable[[int], None]]:
        """As `ByteShares.holding`, for a text that comes in parts, from when it is long to the end of `run_held`."""
        return self._shares.holding(owner)

    async def run(
        self, owner: TextOwner, work: Work[_P, _T], raw: bytes | bytearray, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """As `run_held`; and TOO_MANY_CALLS where its owner, or all of them, hold too many bytes."""
        with self._shares.holding(owner) as hold:
            if len(raw) > SHORT_BYTES_MAX:
                hold(len(raw))
            return await self.run_held(owner, work, raw, *args, **kwargs)

    async def run_held(
        self, owner: TextOwner, work: Work[_P, _T], raw: bytes | bytearray, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """`work(prompts, raw, *args)`. Raises what it raises; INTERNAL if a process ends, DEADLINE if it takes long."""
        assert not kwargs
        if len(raw) <= INLINE_BYTES_MAX:
            return work(self._prompts, raw, *args, **kwargs)
        if len(raw) <= SHORT_BYTES_MAX:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, self._prompts, raw, *args)
        await self._turn(owner.names[-1:])
        if self._closed:
            self._end_turn()
            raise BatonError(Reason.NODE_DRAINING, "The router is stopping: another one takes the request.")
        task = asyncio.create_task(self._in_process(work, raw, args))
        self._running.add(task)
        task.add_done_callback(self._ended)
        # What a process has begun it ends, whether the client waits or not.
        return await asyncio.shield(task)

    async def _in_process(self, work: Work[_P, _T], raw: bytes | bytearray, args: tuple[Any, ...]) -> _T:
        process = self._idle.pop()
        try:
            result: _T = await process.ask(work, raw, args)
            return result
        finally:
            self._idle.append(process)
            self._end_turn()

    async def _turn(self, owner: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.add(owner, turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._turns.leave(owner, turn)
            if not turn.cancelled():
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        while (turn := self._turns.take()) is not None:
            if not turn.done():  # or its client has just left
                turn.set_result(None)
                return
        self._free += 1

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the client may have left: nobody else looks

    async def close(self) -> None:
        """What waits is not begun any more, and what runs in a process is given up. Idempotent."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for process in self._idle:
            await process.close()


class _TextProcess:
    """One process, started when it is first needed and when it has ended. It ends with the router: its input does."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._child: asyncio.subprocess.Process | None = None

    async def ask(self, work: Callable[..., Any], raw: bytes | bytearray, args: tuple[Any, ...]) -> Any:
        """One at a time."""
        if self._child is not None and self._child.returncode is not None:
            await self.close()  # it has ended since the last text
        try:
            async with asyncio.timeout(TEXT_MS_MAX / 1000):
                if self._child is None:
                    self._child = await self._start()
                    await self._send(self._child, pickle.dumps(self._setup))
                await self._send(self._child, pickle.dumps((work, args)))
                await self._send(self._child, raw)
                answer = await self._receive(self._child)
        except TimeoutError:
            await self.close()
            text = f"The text of the request took longer than {TEXT_MS_MAX // 1000} s to read, the limit."
            raise BatonError(Reason.DEADLINE, text) from None
        except (EOFError, ConnectionError) as error:
            await self.close()
            log.error("a process that reads long texts has ended")
            raise BatonError(Reason.INTERNAL, "The process that reads long texts has ended; send it again.") from error
        except BaseException:
            await self.close()  # its answer would be taken for that to the next text
            raise
        if isinstance(answer, BatonError):
            raise answer
        if isinstance(answer, Failure):
            raise RuntimeError(answer.traceback)
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        # -P: a folder of the user's that is called router is not ours.
        command = [sys.executable, "-P", "-c", "from router.text_process import main; main()"]
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)

    async def _send(self, child: asyncio.subprocess.Process, data: bytes | bytearray) -> None:
        """In pieces: asyncio copies what a pipe does not take at once."""
        assert child.stdin is not None
        child.stdin.write(len(data).to_bytes(LENGTH_BYTES, "big"))
        for start in range(0, len(data), _PIECE_BYTES):
            child.stdin.write(data[start : start + _PIECE_BYTES])
            await child.stdin.drain()

    async def _receive(self, child: asyncio.subprocess.Process) -> Any:
        assert child.stdout is not None
        count = int.from_bytes(await child.stdout.readexactly(LENGTH_BYTES), "big")
        return pickle.loads(await child.stdout.readexactly(count))

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.returncode is None:
                child.kill()
            await child.wait()
