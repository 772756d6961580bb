"""The gRPC service of a router, with a node of the test's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from baton.errors import BatonError, Reason
from router.config import RouterConfig
from router.service import InferenceService


def test_a_client_that_leaves_as_it_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer ends with the error that nobody is left to be told: that is no failure."""
    broken: list[str] = []

    async def run(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise BatonError(Reason.TAKEN_OVER, "It has gone on by another call.")

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: broken.append(context["message"]))
        service = InferenceService(MagicMock(config=RouterConfig(), run=run))
        monkeypatch.setattr(service, "_call", lambda *_: SimpleNamespace())
        call = asyncio.create_task(service._send(None, None, MagicMock(), None))
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        await asyncio.sleep(0)

    asyncio.run(scene())
    assert broken == []
