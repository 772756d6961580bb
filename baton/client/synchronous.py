"""The client for programs without asyncio: `AsyncClient` on an event loop of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from baton.client.answer import Answer, Piece, Prompt
from baton.client.asynchronous import CLOSED, AsyncClient, AsyncStream, ClientOptions, RequestOptions

_T = TypeVar("_T")


class Client:
    """Asks routers. Any number of threads may use one; close it, or use it by `with`. After a fork each process needs
    its own."""

    def __init__(self, routers: str | Sequence[str] = "127.0.0.1:7000", **options: Unpack[ClientOptions]) -> None:
        """As `AsyncClient`. Raises BatonError BAD_ENDPOINT."""
        self._client = AsyncClient(routers, **options)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        """Nothing new is taken. Under the lock."""
        self._ending = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="baton-client", daemon=True)
        self._thread.start()

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Answer:
        """The whole answer. Ctrl-C cancels the request. Raises BatonError."""
        return self._run(self._client.generate(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """The answer as it comes. Nothing is sent before the first piece is asked for."""
        return Stream(self, self._client.stream(prompt, **options))

    def close(self) -> None:
        """Ends what is under way: threads that wait for it get a RuntimeError. Idempotent."""
        if self._pid != os.getpid():
            return  # it is the parent's
        with self._lock:
            self._closed = True
        with self._ending:
            if self._loop.is_closed():
                return
            _wait(asyncio.run_coroutine_threadsafe(self._end(), self._loop))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @property
    def closed(self) -> bool:
        """Also in a process that was forked."""
        return self._closed or self._pid != os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self._loop.shutdown_asyncgens()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._pid != os.getpid():
            work.close()
            raise RuntimeError("This client belongs to the process that has made it: make one after the fork.")
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return _wait(future)


def _wait(future: concurrent.futures.Future[_T]) -> _T:
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise RuntimeError(CLOSED) from None
    finally:
        future.cancel()  # Ctrl-C; else it is done


class Stream(Iterator[Piece]):
    """One answer as it comes. Whoever leaves it early closes it, best by `with`: that ends the request."""

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        """Made by `Client.stream`."""
        self._client = client
        self._stream = stream

    @property
    def answer(self) -> Answer:
        """What there is so far; `finish` says whether that is all."""
        return self._stream.answer

    def __next__(self) -> Piece:
        piece = self._client._run(self._next())
        if piece is None:
            raise StopIteration
        return piece

    async def _next(self) -> Piece | None:
        return await anext(self._stream, None)

    def close(self) -> None:
        """Leave it: an answer that is not whole is cancelled. Idempotent."""
        if not self._client.closed:
            self._client._run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
