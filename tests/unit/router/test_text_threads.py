"""Threads for texts: long texts do not hold short ones up."""

from __future__ import annotations

import asyncio
import threading

from router.text_threads import SHORT_BYTES_MAX, THREADS_EACH, TextThreads


def test_short_texts_go_past_long_ones() -> None:
    """More long texts than there are threads for them are being encoded, or wait. Short ones are done meanwhile; what
    waits when the router stops is not begun."""

    async def scene() -> None:
        threads, go_on = TextThreads(), threading.Event()
        long = [asyncio.create_task(threads.run(SHORT_BYTES_MAX + 1, go_on.wait)) for _ in range(2 * THREADS_EACH)]
        try:
            assert await asyncio.gather(*[threads.run(SHORT_BYTES_MAX, pow, 2, n) for n in range(4)]) == [1, 2, 4, 8]
            assert not any(each.done() for each in long)
        finally:
            threads.close()
            go_on.set()
        ended = await asyncio.gather(*long, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in ended] == [False, False, True, True]

    asyncio.run(scene())
