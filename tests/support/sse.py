"""A client of server-sent events that knows what the standard says of them, and nothing of us."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final

DONE: Final = "[DONE]"


class Stream:
    """What one client has of a stream, over all its connections."""

    def __init__(self) -> None:
        self.last_id = ""
        self.retry_ms: int | None = None
        self.data: list[str] = []
        self.texts: defaultdict[int, str] = defaultdict(str)
        """By index of the choice."""
        self.ends: defaultdict[int, list[str]] = defaultdict(list)
        self.ids: defaultdict[int, list[int]] = defaultdict(list)
        self.logprobs: defaultdict[int, list[Any]] = defaultdict(list)
        self.usage: list[Any] = []
        self.heads: set[tuple[str, int, str, str]] = set()
        self.error: Any = None

    @property
    def done(self) -> bool:
        return bool(self.data) and self.data[-1] == DONE and self.error is None

    def headers(self) -> dict[str, str]:
        """To attach with."""
        return {"Last-Event-ID": self.last_id}

    def read(self, lines: Iterable[bytes], *, events: int | None = None) -> None:
        """Take in what comes, up to so many events. What is no whole event when the connection ends is dropped."""
        for data, count in zip(self._events(lines), range(1, 1 << 30), strict=False):
            self.data.append(data)
            if data != DONE:
                self._take(json.loads(data))
            if count == events:
                return

    def _events(self, lines: Iterable[bytes]) -> Iterator[str]:
        data: list[str] = []
        last_id = self.last_id
        for raw in lines:
            line = raw.decode().rstrip("\n")
            name, _, value = line.partition(": ")
            if not raw.endswith(b"\n"):
                return
            if not line:
                self.last_id = last_id
                yield "\n".join(data)
                data = []
            elif name == "data":
                data.append(value)
            elif name == "id":
                last_id = value
            elif name == "retry":
                assert self.retry_ms is None or not self.data or value == str(self.retry_ms)
                self.retry_ms = int(value)

    def _take(self, chunk: Any) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.heads.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        if chunk.get("usage") is not None:
            self.usage.append(chunk["usage"])
        for choice in chunk["choices"]:
            index = choice["index"]
            self.texts[index] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.ids[index] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                self.ends[index].append(choice["finish_reason"])
            if (found := choice["logprobs"]) is not None:
                self.logprobs[index] += (
                    found["content"] if "content" in found else zip(*(found[name] for name in _LISTS), strict=True)
                )


_LISTS: Final = ("tokens", "token_logprobs", "text_offset")
