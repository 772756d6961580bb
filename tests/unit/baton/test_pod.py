"""The deletion cost of a node's own pod: what is sent to the Kubernetes API, and what happens when that fails."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from baton.clock import Clock
from baton.errors import InvalidField
from baton.lifecycle import Lifecycle
from baton.pod import (
    COST_FAILURES,
    COST_GIVEN_UP,
    COST_LOWERED,
    FIRST_TO_GO,
    DeletionCost,
    KubernetesError,
    PodConfig,
    set_deletion_cost,
)
from tests.support.kube_api_double import OK, SILENCE, TOKEN, Call, kube_api, status_body

WAIT_S_MAX: Final = 60.0
POD: Final = "decode-5d9c7b6f4-x2x9z"


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            await scene()

    asyncio.run(limited())


def counters(lowered: int, failures: int, given_up: int) -> dict[str, int]:
    return {COST_LOWERED: lowered, COST_FAILURES: failures, COST_GIVEN_UP: given_up}


def test_the_call(tmp_path: Path) -> None:
    """Path, verb, type, token and body are what the API wants; a renewed token is read for the next call; taking the
    annotation away is a null."""

    async def scene() -> None:
        config = PodConfig(api=api.url, credentials=api.credentials, name=POD)
        await set_deletion_cost(config, FIRST_TO_GO)
        (api.credentials / "token").write_text("renewed")
        await set_deletion_cost(config, None)

    with kube_api(tmp_path) as api:
        play(scene)
        path = f"/api/v1/namespaces/baton/pods/{POD}?fieldManager=baton"
        kind = "application/strategic-merge-patch+json"
        assert api.calls == [
            Call(
                method="PATCH", path=path, content_type=kind, token=f"Bearer {token}",
                body={"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": value}}},
            )
            for token, value in ((TOKEN, "-2147483648"), ("renewed", None))
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "problem", "may_pass"),
    [
        (403, status_body('pods "x" is forbidden', 403), 'answered 403: pods "x" is forbidden', False),
        (404, b"no such pod", "answered 404: no such pod", False),
        (401, b"", "answered 401: nothing more", True),
        (429, b"[]", "answered 429: []", True),
        (302, b"", "answered 302: nothing more", False),
        (503, b"\xff" * (49_152), "answered 503: ", True),
    ],
)
def test_a_refusal(tmp_path: Path, status: int, body: bytes, problem: str, may_pass: bool) -> None:
    """The server's own words, and whether another try makes sense; a long answer is cut."""

    async def scene() -> None:
        with pytest.raises(KubernetesError) as caught:
            await set_deletion_cost(PodConfig(api=api.url, credentials=api.credentials, name=POD), "1")
        assert problem in str(caught.value)
        assert caught.value.may_pass is may_pass

    with kube_api(tmp_path) as api:
        api.answers.append((status, body))
        play(scene)


async def failure_of(config: PodConfig) -> str:
    with pytest.raises(KubernetesError) as caught:
        await set_deletion_cost(config, "1")
    assert caught.value.may_pass
    return str(caught.value)


def test_no_connection(tmp_path: Path) -> None:
    """Nobody listens; the certificate is for another name; the token is no header, no text, or not there: an error that
    says which, and nothing is sent."""

    async def scene() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            nobody = f"https://127.0.0.1:{taken.getsockname()[1]}"
            text = await failure_of(PodConfig(api=nobody, credentials=api.credentials, name=POD))
            assert text.startswith(f"{nobody} cannot be called: ")
        stranger = api.url.replace("127.0.0.1", "localhost")
        text = await failure_of(PodConfig(api=stranger, credentials=api.credentials, name=POD))
        assert "CERTIFICATE_VERIFY_FAILED" in text
        config = PodConfig(api=api.url, credentials=api.credentials, name=POD)
        token = api.credentials / "token"
        token.write_text("two\nlines")
        assert "broke the call off" in await failure_of(config)
        token.write_bytes(b"\xff\xfe")
        assert f"the service account in {api.credentials} is not usable" in await failure_of(config)
        token.unlink()
        assert "No such file" in await failure_of(config)
        assert api.calls == []

    with kube_api(tmp_path) as api:
        play(scene)


def test_an_answer_that_is_no_http(tmp_path: Path) -> None:
    """A server that speaks something else, or ends the connection without a word."""

    async def scene(answer: bytes) -> None:
        ended = asyncio.Event()

        async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()
            ended.set()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(KubernetesError, match="cannot be called"):
                await set_deletion_cost(PodConfig(api=url, credentials=api.credentials, name=POD), None)
            await ended.wait()

    with kube_api(tmp_path) as api:
        for answer in (b"220 mail.example.com ready\r\n\r\n", b""):
            play(partial(scene, answer))


def test_without_the_client_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra `k8s` is not installed: an error that says what to install, and no further try."""

    async def scene() -> None:
        config = PodConfig(api="https://127.0.0.1:1", credentials=tmp_path, name=POD)
        with pytest.raises(KubernetesError, match=r"pip install 'baton-serve\[k8s\]'") as caught:
            await set_deletion_cost(config, None)
        assert not caught.value.may_pass

    monkeypatch.setitem(sys.modules, "lightkube.resources.core_v1", None)
    play(scene)


class Patches:
    """Stands for the API: says when a call has come, and ends each one as the test says."""

    def __init__(self) -> None:
        self.values: list[str | None] = []
        self.came = asyncio.Event()
        self.ends: asyncio.Queue[KubernetesError | None] = asyncio.Queue()

    async def __call__(self, config: PodConfig, cost: str | None) -> None:
        assert config.name == POD
        self.values.append(cost)
        self.came.set()
        failure = await self.ends.get()
        if failure is not None:
            raise failure

    async def next(self) -> str | None:
        await self.came.wait()
        self.came.clear()
        return self.values[-1]


def cost_of(patches: Patches, **config: Any) -> DeletionCost:
    settings = {"name": POD, "retry_ms_min": 1, "retry_ms_max": 1, "call_ms_max": 60_000, **config}
    return DeletionCost(PodConfig(**settings), clock=Clock(), rng=random.Random(1), set_cost=patches)


async def settle(cost: DeletionCost) -> None:
    while not cost.settled:  # noqa: ASYNC110 - what it waits for is inside it
        await asyncio.sleep(0)


def test_the_cost_follows_the_lifecycle() -> None:
    """Taken back at the start, lowered once by a drain and its end, taken back by undrain; a cordon changes nothing."""

    async def scene() -> None:
        patches = Patches()
        cost = cost_of(patches)
        for state in (Lifecycle.READY, Lifecycle.DRAINING, Lifecycle.DRAINED, Lifecycle.READY, Lifecycle.CORDONED):
            patches.ends.put_nowait(None)
            cost.follow(state)
            await settle(cost)
        assert patches.values == [None, FIRST_TO_GO, None]
        assert cost.counters() == counters(lowered=0, failures=0, given_up=0)
        await cost.close()

    play(scene)


def test_an_order_that_comes_while_a_call_is_under_way() -> None:
    """Drain and undrain within one call: the last word counts, and calls never overtake each other."""

    async def scene() -> None:
        patches = Patches()
        cost = cost_of(patches)
        cost.follow(Lifecycle.DRAINING)
        assert await patches.next() == FIRST_TO_GO
        cost.follow(Lifecycle.READY)
        cost.follow(Lifecycle.DRAINING)
        cost.follow(Lifecycle.READY)
        assert not cost.settled
        patches.ends.put_nowait(None)
        assert await patches.next() is None
        patches.ends.put_nowait(None)
        await settle(cost)
        assert patches.values == [FIRST_TO_GO, None]
        await cost.close()

    play(scene)


def test_a_failed_try_for_what_nobody_wants_any_more() -> None:
    """The call to lower the cost fails; meanwhile the node was undrained: it is not tried again, the other one is."""

    async def scene() -> None:
        patches = Patches()
        cost = cost_of(patches)
        cost.follow(Lifecycle.DRAINING)
        await patches.next()
        cost.follow(Lifecycle.READY)
        patches.ends.put_nowait(KubernetesError("away", may_pass=True))
        assert await patches.next() is None
        patches.ends.put_nowait(None)
        await settle(cost)
        assert cost.counters() == counters(lowered=0, failures=1, given_up=0)
        await cost.close()

    play(scene)


@pytest.mark.parametrize(("may_pass", "calls"), [(True, 4), (False, 1)])
def test_tries_are_bounded(may_pass: bool, calls: int, caplog: pytest.LogCaptureFixture) -> None:
    """`tries_max` calls where it may pass, one where it will not; then settled, and logged once. A new state is tried
    anew, the same one only by order."""

    async def scene() -> None:
        patches = Patches()
        cost = cost_of(patches)
        cost.follow(Lifecycle.DRAINING)
        for _ in range(calls):
            patches.ends.put_nowait(KubernetesError("no", may_pass=may_pass))
        await settle(cost)
        cost.follow(Lifecycle.DRAINED)
        assert cost.settled
        assert cost.counters() == counters(lowered=0, failures=calls, given_up=1)
        assert patches.values == [FIRST_TO_GO] * calls
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            "pod deletion cost not set: a smaller pool may remove another pod than this one"
        ]
        cost.retry(Lifecycle.DRAINED)
        patches.ends.put_nowait(None)
        await settle(cost)
        assert cost.counters() == counters(lowered=1, failures=calls, given_up=0)
        cost.retry(Lifecycle.DRAINED)
        assert cost.settled
        await cost.close()

    play(scene)


def test_a_server_that_says_nothing(tmp_path: Path) -> None:
    """Each call ends at `call_ms_max`; a node that ends itself does not wait even for that, and leaves no thread."""

    async def scene() -> None:
        config = PodConfig(
            name=POD, api=api.url, credentials=api.credentials, call_ms_max=50, tries_max=2, retry_ms_min=1
        )
        cost = DeletionCost(config, clock=Clock(), rng=random.Random(1))
        cost.follow(Lifecycle.DRAINING)
        await settle(cost)
        assert cost.counters() == counters(lowered=0, failures=2, given_up=1)
        patient = PodConfig(name=POD, api=api.url, credentials=api.credentials, call_ms_max=600_000)
        cost = DeletionCost(patient, clock=Clock(), rng=random.Random(1))
        cost.follow(Lifecycle.DRAINING)
        await asyncio.to_thread(api.wait_for_calls, len(api.calls) + 1)
        await cost.close()
        cost.follow(Lifecycle.READY)
        assert cost.settled

    with kube_api(tmp_path) as api:
        api.decide = lambda call: (SILENCE, b"")
        play(scene)
        names = {thread.name for thread in threading.enumerate()}
        assert not any(name.startswith("asyncio_") for name in names), names


def test_the_real_thing_settles(tmp_path: Path) -> None:
    """Over TLS: refused for now, then taken."""

    async def scene() -> None:
        config = PodConfig(name=POD, api=api.url, credentials=api.credentials, call_ms_max=60_000, retry_ms_min=1)
        cost = DeletionCost(config, clock=Clock(), rng=random.Random(1))
        cost.follow(Lifecycle.DRAINED)
        await settle(cost)
        assert cost.counters() == counters(lowered=1, failures=1, given_up=0)
        await cost.close()

    with kube_api(tmp_path) as api:
        api.answers.extend([(503, b"later"), OK])
        play(scene)
        assert len(api.calls) == 2


def test_outside_of_kubernetes_nothing_happens() -> None:
    """No pod is named: no call, no counter, nothing to wait for."""

    async def scene() -> None:
        patches = Patches()
        cost = cost_of(patches, name=None)
        for state in (Lifecycle.READY, Lifecycle.DRAINING, Lifecycle.DRAINED):
            cost.follow(state)
            cost.retry(state)
            assert cost.settled
        await cost.close()
        assert (patches.values, cost.counters()) == ([], {})

    play(scene)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("api", "http://kubernetes.default.svc"),
        ("api", "https://"),
        ("api", "https://host:0"),
        ("api", "https://host:x"),
        ("api", "https://host/api"),
        ("api", "https://user:password@host"),
        ("call_ms_max", 0),
        ("tries_max", 0),
    ],
)
def test_settings_that_make_no_sense(field: str, value: object) -> None:
    """The token goes over TLS only, and to a server, not to a path on one."""
    settings: dict[str, Any] = {field: value}
    with pytest.raises(InvalidField) as caught:
        PodConfig(**settings)
    assert caught.value.field == field
