"""API keys against real processes: who has none, who has a wrong one, who wants more than its key may have, and what
all of that costs others."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc.aio
import openai
import pytest
from batonpb import inference_pb2, inference_pb2_grpc

from baton.errors import BatonError, Code, Reason
from baton.rpc import rpc_errors
from cli.supervisor import ROUTER_NAME
from tests.support.attack import (
    Front,
    attacker_channel,
    attacker_connection,
    bystanders,
    front_door,
    http_attack,
    nobody_notices,
    post,
)
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import CALL_S_MAX, make_request, wait_for
from tests.support.key_file import Keys

CALLS: Final = 300
LONG: Final = 100_000
"""Tokens of an answer that does not end within a test."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys") / "keys.toml")
    made.add("others")
    made.add("two", concurrency=2, cache_salt="two")
    made.add("slow", requests_per_minute=2)
    made.add("few", tokens_per_minute=40)
    made.add("special", special_tokens=True)
    made.write()
    return made


@pytest.fixture(scope="module")
def front(keys: Keys) -> Iterator[Front]:
    with front_door(router_flags={"api_keys_file": keys.path}, api_key=keys.of["others"], tokenizer=True) as front:
        yield front


def body(**fields: Any) -> bytes:
    return json.dumps({"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, **fields}).encode()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def client_of(front: Front, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{front.http}/v1", api_key=key, max_retries=0) as client:
        yield client


async def refusal(call: Any) -> BatonError:
    with pytest.raises(BatonError) as caught, rpc_errors("router"):
        await call
    return caught.value


def test_without_a_key_and_with_a_wrong_one(front: Front, keys: Keys) -> None:
    """401 in OpenAI's form over HTTP, UNAUTHENTICATED over gRPC, each with words of its own; a good one is answered by
    both. Probes need none. The model list does."""

    async def scenario() -> None:
        for headers, why in (({}, "needs an API key"), (bearer(keys.of["two"][:-1] + "?"), "not a key of this")):
            for path in ("/v1/completions", "/v1/chat/completions"):
                status, raw = await http_attack(front, post(path, body(), headers=headers))
                error = json.loads(raw)["error"]
                assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
                assert why in error["message"]
            status, _ = await http_attack(front, b"GET /v1/models HTTP/1.1\r\nhost: h\r\n\r\n")
            assert status == 401
            async with attacker_channel(front) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                metadata = tuple(headers.items())
                for call in (
                    stub.GenerateUnary(make_request([5]), timeout=CALL_S_MAX, metadata=metadata),
                    stub.Generate(make_request([5]), timeout=CALL_S_MAX, metadata=metadata).read(),
                ):
                    told = await refusal(call)
                    assert (told.reason, told.code) == (Reason.INVALID_API_KEY, Code.UNAUTHENTICATED)
                    assert why in told.message
        for path in ("/health", "/live", "/version"):
            assert (await http_attack(front, f"GET {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode()))[0] == 200
        async with client_of(front, keys.of["two"]) as client:
            assert [model.id async for model in await client.models.list()] == ["mock"]
            answer = await client.completions.create(model="mock", prompt=[5, 6, 7], max_tokens=2)
            assert answer.usage is not None and answer.usage.completion_tokens == 2
        async with client_of(front, "baton-none") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.models.list()
            assert caught.value.response.headers["www-authenticate"] == "Bearer"

    front.run(scenario())
    log = front.log_text(ROUTER_NAME)
    assert "INVALID_API_KEY" in log
    assert not any(key in log for key in keys.of.values())


def test_a_call_with_two_keys_is_refused(front: Front, keys: Keys) -> None:
    """Both of them good, over both doors."""

    async def scenario() -> None:
        two = [bearer(keys.of[name])["authorization"] for name in ("two", "special")]
        raw = post("/v1/completions", body(), headers={"authorization": two[0], "Authorization": two[1]})
        assert (await http_attack(front, raw))[0] == 401
        async with attacker_channel(front) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            metadata = tuple(("authorization", each) for each in two)
            told = await refusal(stub.GenerateUnary(make_request([5]), timeout=CALL_S_MAX, metadata=metadata))
            assert told.reason is Reason.INVALID_API_KEY

    front.run(scenario())


def test_a_call_is_refused_before_its_body_has_come(front: Front) -> None:
    """Only the head of the call is sent: over HTTP the 401 is there at once; over gRPC the handler that would read the
    message never runs, whatever its size."""

    async def scenario() -> None:
        reader, writer = await attacker_connection(front.http)
        writer.write(post("/v1/completions", body())[: -len(body())])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
        writer.close()
        async with attacker_channel(front) as channel:
            call: Any = channel.stream_unary("/baton.v1.Inference/GenerateUnary")(timeout=CALL_S_MAX)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED

    front.run(scenario())


def test_a_key_over_its_concurrency(front: Front, keys: Keys) -> None:
    """Two answers run; the third is refused with times that agree, over both doors; others are answered
    meanwhile. When the two have left, the key is good for two again, and never for three."""

    async def scenario() -> None:
        held = []
        async with bystanders(front) as others:
            for _ in range(2):
                reader, writer = await attacker_connection(front.http)
                raw = body(max_tokens=LONG, stream=True, logprobs=0)
                writer.write(post("/v1/completions", raw, headers=bearer(keys.of["two"])))
                await reader.readuntil(b"data: {")
                held.append(writer)
            async with client_of(front, keys.of["two"]) as client:
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.completions.create(model="mock", prompt=[5, 6, 7], max_tokens=2)
                assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "concurrency")
                after = caught.value.response.headers
                assert int(after["retry-after"]) == math.ceil(int(after["retry-after-ms"]) / 1000)
            async with attacker_channel(front) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                metadata = tuple(bearer(keys.of["two"]).items())
                told = await refusal(stub.GenerateUnary(make_request([5]), timeout=CALL_S_MAX, metadata=metadata))
                assert (told.reason, told.code) == (Reason.RATE_LIMIT_EXCEEDED, Code.RESOURCE_EXHAUSTED)
                assert 1_000 <= (told.retry_after_ms or 0) <= 1_500
            await others.until_answers(1)
            for writer in held:
                writer.close()
        others.check()

        async def good_again() -> bool:
            status, _ = await http_attack(front, post("/v1/completions", body(n=2), headers=bearer(keys.of["two"])))
            return status == 200

        await wait_for(good_again, "the key to be good again", story=front.story)
        async with client_of(front, keys.of["two"]) as client:
            with pytest.raises(openai.PermissionDeniedError) as never:
                await client.completions.create(model="mock", prompt=[5, 6, 7], max_tokens=2, n=3)
            assert (never.value.code, never.value.param) == ("permission_denied", "n")

    front.run(scenario())


def test_who_leaves_while_its_text_is_read(front: Front, keys: Keys) -> None:
    """The processes that read long texts stand still. Two calls of a key wait for them, and their clients leave: the
    key is good for two answers at once, nothing is kept of the calls, and new texts are read again."""

    async def scenario() -> None:
        text = json.dumps({"messages": [{"role": "user", "content": "hello " * 4_000}], "max_tokens": 2}).encode()
        call = post("/v1/chat/completions", text, headers=bearer(keys.of["two"]))
        await asyncio.gather(*(http_attack(front, call) for _ in range(2)))
        with front.texts_stopped():
            for _ in range(3):  # more than there are processes
                held = [await attacker_connection(front.http) for _ in range(2)]
                for _, writer in held:
                    writer.write(call)

                async def taken() -> bool:
                    return await _status(front, keys) == 429

                async def free() -> bool:
                    return await _status(front, keys) == 200

                await wait_for(taken, "both calls to be taken", story=front.story)
                for _, writer in held:
                    writer.transport.abort()
                await wait_for(free, "the places of those who have left", story=front.story)
        assert (await http_attack(front, call))[0] == 400

    front.run(scenario())


async def _status(front: Front, keys: Keys) -> int:
    return (await http_attack(front, post("/v1/completions", body(), headers=bearer(keys.of["two"]))))[0]


def test_requests_and_tokens_a_minute(front: Front, keys: Keys) -> None:
    """Each answer says what is left; beyond it 429 says until when, and a prompt that never fits is 403."""

    async def scenario() -> None:
        async with client_of(front, keys.of["slow"]) as client:
            ask = client.completions.with_raw_response.create
            for left in (1, 0):
                headers = (await ask(model="mock", prompt=[5, 6, 7], max_tokens=2)).headers
                assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == (
                    "2",
                    str(left),
                )
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(model="mock", prompt=[5, 6, 7], max_tokens=2)
            assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
            assert 0 < int(caught.value.response.headers["retry-after"]) <= 30
            assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        async with client_of(front, keys.of["few"]) as client:
            ask = client.completions.with_raw_response.create
            with pytest.raises(openai.PermissionDeniedError, match="can never be taken"):
                await ask(model="mock", prompt=[5] * 41, max_tokens=2)
            headers = (await ask(model="mock", prompt=[5] * 10, max_tokens=60)).headers
            assert headers["x-ratelimit-limit-tokens"] == "40"
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(model="mock", prompt=[5], max_tokens=2)
            assert caught.value.type == "tokens"
            assert 0 < int(caught.value.response.headers["retry-after"]) <= 47

    front.run(scenario())


@pytest.mark.slow
def test_a_changed_file_counts_within_seconds_and_a_broken_one_does_not(front: Front, keys: Keys) -> None:
    """A key is taken away while it reads an answer: the answer goes on and the next call is refused. Then the file is
    broken, and those who were good stay so."""
    keys.add("leaver")
    keys.write()

    async def status_of(key: str) -> int:
        return (await http_attack(front, post("/v1/completions", body(), headers=bearer(key))))[0]

    async def scenario() -> None:
        leaver = keys.of["leaver"]

        async def known() -> bool:
            return await status_of(leaver) == 200

        async def unknown() -> bool:
            return await status_of(leaver) == 401

        async def told() -> bool:
            return "the keys stay as they were" in front.log_text(ROUTER_NAME)

        await wait_for(known, "the new key to be taken", story=front.story)
        reader, writer = await attacker_connection(front.http)
        raw = body(max_tokens=LONG, stream=True, logprobs=0)
        writer.write(post("/v1/completions", raw, headers=bearer(leaver)))
        await reader.readuntil(b"data: {")
        del keys.entries["leaver"]
        keys.write()
        await wait_for(unknown, "the key to be gone", story=front.story)
        for _ in range(20):
            await reader.readuntil(b"data: {")
        writer.close()
        keys.path.write_text("[[keys]\n")
        await wait_for(told, "the broken file to be told", story=front.story)
        assert await status_of(keys.of["others"]) == 200
        assert await status_of(leaver) == 401
        keys.write()

    front.run(scenario())


def test_nobody_shares_the_cache_of_a_key_with_a_salt(front: Front, keys: Keys) -> None:
    """A prompt is cached for who has asked before, and for nobody else: not for a key without a salt that names the
    other's, nor for the same key under a salt of the request's own."""
    prompt = list(range(5, 205))

    async def cached(key: str, salt: str | None = None) -> int:
        fields: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        raw = json.dumps({"prompt": prompt, "max_tokens": 2, **fields}).encode()
        status, answer = await http_attack(front, post("/v1/completions", raw, headers=bearer(keys.of[key])))
        assert status == 200, answer
        found: int = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    async def scenario() -> None:
        assert await cached("two") == 0
        assert await cached("two") > 0
        assert await cached("others") == 0
        assert await cached("others", "two") == 0
        assert await cached("two", "two") == 0
        assert await cached("others") > 0
        assert await cached("two", "two") > 0

    front.run(scenario())


def test_only_some_keys_may_spell_special_tokens(front: Front, keys: Keys) -> None:
    """The same message of special tokens, over both doors: for one key each is a token, for another it is letters."""
    message = {"role": "user", "content": "<|begin|>" * 20}

    async def over_http(key: str) -> int:
        raw = json.dumps({"messages": [message], "max_tokens": 1}).encode()
        status, answer = await http_attack(front, post("/v1/chat/completions", raw, headers=bearer(keys.of[key])))
        assert status == 200, answer
        found: int = json.loads(answer)["usage"]["prompt_tokens"]
        return found

    async def over_grpc(key: str) -> int:
        async with attacker_channel(front) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(
                chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message)]),
                sampling=inference_pb2.Sampling(max_tokens=1),
            )
            metadata = tuple(bearer(keys.of[key]).items())
            answer = await stub.GenerateUnary(request, timeout=CALL_S_MAX, metadata=metadata)
            found: int = answer.stats.prompt_tokens
            return found

    async def scenario() -> None:
        letters, tokens = await over_http("others"), await over_http("special")
        assert letters > tokens + 20
        assert (letters, tokens) == (await over_grpc("others"), await over_grpc("special"))

    front.run(scenario())


def test_commands_send_a_key(front: Front, keys: Keys, tmp_path: Path) -> None:
    """From a file, or from the environment; without one the error says what is missing. A report has no key in it."""
    file, router = tmp_path / "own.key", front.target.grpc
    file.write_text(keys.of["others"] + "\n")
    ask = ("generate", "--router", router, "--token-ids", "5,6", "--max-tokens", "2", "--temperature", "0")
    refused = run_baton(*ask)
    assert refused.returncode == 1 and "reason INVALID_API_KEY" in refused.stderr
    wanted = run_baton(*ask, "--api-key-file", str(file))
    assert (wanted.returncode, len(wanted.stdout.split())) == (0, 2)
    env = {"BATON_API_KEY": keys.of["others"]}
    assert run_baton(*ask, "--no-stream", env=env).stdout == wanted.stdout
    talk = run_baton("chat", "--router", router, "--max-tokens", "2", "-o", "json", stdin="hello\n", env=env)
    assert json.loads(talk.stdout)["finish"] == "length", talk.stderr
    for more in (("--router", router), ("--url", f"http://{front.http}")):
        done = run_baton("bench", *more, "--requests", "2", "--output-tokens", "2", "-o", "json", env=env)
        assert json.loads(done.stdout)["requests"]["answered"] == 2, done.stderr
        assert keys.of["others"] not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_flood_of_wrong_keys_costs_others_nothing(front: Front) -> None:
    """Hundreds of calls with keys that somebody guesses, with bodies that nobody reads, over both doors."""

    async def guess(number: int) -> int:
        raw = post("/v1/completions", b"x" * 50_000, headers=bearer(f"baton-{number:043}"))
        return (await http_attack(front, raw))[0]

    async def attack() -> None:
        async with attacker_channel(front) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for first in range(0, CALLS, 30):
                over_http = [guess(number) for number in range(first, first + 30)]
                over_grpc = [
                    refusal(stub.GenerateUnary(make_request([5] * 50_000), timeout=CALL_S_MAX, metadata=metadata))
                    for metadata in (tuple(bearer(f"baton-{number:043}").items()) for number in range(30))
                ]
                assert set(await asyncio.gather(*over_http)) == {401}
                assert {each.reason for each in await asyncio.gather(*over_grpc)} == {Reason.INVALID_API_KEY}

    front.run(nobody_notices(front, attack))


def test_a_router_that_anybody_reaches_warns() -> None:
    """HTTP listens on all addresses, and there are no keys: the log says so. gRPC on the loopback is fine."""
    with front_door(router_flags={"http_listen": "0.0.0.0:0"}) as front:
        warned = [line for line in front.log_text(ROUTER_NAME).splitlines() if "set api_keys_file" in line]
        assert len(warned) == 1 and "listen=0.0.0.0:0" in warned[0] and "http_listen" in warned[0]


def test_a_broken_file_stops_the_start(tmp_path: Path) -> None:
    """And one that is not there."""
    broken = tmp_path / "broken.toml"
    broken.write_text("[[keys]]\nname = 'a'\n")
    for path, why in ((broken, "sha256"), (tmp_path / "none.toml", "cannot be read")):
        with pytest.raises(BatonError, match=why), front_door(router_flags={"api_keys_file": path}):
            pass
