"""A channel whose new calls use the newest certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from baton.tls import Tls


class _Channel:
    """With one certificate. It closes with its last call once it is retired."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.closing: asyncio.Future[None] | None = None
        self._retired = False
        self._loop = asyncio.get_running_loop()

    def began(self, call: Any) -> Any:
        self.calls += 1
        call.add_done_callback(self._ended)
        return call

    def retire(self) -> None:
        self._retired = True
        self._close_if_idle()

    def _ended(self, _call: Any) -> None:
        self.calls -= 1
        # A call that nobody waits for ends where it is collected, on any thread, or behind the loop.
        if self._retired and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self.calls and self.closing is None:
            self.closing = self._loop.create_task(self.channel.close())


class RenewedChannel:
    """What stubs need of a `grpc.aio.Channel`. When the certificate files have changed, the next call opens a channel
    with them; running calls stay where they are. Lives on one event loop."""

    def __init__(self, tls: Tls, open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel]) -> None:
        self._tls = tls
        self._open = open_channel
        self._generation = tls.generation
        self._current = _Channel(open_channel(tls.channel_credentials()))
        self._retired: list[_Channel] = []

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._caller("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._caller("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._caller("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self._caller("stream_stream", args, kwargs)

    def _caller(self, kind: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        made: tuple[_Channel, Callable[..., Any]] | None = None

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            nonlocal made
            current = self._newest()
            if made is None or made[0] is not current:
                made = (current, getattr(current.channel, kind)(*args, **kwargs))
            return current.began(made[1](*call_args, **call_kwargs))

        return call

    def _newest(self) -> _Channel:
        generation = self._tls.look()
        if generation != self._generation:
            self._generation = generation
            before, self._current = self._current, _Channel(self._open(self._tls.channel_credentials()))
            self._retired = [each for each in self._retired if each.closing is None or not each.closing.done()]
            self._retired.append(before)
            before.retire()
        return self._current

    async def close(self) -> None:
        """Close all, with the calls that use them."""
        for each in (*self._retired, self._current):
            await (each.closing or each.channel.close())
