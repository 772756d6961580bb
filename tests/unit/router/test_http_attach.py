"""Resumable streams over HTTP, with a router whose answers are written down: ids of events, and what attaches."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, cast

import pytest
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, RequestId
from baton.rpc import ChannelLimits, Channels
from router.answers import AnswerPart, AnswerSink
from router.config import RouterConfig
from router.http_attach import LAST_EVENT_ID
from router.http_connection import SOURCE
from router.http_keys import KeyedApp
from router.http_reply import RECONNECT_MS
from router.http_server import OpenAiApp
from router.key_desk import LocalDesk
from router.keys import ApiKey, KeyBook
from router.node import RouterNode
from router.request import ClientCall
from router.resume import RESUMABLE_ANSWERS_MAX, Place, Resume, ResumeToken, Unseen
from tests.support.router_records import lone_router
from tests.support.sse import Stream
from tests.unit.router.test_keys import made
from tests.unit.router.test_prefill_nodes import RECORD
from tests.unit.router.test_resume_tokens import events_of, for_client
from tests.unit.router.test_text import CODEC

TEXT: Final = "a🦊b a stop"
IDS: Final = list(CODEC.encode(TEXT))
OURS: Final = RequestId("0123456789abcdef" * 2)
BODY: Final[dict[str, Any]] = {"prompt": [1, 2, 3], "stream": True, "resumable": True}
Events = AsyncGenerator[inference_pb2.GenerateEvent, None]


def give(sink: AnswerSink, event: inference_pb2.GenerateEvent, place: Place | None) -> None:
    if event.HasField("started"):
        sink.started(event.started, place)
    elif event.HasField("finished"):
        sink.finished(event.finished, place)
    else:
        tokens = event.tokens
        part = AnswerPart(
            first_index=tokens.first_index, ids=tokens.ids, text=tokens.text, logprobs=tokens.logprobs, place=place
        )
        sink.tokens(part)


class Written:
    """Stands for the router: each answer is TEXT. Nodes have the answers unless `lost`."""

    def __init__(self, node: RouterNode) -> None:
        self.node = node
        self.calls: list[tuple[str, inference_pb2.GenerateRequest | None, ClientCall]] = []
        self.forgotten: list[tuple[ResumeToken, str | None]] = []
        """With the key's name."""
        self.came_back: list[tuple[str, int]] = []
        """Clients whose key had no room: its name and answers."""
        self.attached = asyncio.Event()
        self.error: BatonError | None = None
        self.fails_after = 1 << 30
        """Events."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    async def run(self, request: inference_pb2.GenerateRequest | None, call: ClientCall, sink: AnswerSink) -> None:
        had = call.resume.place if call.resume is not None else None
        self.calls.append(("generate" if had is None else "attach", request, call))
        if had is not None:
            self.attached.set()
        await self._answer(call, had or Place(), sink)

    async def forget(self, token: ResumeToken, key_name: str | None, _ended: object = None) -> None:
        self.forgotten.append((token, key_name))
        if self.error is not None:
            raise self.error

    def cut_former(self, token: ResumeToken, key_name: str) -> bool:
        self.came_back.append((key_name, len(token.places)))
        return False

    async def _answer(self, call: ClientCall, had: Place, sink: AnswerSink) -> None:
        unseen = Unseen(had)
        started = inference_pb2.Started(request_id=call.id, prompt_tokens=3)
        finished = events_of(IDS, [1, 2], [])
        finished[-1].finished.stats.output_tokens = len(IDS)
        for count, each in enumerate([inference_pb2.GenerateEvent(started=started), *finished]):
            await asyncio.sleep(0)
            if self.error is not None and count >= self.fails_after:
                raise self.error
            if (event := for_client(unseen, each)) is None:
                continue
            place = unseen.place(OURS, Attempt(0), Incarnation(7)) if call.resume is not None else None
            give(sink, event, place)


class Client:
    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        leaves_after: int = 1 << 30,
    ) -> tuple[int, dict[str, str], bytes]:
        """One call by a client that goes away after so many parts of the answer."""
        sent: list[Any] = []
        left, asked = asyncio.Event(), [json.dumps(body or {}).encode()]
        if not leaves_after:
            left.set()

        async def receive() -> Any:
            if asked:
                return {"type": "http.request", "body": asked.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > leaves_after:
                left.set()
                await asyncio.sleep(1)

        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "root_path": "", "scheme": "http", "headers": raw, "client": None, "server": None,
            "state": {SOURCE: None},
        }  # fmt: skip
        await self._app(scope, receive, send)
        parts = b"".join(each["body"] for each in sent[1 : leaves_after + 1])
        if not sent:
            return 0, {}, b""
        return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, parts


def play(scene: Callable[[Client, Written], Awaitable[None]], *, keys: Sequence[ApiKey] = ()) -> None:
    async def limited() -> None:
        rng, channels = random.Random(5), Channels(limits=ChannelLimits())
        node = lone_router([RECORD], config=RouterConfig(), channels=channels, rng=rng)
        written = Written(node)
        desk = None
        if keys:
            desk = LocalDesk(KeyBook(keys, blind=b"blind", now_s=0.0), rng=rng, cut_former=written.cut_former)
        app: Any = OpenAiApp(cast(RouterNode, written), desk=desk).asgi()
        if desk is not None:
            app = KeyedApp(app, desk, rng=rng, request_log=node.request_log)
        try:
            async with asyncio.timeout(30):
                await scene(Client(app), written)
        finally:
            await node.close()
            await channels.close()

    asyncio.run(limited())


def lines(raw: bytes) -> list[bytes]:
    return raw.splitlines(keepends=True)


@pytest.mark.parametrize("way", ["POST", "GET", "GET by the chunks' id"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_cut_after_any_event_goes_on(way: str, n: int) -> None:
    """The client loses its connection after each event; by its last id it gets the rest, and all of it together is
    what an undisturbed client has: text, ends, log-probabilities with their offsets, token ids, heads, usage."""
    asked = {**BODY, "n": n, "logprobs": 0, "return_token_ids": True, "stream_options": {"include_usage": True}}

    async def scene(client: Client, node: Written) -> None:
        whole, cut = Stream(), Stream()
        status, headers, raw = await client("POST", "/v1/completions", asked, {"x-request-id": "mine"})
        assert (status, headers["x-request-id"]) == (200, "mine")
        whole.read(lines(raw))
        assert dict(whole.texts) == dict.fromkeys(range(n), TEXT)
        assert dict(whole.ids) == dict.fromkeys(range(n), IDS)
        (usage,) = whole.usage
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, n * len(IDS))
        path = {"GET": "/v1/requests/mine/stream", "POST": "/v1/completions"}.get(way, "/v1/requests/cmpl-mine/stream")
        method = way.split()[0]
        _, headers, raw = await client("POST", "/v1/completions", asked, {"x-request-id": "mine"}, leaves_after=1)
        for _ in range(200):
            cut.read(lines(raw), events=1)
            if cut.done:
                break
            body = asked if method == "POST" else None
            status, headers, raw = await client(method, path, body, cut.headers(), leaves_after=1)
            assert (status, headers["x-request-id"]) == (200, "mine")
        assert cut.retry_ms == RECONNECT_MS
        for name in ("texts", "ends", "ids", "logprobs"):
            assert getattr(cut, name) == getattr(whole, name), name
        ((_, created, *_),) = cut.heads  # of its own call, which may be a second later
        assert {(name, created, model, kind) for name, _, model, kind in whole.heads} == cut.heads
        assert cut.usage[-1] == usage

    play(scene)


def test_every_event_has_an_id_and_only_the_first_says_when_to_come_back() -> None:
    """The last two have that of the answers' end; a stream that is not resumable has neither."""

    async def scene(client: Client, node: Written) -> None:
        asked = {**BODY, "stream_options": {"include_usage": True}}
        _, _, raw = await client("POST", "/v1/completions", asked)
        events = raw.split(b"\n\n")[:-1]
        assert events[0].startswith(b"retry: %d\nid: " % RECONNECT_MS)
        assert all(event.startswith(b"id: ") for event in events[1:])
        assert events[-1].endswith(b"\ndata: [DONE]")
        ids = [event.split(b"id: ")[1].split(b"\n")[0].decode() for event in events]
        assert ids[-1] == ids[-2] == ids[-3]
        assert len(set(ids)) == len(ids) - 2
        (place,) = ResumeToken.decode(ids[-1]).places
        assert (place.finished, place.tokens, place.chars) == (True, len(IDS), len(TEXT))
        _, _, plain = await client("POST", "/v1/completions", {**BODY, "resumable": False})
        assert all(event.startswith(b"data: ") for event in plain.split(b"\n\n")[:-1])
        assert node.calls[-1][2].resume is None

    play(scene)


def test_a_client_that_has_everything_is_told_the_end_again() -> None:
    """It lost its connection just before [DONE]: no node is asked, and the usage comes again."""

    async def scene(client: Client, node: Written) -> None:
        stream = Stream()
        asked = {**BODY, "stream_options": {"include_usage": True}}
        stream.read(lines((await client("POST", "/v1/completions", asked))[2]))
        before = len(node.calls)
        _, _, raw = await client("POST", "/v1/completions", asked, stream.headers())
        again = Stream()
        again.read(lines(raw))
        assert (again.done, again.usage, dict(again.texts)) == (True, stream.usage, {})
        assert len(node.calls) == before

    play(scene)


def test_what_the_router_is_told_of_each_answer() -> None:
    """Each choice has its place, its share of the said ids, the noise it began with, and its number. Ids that were
    never sent are refused."""

    async def scene(client: Client, node: Written) -> None:
        asked = {**BODY, "prompt": [[1], [2]], "n": 2, "return_token_ids": True}
        stream = Stream()
        stream.read(lines((await client("POST", "/v1/completions", asked))[2]), events=9)
        began = {call.resume.state.answer: (request, call) for _, request, call in node.calls if call.resume}
        assert sorted(began) == [0, 1, 2, 3]
        node.calls.clear()
        said = [stream.ids[index] for index in range(4)]
        await client("POST", "/v1/completions", {**asked, "resume_token_ids": said}, stream.headers())
        assert {kind for kind, *_ in node.calls} == {"attach"}
        for _, request, call in node.calls:
            resume = cast(Resume, call.resume)
            former, first = began[resume.state.answer]
            assert first.resume is not None
            assert (request, call.choice, resume.seed) == (former, first.choice, first.resume.seed)
            assert (resume.secret, resume.state) == (first.resume.secret, first.resume.state)
            assert resume.said == tuple(said[resume.state.answer])
        seeds = [cast(Resume, call.resume).seed for _, _, call in node.calls]
        assert seeds[0] != seeds[2], "both prompts have the same noise"
        wrong = {**asked, "resume_token_ids": [[999]] * 4}
        status, _, raw = await client("POST", "/v1/completions", wrong, stream.headers())
        assert (status, json.loads(raw)["error"]["param"]) == (400, "resume_token_ids")

    play(scene)


def test_what_is_wrong_is_said_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Header, body and path; the token itself is repeated nowhere."""

    async def scene(client: Client, node: Written) -> None:
        stream = Stream()
        stream.read(lines((await client("POST", "/v1/completions", BODY, {"x-request-id": "mine"}))[2]), events=2)
        good, path = stream.headers(), "/v1/requests/mine"

        async def refused(method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, str | None]:
            status, _, raw = await client(method, path, body, headers)
            assert stream.last_id not in raw.decode()
            return status, json.loads(raw)["error"]["param"]

        completions, header = "/v1/completions", (400, LAST_EVENT_ID)
        assert await refused("POST", completions, BODY, {LAST_EVENT_ID: "nonsense"}) == header
        assert await refused("POST", completions, {**BODY, "prompt": [1]}, good) == header
        assert await refused("POST", completions, {**BODY, "n": 2}, good) == header
        assert await refused("POST", completions, {**BODY, "seed": 5}, good) == (400, "seed")
        said = {**BODY, "resume_token_ids": [1]}
        assert await refused("POST", completions, said, {}) == (400, "resume_token_ids")
        assert await refused("POST", completions, {**BODY, "stream": False}, {}) == (400, "resumable")
        many = {**BODY, "n": RESUMABLE_ANSWERS_MAX + 1}
        assert await refused("POST", completions, many, {}) == (400, "resumable")
        for method, at in (("GET", path + "/stream"), ("DELETE", path)):
            assert await refused(method, at, None, {}) == header
            assert await refused(method, at, None, {LAST_EVENT_ID: "nonsense"}) == header
            assert await refused(method, at.replace("mine", "other"), None, good) == (404, None)
        assert (await client("HEAD", path + "/stream", None, good))[0] == 405
        assert stream.last_id not in caplog.text
        assert {kind for kind, *_ in node.calls} == {"generate"}

    with caplog.at_level("DEBUG"):
        play(scene)


def test_a_client_without_a_place_may_send_an_empty_one() -> None:
    """Simple clients always send the header: before the first event it says nothing. A body that does not ask for a
    resumable stream is answered as ever, whatever the header says."""

    async def scene(client: Client, node: Written) -> None:
        assert (await client("POST", "/v1/completions", BODY, {LAST_EVENT_ID: ""}))[0] == 200
        plain = {"prompt": [1], "stream": True}
        assert (await client("POST", "/v1/completions", plain, {LAST_EVENT_ID: "of another server"}))[0] == 200
        assert [kind for kind, *_ in node.calls] == ["generate"] * 2

    play(scene)


def test_token_ids_are_returned_to_whoever_asks() -> None:
    """Streamed with each chunk, also where its text is not whole yet, or all at once; and to nobody else."""

    async def scene(client: Client, node: Written) -> None:
        path = "/v1/completions"
        for asked in ({"return_token_ids": True}, {}):
            status, _, raw = await client("POST", path, {"prompt": [1, 2], "n": 2, **asked})
            assert status == 200
            found = [choice.get("token_ids") for choice in json.loads(raw)["choices"]]
            assert found == [IDS if asked else None] * 2
            stream = Stream()
            stream.read(lines((await client("POST", path, {"prompt": [1, 2], "stream": True, **asked}))[2]))
            assert stream.ids[0] == (IDS if asked else [])

    play(scene)


def test_a_client_forgets_its_request() -> None:
    """204, and the router is told by whose key. What the router refuses comes back."""

    async def scene(client: Client, node: Written) -> None:
        stream = Stream()
        stream.read(lines((await client("POST", "/v1/completions", BODY, {"x-request-id": "mine"}))[2]))
        for name in ("mine", "cmpl-mine"):
            status, _, raw = await client("DELETE", f"/v1/requests/{name}", None, stream.headers())
            assert (status, raw) == (204, b"")
        assert node.forgotten == [(ResumeToken.decode(stream.last_id), None)] * 2
        node.error = BatonError(Reason.PERMISSION_DENIED, "Another key's.")
        assert (await client("DELETE", "/v1/requests/mine", None, stream.headers()))[0] == 403

    play(scene)


def test_a_stream_that_fails_keeps_the_place_of_its_client() -> None:
    """It is taken over elsewhere, say: the error comes with the id of the last event, and with a status of its own
    where nothing has come before."""

    async def scene(client: Client, node: Written) -> None:
        stream = Stream()
        node.fails_after, node.error = 4, BatonError(Reason.TAKEN_OVER, "Elsewhere.")
        stream.read(lines((await client("POST", "/v1/completions", BODY))[2]))
        assert (stream.error["code"], stream.done) == ("taken_over", False)
        (place,) = ResumeToken.decode(stream.last_id).places
        assert 0 < place.chars == len(stream.texts[0]) < len(TEXT)
        node.fails_after = 0
        status, _, raw = await client("POST", "/v1/completions", BODY)
        assert (status, json.loads(raw)["error"]["code"]) == (503, "taken_over")

    play(scene)


def test_keys_count_what_attaches_and_have_their_names_told() -> None:
    """A GET takes as much of a key's concurrency as the POST did. Forgetting takes nothing. Where there is no room, the
    client's former connection makes some first."""
    text, key = made("a", concurrency=2)

    async def scene(client: Client, node: Written) -> None:
        named = {"authorization": f"Bearer {text}", "x-request-id": "mine"}
        stream = Stream()
        _, _, raw = await client("POST", "/v1/completions", {**BODY, "n": 2}, named)
        stream.read(lines(raw), events=4)
        again = {**named, **stream.headers()}
        held = asyncio.ensure_future(client("GET", "/v1/requests/mine/stream", None, again, leaves_after=1))
        await node.attached.wait()
        assert (await client("GET", "/v1/requests/mine/stream", None, named))[0] == 429
        assert node.came_back == []
        assert (await client("GET", "/v1/requests/mine/stream", None, again))[0] == 429
        assert node.came_back == [("a", 2)]
        assert (await client("DELETE", "/v1/requests/mine", None, again))[0] == 204
        assert node.forgotten[0][1] == "a"
        await held
        assert (await client("GET", "/v1/requests/mine/stream", None, again))[0] == 200
        assert {call.key_name for _, _, call in node.calls} == {"a"}
        assert (await client("DELETE", "/v1/requests/mine", None, stream.headers()))[0] == 401

    play(scene, keys=[key])


def test_a_key_ends_as_many_answers_a_minute_as_it_may_begin() -> None:
    """One. To end it needs no room beside those it has begun; a second call is told to wait."""
    text, key = made("a", requests_per_minute=1)

    async def scene(client: Client, node: Written) -> None:
        named, stream = {"authorization": f"Bearer {text}", "x-request-id": "mine"}, Stream()
        stream.read(lines((await client("POST", "/v1/completions", BODY, named))[2]))
        statuses = [
            (await client("DELETE", "/v1/requests/mine", None, {**named, **stream.headers()}))[0] for _ in range(2)
        ]
        assert (statuses, len(node.forgotten)) == ([204, 429], 1)

    play(scene, keys=[key])
