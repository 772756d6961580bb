"""Clients that forge resume tokens, attach to be computed for without paying, or forget and attach at once. In one
process, where a test looks inside."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, RequestId
from baton.rpc import rpc_errors
from cli.supervisor import ROUTER_NAME
from decode_node.service import DecodeService
from router.job import TOKENS_AT_ONCE_MAX
from router.keys import KeyUse, new_key
from router.resume import Place, ResumeToken, tokens_crc
from tests.cluster.test_attach import PROMPT, TOKENS, has_all, reader, spec_of
from tests.cluster.test_resume import ROUTER_FLAGS
from tests.support.cluster_harness import CALL_S_MAX, Client, assert_conserved, error_of, make_request, mock_tokens
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until


def played(play: Callable[[InProcessCluster], Awaitable[None]], **changes: Any) -> None:
    async def scenario() -> None:
        async with inprocess(replace(spec_of(**changes), routers=1)) as cluster:
            await play(cluster)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_token_that_names_a_request_of_somebody_else() -> None:
    """It is not resumable, and goes on at this router. Who knows its id, and forges a token with a secret of his own,
    is refused, and the answer is whole."""

    async def play(cluster: InProcessCluster) -> None:
        router = cluster.routers[ROUTER_NAME]
        thief = reader()
        thief.generate(cluster.client)
        await thief.read(1)
        own = ResumeToken.decode(thief.token)
        thief.call.cancel()
        await until(cluster, "the thief is gone", lambda: not router.streams.inboxes)
        call = cluster.client.stub.Generate(make_request(PROMPT, max_tokens=TOKENS), timeout=CALL_S_MAX)
        await until(cluster, "its node", lambda: any(inbox.decode for inbox in router.streams.inboxes.values()))
        ((key, inbox),) = router.streams.inboxes.items()
        forged = Place(request=key.request, attempt=key.attempt, decode=inbox.decode)
        thief.attach(cluster.client, token=replace(own, places=(forged,)).encode())
        assert (await error_of(thief.read())).reason is Reason.PERMISSION_DENIED
        ids: list[int] = []
        with rpc_errors("router"):
            async for event in call:
                ids += event.tokens.ids
        assert ids == mock_tokens(PROMPT, TOKENS)
        await thief.forget(cluster.client)

    played(play)


def test_nobody_can_foretell_the_id_of_a_request() -> None:
    """Those of clients' own requests are in their tokens; the next ones come from where secrets come from."""

    async def play(cluster: InProcessCluster) -> None:
        router = cluster.routers[ROUTER_NAME]
        router.token_bytes = lambda count: b"\7" * count
        read = reader()
        read.generate(cluster.client)
        await has_all(read)
        assert ResumeToken.decode(read.token).places[0].request == RequestId("07" * 16)
        await read.forget(cluster.client)

    played(play)


@pytest.mark.parametrize("says", [True, False])
def test_what_is_computed_again_is_paid_for(says: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client forges how much it has of an answer that no node has: the ids that it says are computed with the prompt,
    and those that it does not say are drawn and left out for it. The key's tokens are those of the whole answer."""
    key, entry = new_key(os.urandom(32).hex()[:43], {"name": "a"})
    path = tmp_path / "keys.toml"
    path.write_text(entry)
    paid: list[int] = []
    monkeypatch.setattr(KeyUse, "take_output", lambda _self, tokens, _now_s: paid.append(tokens))

    async def play(cluster: InProcessCluster) -> None:
        client = Client(cluster.endpoints[ROUTER_NAME], api_key=key)
        read = reader()
        read.generate(client)
        await has_all(read)
        await read.forget(client)
        assert sum(paid) == TOKENS
        paid.clear()
        token = ResumeToken.decode(read.token)
        read.ids, read.finished = read.ids[: TOKENS - 10], None
        had = Place(decode=Incarnation(1), tokens=len(read.ids), crc=tokens_crc(read.ids))
        read.attach(client, token=replace(token, places=(had,)).encode(), says=says)
        await has_all(read)
        assert sum(paid) == TOKENS
        await read.forget(client)
        await client.close()

    played(play, router_flags={**ROUTER_FLAGS, "api_keys_file": str(path)})


def test_an_answer_that_comes_whole_comes_in_pieces() -> None:
    """A long answer is finished and unread. Its text is cut piece by piece, and no message has all of it."""
    tokens = 3 * TOKENS_AT_ONCE_MAX + 1

    async def play(cluster: InProcessCluster) -> None:
        node = cluster.decode["decode-0"]
        read = reader(tokens)
        read.generate(cluster.client)
        await read.read(20)
        read.call.cancel()
        await until(cluster, "the whole answer", lambda: len(node.streams.finished) == 1)
        read.attach(cluster.client)
        sizes = []
        with rpc_errors("router"):
            async for event in read.call:
                assert isinstance(event, inference_pb2.GenerateEvent)
                sizes.append(len(event.tokens.ids))
                read.token = event.resume_token
        assert max(sizes) <= TOKENS_AT_ONCE_MAX
        assert sum(sizes) == tokens - len(read.ids)
        await read.forget(cluster.client)

    played(play, decode_flags={})


def test_a_client_forgets_while_its_attach_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router has not heard yet that it has the answer. The call that attaches ends at once: it would wait for
    tokens that nobody sends any more."""
    asked, go_on = asyncio.Event(), asyncio.Event()
    real = DecodeService.TakeOver

    async def take_over(self: DecodeService, request: Any, context: Any) -> Any:
        reply = await real(self, request, context)
        if not request.forget:
            asked.set()
            await go_on.wait()
        return reply

    monkeypatch.setattr(DecodeService, "TakeOver", take_over)

    async def play(cluster: InProcessCluster) -> None:
        router = cluster.routers[ROUTER_NAME]
        read = reader()
        read.generate(cluster.client)
        await read.read(20)
        read.call.cancel()
        read.attach(cluster.client)
        ended = asyncio.create_task(error_of(read.read()))
        await asked.wait()
        (turn,) = router._attaches.values()
        forgotten = asyncio.create_task(read.forget(cluster.client))
        await until(cluster, "the forget waits", lambda: bool(turn._waiters))
        go_on.set()
        await forgotten
        error: BatonError = await ended
        assert error.reason is Reason.CANCELLED

    played(play)
