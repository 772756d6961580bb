"""The loader of `baton bench`: sends what is planned, to a router over gRPC or to any server with OpenAI's API over
HTTP, and takes the times.

An open loop sends at the planned times, whatever has become of earlier requests, and measures each from when it was
*due*. A closed loop keeps so many requests under way and measures each from when it was sent.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import h11

from baton.client import AsyncClient, AsyncStream, BatonError, Reason, Sampling
from baton.client.asynchronous import DNS_PREFIX
from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import InvalidField
from cli.bench_plan import Planned, prompt_ids
from cli.bench_stats import Answered, Measured, Slo
from cli.client import no_router

RECEIVE_BYTES: Final = 64 * 1024
CONNECT_S_MAX: Final = 5.0
LINE_BYTES_MAX: Final = 1 << 20
BODY_BYTES_MAX: Final = 64 * 1024
"""Of the answer to a refused call."""
PROBLEM_CHARS_MAX: Final = 300
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class Message(NamedTuple):
    """Some tokens have come."""

    tokens: int
    timed: bool
    """They arrived now. False: a server reported only their number, at the end."""
    ids: Sequence[int] = ()
    """The tokens, where the target reports them."""


Messages = AsyncGenerator[Message, None]


class TargetError(Exception):
    """A request has failed. `kind` is what failures are counted by."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Target(Protocol):
    name: str

    async def check(self) -> None:
        """Raises BatonError where nobody listens."""
        ...

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        """Make one request ready, so that sending it takes no time. The generator, called once, raises TargetError;
        closing it gives the request up."""
        ...


class RouterTarget:
    """A router, over gRPC. Does not own `client`."""

    def __init__(self, client: AsyncClient, *, router: str, temperature: float, resumable: bool = False) -> None:
        """`router` is what `client` was made with."""
        self.name = f"router at {router}"
        self._client = client
        self._router = router
        self._temperature = temperature
        self._resumable = resumable

    async def check(self) -> None:
        for router in self._router.split(","):
            with suppress(OSError):
                return await _connect_once(*split_endpoint(router.removeprefix(DNS_PREFIX)))
        raise no_router(self._router)

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        sampling = Sampling(temperature=self._temperature, max_tokens=output_tokens, ignore_eos=True)
        stream = self._client.stream(ids, sampling=sampling, resumable=self._resumable)
        return lambda: self._messages(stream)

    async def _messages(self, stream: AsyncStream) -> Messages:
        try:
            async with stream:
                async for piece in stream:
                    if piece.ids:
                        yield Message(len(piece.ids), timed=True, ids=piece.ids)
        except BatonError as error:
            raise TargetError(error.reason.value, error.message) from error


class OpenAiTarget:
    """`POST {url}/v1/completions` as a stream, each request on a connection of its own.

    Servers that do not report the number of tokens in each chunk (`continuous_usage_stats`) report it at the end; until
    then a chunk counts as one token.
    """

    def __init__(
        self, url: str, *, model: str | None, timeout_s: float, temperature: float, api_key: str | None = None
    ) -> None:
        """Raises ValueError if `url` is not a URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port out of range, half a pair of brackets
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
            raise ValueError(f"--url: '{url}' is no address of a server; write it as http://127.0.0.1:8000")
        self.name = url
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._model = model
        self._timeout_s = timeout_s
        self._temperature = temperature
        self._api_key = api_key

    async def check(self) -> None:
        try:
            await _connect_once(self._host, self._port)
        except OSError as error:
            text = f"Nobody answers at {self.name}: {_why(error)}. Name another place with --url."
            raise BatonError(Reason.PEER_UNREACHABLE, text) from error

    def prepare(self, ids: list[int], output_tokens: int) -> Callable[[], Messages]:
        body: dict[str, Any] = {
            "prompt": ids,
            "max_tokens": output_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if self._model is not None:
            body["model"] = self._model
        raw = json.dumps(body).encode()
        headers = {
            "Host": join_endpoint(self._host, self._port),
            "Content-Type": "application/json",
            "Content-Length": str(len(raw)),
            "Accept": "text/event-stream",
            "Connection": "close",
        }
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        head = h11.Request(method="POST", target=self._path, headers=list(headers.items()))
        return lambda: self._messages([head, h11.Data(data=raw), h11.EndOfMessage()])

    async def _messages(self, request: list[h11.Event]) -> Messages:
        received = 0
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    message = _message(chunk, received)
                    if message is not None:
                        received += message.tokens
                        yield message
        except TimeoutError:
            text = f"{self.name} did not end its answer within {self._timeout_s:g} s."
            raise TargetError(Reason.DEADLINE.value, text) from None
        except (OSError, h11.ProtocolError, asyncio.LimitOverrunError) as error:
            raise TargetError(Reason.PEER_UNREACHABLE.value, f"{self.name}: {_why(error)}.") from error

    async def _chunks(self, request: list[h11.Event]) -> AsyncGenerator[dict[str, Any], None]:
        """The objects of one stream of events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        connection, status, rest = h11.Connection(h11.CLIENT), 200, b""
        try:
            writer.write(b"".join(connection.send(event) or b"" for event in request))
            while not isinstance(event := connection.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
                lines: list[bytes] = []
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(RECEIVE_BYTES))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data) and status == 200:
                    *lines, rest = (rest + event.data).split(b"\n")
                elif isinstance(event, h11.Data) and len(rest) < BODY_BYTES_MAX:
                    rest += event.data
                if status == 200 and len(rest) > LINE_BYTES_MAX:
                    raise TargetError("BAD_ANSWER", f"{self.name} sent a line of over {LINE_BYTES_MAX} bytes.")
                for line in lines:
                    data = line.strip().removeprefix(_DATA).strip() if line.startswith(_DATA) else b""
                    if data == _DONE:
                        return
                    if data:
                        yield self._object(data)
            if status != 200:
                raise TargetError(f"HTTP_{status}", f"{self.name} answered {status}: {_problem(rest)}")
            raise TargetError("CUT_OFF", f"{self.name} ended an answer in its middle.")
        finally:
            writer.transport.abort()

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise TargetError("BAD_ANSWER", f"{self.name} sent no JSON object: {data[:80]!r}")
        if found.get("error"):
            raise TargetError("STREAM_ERROR", f"{self.name}: {_problem(data)}")
        return found


async def _connect_once(host: str, port: int) -> None:
    """Raises OSError, TimeoutError among them."""
    async with asyncio.timeout(CONNECT_S_MAX):
        _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()


def _why(error: Exception) -> str:
    """Of a connection that did not come about, or broke."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "it has closed the connection"
    if isinstance(error, TimeoutError):
        return "no connection came about in time"
    return str(getattr(error, "strerror", None) or error)[:PROBLEM_CHARS_MAX]


def _message(chunk: dict[str, Any], received: int) -> Message | None:
    """What a chunk adds to the tokens received so far."""
    usage, choices = chunk.get("usage"), chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    total = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if isinstance(total, int):
        return Message(total - received, timed=choice is not None) if total > received else None
    # A last chunk says why the answer ended, and has no token.
    return Message(1, timed=True) if isinstance(choice, dict) and not choice.get("finish_reason") else None


def _problem(body: bytes) -> str:
    try:
        found = json.loads(body)
        text = str(found["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        text = body.decode(errors="replace")
    return (" ".join(text.split()) or "nothing more")[:PROBLEM_CHARS_MAX]


IN_FLIGHT_FULL: Final = "IN_FLIGHT_MAX"
NO_TOKENS: Final = "NO_TOKENS"
LAG_LOOK_S: Final = 0.02
"""Pause between two looks at how late the event loop is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Options of the command by their names. Raises InvalidField."""

    concurrency: int | None = None
    """Of a closed loop; None is an open loop."""
    requests: int | None = None
    duration: float | None = None
    """Nothing is sent later than after this many seconds; what is under way is waited for."""
    warm_up: int = 0
    """The first requests of this number are warm-up and do not count."""
    in_flight_max: int = 4096
    """Open loop: requests under way; one more is not sent, and counts as failed."""
    token_ids: tuple[int, int] = (2, 256)
    """Prompts are drawn from the first id on, below the second."""
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = self.token_ids
        if low >= high:
            raise InvalidField("token_ids", f"must be from 0 to below {high}, not {low}")
        if self.requests is not None and self.warm_up >= self.requests:
            raise InvalidField("warm_up", f"must be below the number of requests ({self.requests}), not {self.warm_up}")


class Loader:
    """One run. `run` once; `measured` is up to date at every moment, after a cancel of `run` too."""

    def __init__(
        self, config: LoadConfig, plan: Iterator[Planned], target: Target, *, slo: Slo, now_s: Callable[[], float]
    ) -> None:
        """`now_s` is a monotonic clock."""
        self.measured = Measured(slo=slo)
        self._config = config
        self._plan = plan
        self._target = target
        self._now_s = now_s
        self._start_s = 0.0
        self._running: set[asyncio.Task[None]] = set()
        """Requests of an open loop."""
        self._said: defaultdict[int, list[int]] = defaultdict(list)
        """By conversation, the tokens of its turns so far."""
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By conversation: held for a turn."""

    @property
    def elapsed_s(self) -> float:
        return self._now_s() - self._start_s

    async def run(self) -> None:
        """To the end of the plan and of every answer. Cancelled, it gives up what is under way, which then counts as
        unfinished (`Measured.in_flight`)."""
        self._start_s = self._now_s()
        lag = asyncio.ensure_future(self._watch_lag())
        try:
            async with asyncio.TaskGroup() as group:
                if self._config.concurrency is None:
                    await self._send_on_time(group)
                else:
                    for _ in range(self._config.concurrency):
                        group.create_task(self._work())
        except BaseExceptionGroup as bugs:  # failed requests are counted, not raised
            raise bugs.exceptions[0] from None
        finally:
            lag.cancel()
            await asyncio.wait({lag})

    def _next(self) -> Planned | None:
        """The next request to send, None after the last one."""
        config = self._config
        if config.requests is not None and self.measured.sent >= config.requests:
            return None
        planned = next(self._plan, None)
        if planned is None or config.duration is None:
            return planned
        due_s = self.elapsed_s if planned.due_s is None else planned.due_s
        return planned if due_s < config.duration else None

    async def _work(self) -> None:
        """One of the closed loop's: a request after the other."""
        while (planned := self._next()) is not None:
            self.measured.sent += 1
            if planned.conversation is None:
                await self._request(planned, self._prompt(planned), due_s=self.elapsed_s)
            else:
                await self._turn(planned, planned.conversation)

    async def _turn(self, planned: Planned, conversation: int) -> None:
        """A turn behind the one before. One that fails is left out of what was said."""
        async with self._turns[conversation]:
            ids = self._said[conversation] + self._prompt(planned)
            answer: list[int] = []
            await self._request(planned, ids, due_s=self.elapsed_s, answer=answer)
            if answer:
                self._said[conversation] = ids + answer

    async def _send_on_time(self, group: asyncio.TaskGroup) -> None:
        while (planned := self._next()) is not None:
            assert planned.due_s is not None
            ids = self._prompt(planned)
            messages = self._target.prepare(ids, planned.output_tokens)  # made before its time comes
            # At least one turn of the event loop for each: answers are read in the greatest hurry too.
            await asyncio.sleep(max(0.0, planned.due_s - self.elapsed_s))
            self.measured.sent += 1
            counts = planned.index >= self._config.warm_up
            if counts:
                self.measured.begin(planned.due_s)
            if len(self._running) >= self._config.in_flight_max:
                text = f"{self._config.in_flight_max} requests were under way already (--in-flight-max)."
                self.measured.error(IN_FLIGHT_FULL, text, at_s=self.elapsed_s, counts=counts)
                continue
            if counts:
                self.measured.late.add(max(0.0, self.elapsed_s - planned.due_s) * 1000)
            sent = group.create_task(self._request(planned, ids, messages, due_s=planned.due_s))
            self._running.add(sent)
            sent.add_done_callback(self._running.discard)

    def _prompt(self, planned: Planned) -> list[int]:
        low, high = self._config.token_ids
        return prompt_ids(planned, ids_from=low, ids_to=high, seed=self._config.seed)

    async def _request(
        self,
        planned: Planned,
        ids: list[int],
        messages: Callable[[], Messages] | None = None,
        *,
        due_s: float,
        answer: list[int] | None = None,
    ) -> None:
        """Send it, as `messages` if they are prepared. The answer's tokens are added to `answer`."""
        if messages is None:
            messages = self._target.prepare(ids, planned.output_tokens)
        counts = planned.index >= self._config.warm_up
        if counts:
            self.measured.begin(due_s)
        try:
            answered = await self._answer(len(ids), messages, due_s, answer)
        except TargetError as error:
            self.measured.error(error.kind, str(error), at_s=self.elapsed_s, counts=counts)
            return
        self.measured.answer(answered, at_s=due_s + answered.e2e_ms / 1000, counts=counts)

    async def _answer(
        self, prompt_tokens: int, messages: Callable[[], Messages], due_s: float, answer: list[int] | None
    ) -> Answered:
        """Raises TargetError."""
        gaps_ms = array("d")
        timeline = self.measured.timeline
        first_s = last_s = None
        tokens = 0
        async with aclosing(messages()) as stream:
            async for message in stream:
                tokens += message.tokens
                if answer is not None:
                    answer += message.ids
                if not message.timed:
                    continue
                at_s = self.elapsed_s
                if last_s is None:
                    first_s = at_s
                    timeline.add(at_s, tokens=message.tokens, ttft_ms_max=(at_s - due_s) * 1000)
                else:
                    gaps_ms.append((at_s - last_s) * 1000)
                    timeline.add(at_s, tokens=message.tokens, gap_ms_max=gaps_ms[-1])
                last_s = at_s
        if first_s is None or last_s is None:
            raise TargetError(NO_TOKENS, "An answer ended without a token.")
        return Answered(
            ttft_ms=(first_s - due_s) * 1000,
            e2e_ms=(last_s - due_s) * 1000,
            gaps_ms=gaps_ms,
            prompt_tokens=prompt_tokens,
            output_tokens=tokens,
        )

    async def _watch_lag(self) -> None:
        while True:
            before_s = self._now_s()
            await asyncio.sleep(LAG_LOOK_S)
            self.measured.loop_late.add(max(0.0, self._now_s() - before_s - LAG_LOOK_S) * 1000)
