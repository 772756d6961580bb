"""A client of the OpenAI endpoints that knows Last-Event-ID, and nothing else of ours; or one that does not stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from baton.client import Answer, TokenLogprobs
from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason
from tests.faults.asking import ANSWER_S_MAX
from tests.faults.questions import Question

TRY_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
PAUSE_S: Final = 0.05

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class WebAsker:
    """Asks routers in turn, and the next one where it must; connections are used again. The ids of the tokens
    are their names beside their log-probabilities: without a tokenizer a router has no others."""

    def __init__(self, endpoints: Sequence[str], *, whole: bool = False) -> None:
        """`whole`: answers in one piece, each by one call, which is not repeated."""
        self._endpoints = endpoints
        self._whole = whole
        self._turn = 0
        self._idle: dict[str, list[_Connection]] = {endpoint: [] for endpoint in endpoints}

    async def ask(self, question: Question, *, came: Callable[[], None]) -> Answer:
        body = {"model": "mock", "prompt": question.prompt, "max_tokens": question.max_tokens}
        body |= {"stream": not self._whole, "resumable": not self._whole, **question.sampling, "logprobs": 1}
        chunks, last_id, turn, attaches = list[Mapping[str, Any]](), "", self._turn, 0
        self._turn += 1
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                while not chunks or chunks[-1] != {}:
                    endpoint = self._endpoints[turn % len(self._endpoints)]
                    try:
                        async with aclosing(self._chunks(endpoint, body, last_id)) as coming:
                            async for id_, chunk in coming:
                                last_id = id_ or last_id
                                chunks.append(chunk)
                                came()
                    except (OSError, EOFError) as error:
                        if self._whole:
                            raise BatonError(Reason.PEER_UNREACHABLE, f"No answer in one piece: {error}") from error
                        turn += 1
                        attaches += last_id != ""
                        await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            text = f"No answer within {ANSWER_S_MAX:g} s: {len(chunks)} chunks, {attaches} attaches."
            raise BatonError(Reason.PEER_UNREACHABLE, text) from None
        return _answer(chunks, attaches)

    async def _chunks(
        self, endpoint: str, body: Mapping[str, Any], last_id: str
    ) -> AsyncGenerator[tuple[str, Mapping[str, Any]], None]:
        """Each with the id of its event; an empty one at the end of the stream. Raises OSError or EOFError where it
        ends sooner or the router asks to come again, BatonError where it refuses for good."""
        idle = self._idle[endpoint]
        reader, writer = idle.pop() if idle else await asyncio.open_connection(*split_endpoint(endpoint))
        keep = False
        try:
            text = json.dumps(body)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(text)}\r\n"
            head += f"Last-Event-ID: {last_id}\r\n" if last_id else ""
            writer.write(f"{head}\r\n{text}".encode())
            status, headers = await _head(reader)
            if status != 200:
                said = (await reader.readexactly(int(headers["content-length"]))).decode()
                if status in TRY_AGAIN:
                    raise ConnectionError(said)
                raise BatonError(Reason.BAD_FIELD, f"HTTP {status}: {said}")
            async for id_, chunk in _whole(reader, headers) if self._whole else _chunks(reader):
                yield id_, chunk
            # A router may end an idle connection just as it is used again: that is no lost answer.
            keep = not self._whole and headers.get("connection") != "close"
            yield "", {}
        finally:
            if keep:
                idle.append((reader, writer))
            else:
                writer.close()

    async def close(self) -> None:
        for idle in self._idle.values():
            for _, writer in idle:
                writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, Mapping[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    pairs = (line.partition(": ") for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value for name, _, value in pairs}


async def _whole(
    reader: asyncio.StreamReader, headers: Mapping[str, str]
) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
    yield "", json.loads(await reader.readexactly(int(headers["content-length"])))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
    """Raises OSError or EOFError where the stream ends too soon."""
    done = False
    async for event in _events(reader):
        done |= event["data"] == "[DONE]"
        if not done:
            chunk = json.loads(event["data"])
            if "error" in chunk:
                raise ConnectionError(event["data"])
            yield event.get("id", ""), chunk
    if not done:
        raise EOFError


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[Mapping[str, str]]:
    """In a chunked body, to its end: the fields of each."""
    text, event = "", dict[str, str]()
    while size := int(await reader.readuntil(b"\r\n"), 16):
        text += (await reader.readexactly(size + 2))[:-2].decode()
        *lines, text = text.split("\n")
        for line in lines:
            if line:
                name, _, value = line.partition(": ")
                event[name] = value
            elif event:
                yield event
                event = {}
    await reader.readuntil(b"\r\n")


def _answer(chunks: Sequence[Mapping[str, Any]], attaches: int) -> Answer:
    """Raises AssertionError where the end is missing or comes twice."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    ids, logprobs = list[int](), list[TokenLogprobs]()
    for found in [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]:
        ids.extend(map(int, found["tokens"]))
        for value, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
            logprobs.append(TokenLogprobs(logprob=value, top_ids=map(int, top), top_logprobs=top.values()))
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    assert len(reasons) == 1, reasons
    return Answer(ids=ids, finish=reasons[0], logprobs=logprobs, attaches=attaches)
