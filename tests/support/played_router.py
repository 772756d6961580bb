"""A router that a test plays itself, towards one decode node and the prefill node that hands over to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import grpc.aio
from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from baton.rpc import rpc_errors
from tests.support.cluster_harness import CALL_S_MAX
from tests.support.inprocess_cluster import InProcessCluster

TAG = b"t" * 32
STATE = b"what another router needs"


def key_of(request: str, epoch: int = 0, attempt: int = 0) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request=request, attempt=attempt, epoch=epoch)


class PlayedRouter:
    """Speaks to the nodes as a router does, and leaves out what the test wants left out."""

    def __init__(self, cluster: InProcessCluster, incarnation: int, *, node: str = "decode-0") -> None:
        self._cluster = cluster
        self._incarnation = incarnation
        self._node = node
        prefill = "prefill-0" if "prefill-0" in cluster.endpoints else node
        self._prefill_name = prefill
        self._channels = [grpc.aio.insecure_channel(cluster.endpoints[each]) for each in (prefill, node)]
        self._prefill = prefill_pb2_grpc.PrefillStub(self._channels[0])
        self._decode = decode_pb2_grpc.DecodeStub(self._channels[1])
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self.tokens: dict[tuple[str, int], list[int]] = {}
        """By request ("one", or "one/1" of attempt 1) and epoch: each message goes on where the one before
        ended."""
        self.first: dict[tuple[str, int], int] = {}
        self.logprobs: dict[tuple[str, int], list[float]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        """The finish reason's name, or the error's reason, or its text."""

    async def prefill(
        self,
        request: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        attempt: int = 0,
        output: Sequence[int] = (),
        resumable: bool = True,
        state: bytes = STATE,
        logprobs: int | None = None,
    ) -> list[str]:
        """One request up to its commit; the kinds of the events. Raises BatonError."""
        sampling = common_pb2.SamplingSpec(
            temperature=0, top_p=1, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs
        )
        call = self._prefill.Prefill(
            prefill_pb2.PrefillRequest(
                header=self._header(self._prefill_name),
                key=key_of(request, attempt=attempt),
                prompt=prompt,
                output=output,
                sampling=sampling,
                router=self._incarnation,
                resumable=common_pb2.Resumable(tag=TAG, state=state) if resumable else None,
            ),
            timeout=CALL_S_MAX,
        )
        with rpc_errors(self._prefill_name):
            return [event.WhichOneof("event") async for event in call]

    async def subscribe(self, cursors: dict[tuple[str, int], int] | None = None) -> None:
        """Open a stream in place of the last one, and take in what comes."""
        await self.cut()
        self._call = self._decode.Subscribe()
        opening = decode_pb2.SubscribeOpen(header=self._header(self._node))
        for (request, epoch), index in (cursors or {}).items():
            opening.cursors.add(key=key_of(request, epoch), next_index=index)
        await self._call.write(decode_pb2.SubscribeRequest(open=opening))
        await self._call.initial_metadata()
        self._reader = asyncio.create_task(self._read(self._call))

    async def cut(self) -> None:
        """The stream breaks."""
        if self._call is not None:
            self._call.cancel()
        reader, self._call, self._reader = self._reader, None, None
        if reader is not None:
            await reader

    async def done(self, *keys: common_pb2.RequestKey) -> None:
        await self._call.write(decode_pb2.SubscribeRequest(done=decode_pb2.SubscribeDone(keys=keys)))

    async def leave(self, *keys: common_pb2.RequestKey, ended: bool = False) -> None:
        left = [decode_pb2.LeftRequest(key=key, ended=ended) for key in keys]
        await self._call.write(decode_pb2.SubscribeRequest(leave=decode_pb2.SubscribeLeave(requests=left)))

    async def cancel(self, key: common_pb2.RequestKey) -> bool:
        request = decode_pb2.CancelRequest(header=self._header(self._node), key=key, reason="a test")
        return bool((await self._decode.Cancel(request, timeout=CALL_S_MAX)).known)

    async def resolve(self, key: common_pb2.RequestKey) -> tuple[bool, bool]:
        """Committed, taken over."""
        request = decode_pb2.ResolveRequest(header=self._header(self._node), key=key)
        reply = await self._decode.Resolve(request, timeout=CALL_S_MAX)
        return bool(reply.committed), bool(reply.taken_over)

    async def take_over(
        self, key: common_pb2.RequestKey, *, tag: bytes = TAG, left_ms: int = 60_000, forget: bool = False
    ) -> tuple[str, int]:
        """The outcome and the epoch."""
        request = decode_pb2.TakeOverRequest(
            header=self._header(self._node), key=key, tag=tag, deadline_left_ms=left_ms, forget=forget
        )
        reply = await self._decode.TakeOver(request, timeout=CALL_S_MAX)
        outcome = decode_pb2.TakeOverOutcome.Name(reply.outcome).removeprefix("TAKE_OVER_OUTCOME_")
        assert reply.state == (STATE if outcome == "TAKEN" else b"")
        return outcome, int(reply.epoch)

    async def close(self) -> None:
        await self.cut()
        for channel in self._channels:
            await channel.close()

    async def _read(self, call: Any) -> None:
        try:
            async for batch in call:
                self._take(batch.requests)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass  # cut

    def _take(self, messages: Iterable[decode_pb2.RequestTokens]) -> None:
        for message in messages:
            attempt = message.key.attempt
            key = (message.key.request + (f"/{attempt}" if attempt else ""), message.key.epoch)
            if message.ids:
                have = self.tokens.setdefault(key, [])
                first = self.first.setdefault(key, message.first_index)
                assert message.first_index == first + len(have), (key, message.first_index, first, len(have))
                have.extend(message.ids)
            self.logprobs.setdefault(key, []).extend(each.logprob for each in message.logprobs)
            assert len(message.logprobs) in (0, len(message.ids))
            if message.HasField("finish"):
                self.ends[key] = common_pb2.FinishReason.Name(message.finish).removeprefix("FINISH_REASON_")
            elif message.HasField("error"):
                self.ends[key] = message.error_reason or message.error

    def _header(self, name: str) -> common_pb2.Header:
        return common_pb2.Header(sender=self._incarnation, receiver=self._cluster.runtimes[name].incarnation)
