"""What the router's log says of requests that end in an error: one line each, and few where there are thousands."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from batonpb import inference_pb2, prefill_pb2, prefill_pb2_grpc

from baton.errors import BatonError, Reason, bad_field
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import NodeRecord, Role
from router.answers import Collected
from router.config import RouterConfig
from router.line import Priority
from router.metrics import RouterMetrics
from router.request_log import LIMITS, RequestLog
from tests.support.router_records import MODEL, client_call, lone_router

WAIT_S_MAX = 30.0
SECRET = 424_242


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Fails every call as the test says; None: says nothing until the call ends. Counts them."""

    def __init__(self, error: BatonError | None) -> None:
        self.error = error
        self.calls = 0

    async def Prefill(self, _request: Any, _context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()
        yield prefill_pb2.PrefillEvent()


def asked(
    error: BatonError | None,
    *,
    node: Prefill | None = None,
    deadline_s: float = WAIT_S_MAX,
    change: Callable[[inference_pb2.GenerateRequest], None] = lambda _: None,
    waiting: int = 0,
    metrics: RouterMetrics | None = None,
    **config: int,
) -> BaseException:
    """One request to a router with a single prefill node; what it ends with."""

    async def scene() -> BaseException:
        rng, loop = random.Random(5), asyncio.get_running_loop()
        server = RpcServer(limits=RpcLimits(), rng=rng)
        server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, node or Prefill(error))
        port = await server.start("127.0.0.1:0")
        record = NodeRecord(
            name=NodeName("prefill-0"), role=Role.PREFILL, incarnation=Incarnation(1), sequence=1,
            endpoint=f"127.0.0.1:{port}", lifecycle=Lifecycle.READY, model=MODEL,
        )  # fmt: skip
        channels = Channels(limits=ChannelLimits())
        limits = RouterConfig(**{"placement_wait_ms_max": 100, "placement_retry_ms": 10, **config})  # type: ignore[arg-type]
        received = metrics.received if metrics is not None else None
        router = lone_router([record], config=limits, channels=channels, rng=rng, received=received)
        for _ in range(waiting):
            router._line.enter(Priority.NORMAL, 1, comes_back=False)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
        change(request)
        until_s = loop.time() + deadline_s
        try:
            async with asyncio.timeout(WAIT_S_MAX), asyncio.timeout_at(until_s):
                await router.run(request, client_call(until_s, name="mine"), Collected())
        except (BatonError, TimeoutError) as ended:
            return ended
        finally:
            await router.close()
            await channels.close()
            await server.stop(0)
        raise AssertionError("it has ended well")

    return asyncio.run(scene())


def ends(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Level and fields of the lines about requests that failed."""
    found = [r for r in caplog.records if r.getMessage() == "request failed"]
    return [(r.levelname, r.baton_fields) for r in found]  # type: ignore[attr-defined]


def test_a_request_that_no_node_takes(caplog: pytest.LogCaptureFixture) -> None:
    """The client has the error; the log has its id, the reason, how often and where it was tried, and how long."""
    with caplog.at_level(logging.INFO):
        nobody = BatonError(Reason.NO_DECODE_NODE, "It knows none.", retry_after_ms=10)
        node = Prefill(nobody)
        error = asked(nobody, node=node)
    assert isinstance(error, BatonError) and error.reason is Reason.NO_DECODE_NODE
    ((level, fields),) = ends(caplog)
    assert level == "WARNING"
    assert fields.pop("took_ms") >= 50
    assert fields.pop("attempts") == node.calls > 0
    assert len(fields.pop("key")) > 10
    assert fields == {
        "reason": "NO_DECODE_NODE", "request": "mine", "resumptions": 0, "tokens": 0, "nodes": "prefill-0",
        "why": "It knows none.",
    }  # fmt: skip


def test_a_clients_own_error_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    """The message may quote the request: the field is named instead."""

    def change(request: inference_pb2.GenerateRequest) -> None:
        request.token_ids.ids[:] = [MODEL.vocab_size + SECRET]

    with caplog.at_level(logging.INFO):
        error = asked(None, change=change)
    assert isinstance(error, BatonError)
    assert str(MODEL.vocab_size + SECRET) in error.message
    ((level, fields),) = ends(caplog)
    assert (level, fields["reason"], fields["field"]) == ("INFO", "TOKEN_OUT_OF_RANGE", "token_ids")
    assert str(MODEL.vocab_size + SECRET) not in str(fields)


@pytest.mark.parametrize(
    "reason", [Reason.BAD_FIELD, Reason.UNKNOWN_MODEL, Reason.NO_TOKENIZER, Reason.NO_CHAT_TEMPLATE]
)
def test_a_clients_own_error_is_no_warning(reason: Reason, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt as text, or as a chat, for a model that has only ids is the caller's mistake like any other."""
    log = RequestLog(lambda: 0.0)
    error = BatonError(reason, "It cannot be.", field="chat.messages")
    with caplog.at_level(logging.INFO):
        log.failed(error, call=client_call(0.0, name="mine"), job=None, began_s=0.0)
    ((level, fields),) = ends(caplog)
    assert (level, fields["reason"], fields["field"]) == ("INFO", reason.value, "chat.messages")


@pytest.mark.parametrize("reason", [Reason.INVALID_API_KEY, Reason.RATE_LIMIT_EXCEEDED, Reason.PERMISSION_DENIED])
def test_a_key_that_may_not_is_no_warning(reason: Reason, caplog: pytest.LogCaptureFixture) -> None:
    """It is told in full, since such a message quotes nothing, with the name of the key."""
    log = RequestLog(lambda: 0.0)
    with caplog.at_level(logging.INFO):
        call = replace(client_call(0.0), key_name="team-a")
        log.failed(BatonError(reason, "It may not."), call=call, job=None, began_s=0.0)
    ((level, fields),) = ends(caplog)
    assert (level, fields["why"], fields["api_key"]) == ("INFO", "It may not.", "team-a")


@pytest.mark.parametrize("reason", [Reason.INCOMPATIBLE_NODE, Reason.MODEL_BROKEN, Reason.NO_PREFILL_NODE])
def test_an_error_of_the_cluster_is_a_warning(reason: Reason, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same code as some that are the caller's mistake, too."""
    log = RequestLog(lambda: 0.0)
    with caplog.at_level(logging.INFO):
        log.failed(BatonError(reason, "It cannot be."), call=client_call(0.0, name="mine"), job=None, began_s=0.0)
    ((level, fields),) = ends(caplog)
    assert (level, fields["reason"], fields["why"]) == ("WARNING", reason.value, "It cannot be.")


def test_a_router_whose_line_is_full_says_so_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    """Refused at the door: no attempt was made. The client may come again in whole seconds: HTTP's Retry-After knows no
    others."""
    with caplog.at_level(logging.INFO):
        error = asked(None, waiting=2, line_requests_max=2)
    assert isinstance(error, BatonError)
    assert error.retry_after_ms in (1_000, 2_000)
    ((level, fields),) = ends(caplog)
    assert (level, fields["reason"], fields["request"]) == ("WARNING", "TOO_MANY_CALLS", "mine")
    assert "attempts" not in fields


def test_a_deadline_that_passes_is_an_error_too(caplog: pytest.LogCaptureFixture) -> None:
    """The call is ended from outside; the client has DEADLINE_EXCEEDED. The metrics count it by that."""
    metrics = RouterMetrics(list)
    with caplog.at_level(logging.INFO):
        asked(None, deadline_s=0.3, metrics=metrics)
    assert outcomes(metrics) == ['baton_requests_total{outcome="deadline"} 1.0']
    ((level, fields),) = ends(caplog)
    assert (level, fields["reason"], fields["attempts"], fields["nodes"]) == ("WARNING", "DEADLINE", 1, "prefill-0")


def outcomes(metrics: RouterMetrics) -> list[str]:
    return [line for line in metrics.text()[0].decode().splitlines() if line.startswith("baton_requests_total{")]


def test_thousands_a_second_take_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A full cluster for a minute, five thousand refusals a second: the first are told one by one, the others in a line
    every ten seconds, and none is left out. A rarer error meanwhile is told each time."""
    now_s = 0.0
    log = RequestLog(lambda: now_s)
    full = BatonError(Reason.DECODE_FULL, "All are full.", retry_after_ms=10)
    corrupt = BatonError(Reason.DATA_CORRUPT, "One bit.")
    with caplog.at_level(logging.INFO):
        for _ in range(60):
            for _ in range(5_000):
                log.failed(full, call=client_call(0.0, name="many"), job=None, began_s=now_s)
            log.failed(corrupt, call=client_call(0.0, name="one"), job=None, began_s=now_s)
            now_s += 1.0
            log.upkeep()
        log.close()
    reported = [fields for _, fields in ends(caplog)]
    assert len([f for f in reported if f["reason"] == "DECODE_FULL"]) == LIMITS.full_max
    assert len([f for f in reported if f["reason"] == "DATA_CORRUPT"]) == 60
    sums = [r.baton_fields["times"] for r in caplog.records if r.getMessage() == "request failed: repeated"]  # type: ignore[attr-defined]
    assert len(sums) == 6
    assert sum(sums) + LIMITS.full_max == 300_000


def test_clients_that_are_wrong_a_thousand_times_are_bounded_too(caplog: pytest.LogCaptureFixture) -> None:
    """Their words are in none of the lines, the one that sums up included."""
    log = RequestLog(lambda: 0.0)
    with caplog.at_level(logging.INFO):
        for _ in range(1_000):
            log.failed(bad_field("text", f"{SECRET} is wrong."), call=client_call(0.0), job=None, began_s=0.0)
        log.close()
    assert len(caplog.records) == LIMITS.full_max + 1
    assert str(SECRET) not in caplog.text
