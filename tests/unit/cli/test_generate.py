"""`baton generate` and a router that does not keep its word."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from batonpb import inference_pb2

from cli.client import InferenceClient
from cli.generate import AnswerPrinter, _stream


class CutOff:
    """Ends the stream of an answer behind its first token, without an error."""

    async def events(self, _: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateEvent, None]:
        yield inference_pb2.GenerateEvent(started=inference_pb2.Started(request_id="r"))
        yield inference_pb2.GenerateEvent(tokens=inference_pb2.Tokens(first_index=0, ids=[5]))


def test_a_part_of_an_answer_does_not_pass_for_the_answer() -> None:
    printer = AnswerPrinter(io.StringIO(), as_ids=True, answers=1, stats=False)
    streaming = _stream(cast(InferenceClient, CutOff()), inference_pb2.GenerateRequest(), printer)
    with pytest.raises(AssertionError, match="without an end"):
        asyncio.run(streaming)
