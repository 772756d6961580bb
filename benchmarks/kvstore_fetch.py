"""Fetches of a prefix from another node: their rate beside the transport's alone, and when they beat computing.

    python -m benchmarks.kvstore fetch --part rate
    python -m benchmarks.kvstore fetch --part choice --transport shm

Two prefill nodes, the one that fetches in this process, the owner in one of its own. `rate`: 4,096 tokens, whose KV was
made up at the owner, in records of 32 KiB, 16 layers: 128 MiB (`--mib`: larger models); from the Fetch call to the
blocks indexed, all of them
compared; beside `benchmarks.transfer`'s two sides with as many bytes and records. `choice`: a small model with random
weights; time to first token of a prompt that the owner has computed, forced to compute, forced to fetch, and as the
node chooses. `stopped`: the same where the owner's process is stopped, over computing: before it is asked, when it has
been granted room, or when a half of the blocks have come.

What computing takes varies by more than half between rounds, so ratios are of one round, in changing order, and the
figure is their median. The better one of computing and fetching is that whose median is less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc.aio
from batonpb import common_pb2, prefill_pb2, prefill_pb2_grpc

from baton.ids import Incarnation
from baton.wire import Owner
from benchmarks.kvstore_fetch_side import (
    CONTEXT,
    SALT,
    VOCAB,
    is_made_up,
    prefill_node,
    prompt,
    run_as_process,
    serving,
)
from benchmarks.transfer import Method, Process, _ours
from benchmarks.transfer_side import cpu_s
from cli.services import Service
from engine.demo_model import DemoModelParams, write_demo_model
from kvtransfer.transports.settings import ShmConfig, TcpConfig
from node.computing_cost import ComputingCost
from node.fetching import Fetch, Fetches
from node.sources import Gathered, Gatherer, Prefix, Wait
from prefill_node.main import PrefillHalf

RATE_BAR = 0.85
CHOICE_BAR = 1.10
STOPPED_BAR = 1.25
STOPPED_TOKENS = (256, 512, 1024, 2048)
TOKENS = (32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
BLOCK = 16
RATE_TOKENS = 4096
RATE_REGION_MIB = 512
"""At least: as `benchmarks.transfer` has."""
RATE_SIZES = {128: (16, 32), 256: (16, 64), 384: (24, 64), 512: (32, 64)}
"""By the MiB of 4,096 tokens: layers, and KiB of a record. The first is a model of 16 layers with 8 KV heads of 64 in
bfloat16, the last one of 32 with 8 of 128, as models of 8B parameters have."""
WARM_UPS = 4
WAIT_S_MAX = 60.0
MODES = ("compute", "fetch", "choose")
STOPS = ("asked", "granted", "half")
"""When an owner stops."""
LOOK_S = 2e-4
ROUTER = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("rate", "choice", "stopped"), action="append", dest="parts")
    parser.add_argument("--transport", choices=("shm", "tcp"), action="append", dest="transports")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--mib", type=int, nargs="+", default=[min(RATE_SIZES)], choices=list(RATE_SIZES), help="of the rate's prompt"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of the choice's prompts")
    parser.add_argument("--json", type=Path, help="keep the samples there")


@dataclass(frozen=True, slots=True, kw_only=True)
class Two:
    """The node that fetches, here, and its owner."""

    half: PrefillHalf
    endpoint: str
    side: Process
    owner: Owner

    @property
    def incarnation(self) -> Incarnation:
        return self.half.node._peers.runtime.incarnation

    @property
    def fetches(self) -> Fetches:
        return self.half.transfers.fetches

    async def emptied(self) -> None:
        """Nothing under way here, nothing cached here."""
        await until(lambda: not any(self.half.node.holds().left()), "the node to be idle")
        assert self.half.node.pool.blocks.prefix_cache.evict_until(self.half.node.ledger.num_blocks)


async def until(true: Any, what: str) -> None:
    end_s = time.monotonic() + WAIT_S_MAX
    while not true():
        if time.monotonic() > end_s:
            raise SystemExit(f"waited too long for {what}")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def two_nodes(folder: Path, params: DemoModelParams, blocks: int, transport: str) -> AsyncIterator[Two]:
    """Connected to each other."""
    write_demo_model(folder, params)
    async with AsyncExitStack() as opened:
        directory = await opened.enter_async_context(serving(Service.DIRECTORY, name="directory"))
        arguments = (directory, str(folder), str(blocks), transport)
        node = prefill_node(directory=directory, name="caller", model=str(folder), blocks=blocks, transport=transport)
        endpoint, half = await opened.enter_async_context(node)
        owner_side = Method(module="benchmarks.kvstore_fetch_side", arguments=arguments)
        side = opened.enter_context(Process(owner_side, ""))  # the first to end: it would say that its receiver is lost
        who = await asyncio.to_thread(side.ask, "who")
        owner = Owner(
            name="owner", endpoint=who["endpoint"], incarnation=Incarnation(who["incarnation"]), blocks=CONTEXT
        )
        two = Two(half=half, endpoint=endpoint, side=side, owner=owner)
        assert await two.fetches.connect(owner), "the owner did not connect"
        yield two


# The rate.


async def fetched(two: Two, seed: int, count: int = RATE_TOKENS) -> dict[str, float]:
    """One fetch of a prompt of so many tokens that the owner gets now -> seconds, in all and of its parts, and
    processor time of both processes. Raises AssertionError: a byte is not as the owner made it."""
    await asyncio.to_thread(two.side.ask, "make up", seed=seed, tokens=count)
    await two.emptied()
    blocks = two.half.node.pool.blocks
    tokens = prompt(seed, count)
    prefix = Prefix(tokens=tokens, salt=SALT, chain=blocks.prefix_cache.chain(tokens, SALT), owners=[two.owner])
    stamps: dict[str, float] = {}
    offer = two.fetches.offer(prefix, 0)
    assert offer is not None and offer.blocks == count // BLOCK, offer
    real_reserve, real_commit, real_committed = Fetches.reserve, Fetches.commit, Fetches.committed

    def reserve(self: Fetches, *args: Any) -> Any:
        reply = real_reserve(self, *args)
        stamps["granted"] = time.perf_counter()
        return reply

    async def commit(self: Fetches, *args: Any) -> bool:
        stamps["commit asked"] = time.perf_counter()
        return await real_commit(self, *args)

    def committed(self: Fetches, *args: Any) -> None:
        real_committed(self, *args)
        stamps["indexed"] = time.perf_counter()

    with (
        patch.object(Fetches, "reserve", reserve),
        patch.object(Fetches, "commit", commit),
        patch.object(Fetches, "committed", committed),
    ):
        spent_s = await asyncio.to_thread(two.side.ask, "cpu") + cpu_s()
        began_s = time.perf_counter()
        async with asyncio.timeout(WAIT_S_MAX) as timer:
            came = await two.fetches.bring(offer, Wait(timer=timer))
        stamps["answered"] = time.perf_counter()
        spent_s = await asyncio.to_thread(two.side.ask, "cpu") + cpu_s() - spent_s
    assert came == offer.blocks, (came, offer)
    found = blocks.prefix_cache.match(tokens, SALT, came)
    assert len(found) == came
    whole = await asyncio.to_thread(is_made_up, two.half.node.pool, seed, found)  # a thread: peers watch this loop
    assert whole, "what has come is not what was there"
    return {what: at_s - began_s for what, at_s in stamps.items()} | {"cpu_s": spent_s}


def model_of(layers: int, record_bytes: int, context_len_max: int) -> DemoModelParams:
    """One whose blocks of 16 tokens have so many bytes in each layer, K and V."""
    heads, float_bytes = 4, 4
    return DemoModelParams(
        num_layers=layers,
        hidden_size=64,
        intermediate_size=64,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=record_bytes // (2 * heads * BLOCK * float_bytes),
        vocab_size=VOCAB,
        context_len_max=context_len_max,
    )


async def measure_rate(transport: str, mib: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    threads = ShmConfig().copy_threads if transport == "shm" else TcpConfig().streams
    samples = []
    layers, record_kib = RATE_SIZES[mib]
    size = record_kib << 10
    wanted = RATE_TOKENS // BLOCK
    blocks = max(wanted + BLOCK, wanted * RATE_REGION_MIB // mib)
    async with two_nodes(folder, model_of(layers, size, CONTEXT), blocks, transport) as two:
        layout = two.half.node.pool.layout
        assert (layout.record_bytes, layout.position_bytes * RATE_TOKENS) == (size, (mib << 20) * BLOCK), layout
        with (
            Process(_ours(transport, str(threads)), "") as sender,
            Process(_ours(transport, str(threads)), "") as other,
        ):

            async def ask(side: Process, do: str, **arguments: Any) -> Any:
                return await asyncio.to_thread(side.ask, do, **arguments)

            async def moved(seed: int) -> float:
                await ask(sender, "prepare", size=size, seed=seed, nbytes=mib << 20)
                took: dict[str, float] = await ask(sender, "move")
                assert await ask(other, "check", size=size, seed=seed, nbytes=mib << 20)
                return took["seconds"]

            await ask(sender, "fill")
            await ask(sender, "connect", address=await ask(other, "address"))
            for number in range(-WARM_UPS, rounds):
                seed = number + 1000
                if number % 2:
                    alone_s, parts = await moved(seed), await fetched(two, seed)
                else:
                    parts, alone_s = await fetched(two, seed), await moved(seed)
                if number >= 0:
                    samples.append({"part": "rate", "transport": transport, "mib": mib, "alone_s": alone_s, **parts})
    return samples


RATE_STAMPS = ("granted", "commit asked", "indexed", "answered")


def report_rate(samples: list[dict[str, Any]]) -> str:
    lines = ["transport  MiB  fetch GB/s  alone GB/s  ratio (min..max)     granted ms  commit asked  indexed  answered"]
    for transport, mib in sorted({(s["transport"], s["mib"]) for s in samples}):
        mine = [s for s in samples if (s["transport"], s["mib"]) == (transport, mib)]
        ratios = sorted(s["alone_s"] / s["indexed"] for s in mine)
        ratio = statistics.median(ratios)
        middle = {what: statistics.median(s[what] for s in mine) for what in (*RATE_STAMPS, "alone_s")}
        moved_gb = (mib << 20) / 1e9
        lines.append(
            f"{transport:9}  {mib:3}  {moved_gb / middle['indexed']:10.2f}  {moved_gb / middle['alone_s']:10.2f}  "
            f"{ratio:.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f}){'' if ratio >= RATE_BAR else ' MISSED'}  "
            + "  ".join(f"{1e3 * middle[what]:8.1f}" for what in RATE_STAMPS)
        )
    return "\n".join(lines)


# The choice.


async def ask_prefill(
    channel: grpc.aio.Channel, receiver: Incarnation, tokens: list[int], owners: list[Owner]
) -> tuple[float, prefill_pb2.FirstToken]:
    """-> seconds to the first token, and it."""
    request = prefill_pb2.PrefillRequest(
        header=common_pb2.Header(sender=ROUTER, receiver=receiver),
        key=common_pb2.RequestKey(request=uuid.uuid4().hex),
        prompt=tokens,
        sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=1),
        router=ROUTER,
    )
    for owner in owners:
        request.owners.add(
            name=owner.name, endpoint=owner.endpoint, incarnation=owner.incarnation, blocks=len(tokens) // BLOCK
        )
    began_s = time.perf_counter()
    async for event in prefill_pb2_grpc.PrefillStub(channel).Prefill(request, timeout=WAIT_S_MAX):
        if event.WhichOneof("event") == "first_token":
            return time.perf_counter() - began_s, event.first_token
    raise SystemExit("no first token came")


class NotForced(Exception):
    """What was to be fetched was computed, at least in part: a peer stood still for too long."""


async def first_token(two: Two, channel: grpc.aio.Channel, mode: str, tokens: list[int]) -> dict[str, Any]:
    await two.emptied()
    gatherer = two.half.node.gatherer
    measured, fetches = gatherer._computing, two.fetches.costs.total.times.count
    if mode == "fetch":  # computing is believed to take a second a token: all is fetched at once
        two.fetches._pauses.clear()  # the choice may have given the owner up
        gatherer._computing = ComputingCost(fixed_s=0.0, token_s=1.0)
    try:
        owners = [] if mode == "compute" else [two.owner]
        seconds, first = await ask_prefill(channel, two.incarnation, tokens, owners)
    finally:
        gatherer._computing = measured
    wanted = (len(tokens) - 1) // BLOCK * BLOCK if mode == "fetch" else 0
    if mode != "choose" and first.sources.fetched != wanted:
        raise NotForced(f"{mode}, {len(tokens)} tokens: {first.sources}")
    return {
        "seconds": seconds,
        "token": first.token,
        "fetched": first.sources.fetched,
        "fetches": two.fetches.costs.total.times.count - fetches,
    }


async def measure_choice(transport: str, lengths: list[int], rounds: int, folder: Path) -> list[dict[str, Any]]:
    params = DemoModelParams(context_len_max=max(CONTEXT, max(lengths) + 64), vocab_size=VOCAB)
    samples, rng = [], random.Random(transport)
    blocks = 2 * max(lengths) // BLOCK + 64
    async with two_nodes(folder, params, blocks, transport) as two, AsyncExitStack() as opened:
        mine = await opened.enter_async_context(grpc.aio.insecure_channel(two.endpoint))
        of_owner = await opened.enter_async_context(grpc.aio.insecure_channel(two.owner.endpoint))
        middle = sorted(lengths)[len(lengths) // 2]
        plan = [(number, length) for number in range(rounds) for length in lengths]
        for number, length in [*((-1, middle) for _ in range(WARM_UPS)), *plan]:
            tokens = prompt(rng.randrange(1 << 30), length)
            await ask_prefill(of_owner, two.owner.incarnation, tokens, [])
            found: dict[str, dict[str, Any]] = {}
            try:
                for mode in rng.sample(MODES, len(MODES)):
                    found[mode] = await first_token(two, mine, mode, tokens)
            except NotForced as error:
                print(f"left out: {error}", file=sys.stderr)
                two.fetches._pauses.clear()
                continue
            assert len({each["token"] for each in found.values()}) == 1, (length, found)
            if number >= 0:
                samples.append({"part": "choice", "transport": transport, "length": length, **found})
    return samples


async def measure_stopped(transport: str, lengths: list[int], rounds: int, folder: Path) -> list[dict[str, Any]]:
    params = DemoModelParams(context_len_max=CONTEXT, vocab_size=VOCAB)
    samples, rng = [], random.Random(transport)
    async with two_nodes(folder, params, 1024, transport) as two, AsyncExitStack() as opened:
        mine = await opened.enter_async_context(grpc.aio.insecure_channel(two.endpoint))
        of_owner = await opened.enter_async_context(grpc.aio.insecure_channel(two.owner.endpoint))
        plan = [(number, length, stop) for number in range(-1, rounds) for length in lengths for stop in STOPS]
        for number, length, stop in plan:
            tokens = prompt(rng.randrange(1 << 30), length)
            await ask_prefill(of_owner, two.owner.incarnation, tokens, [])
            found: dict[str, dict[str, Any]] = {}
            for mode in ("compute", "stopped") if number % 2 else ("stopped", "compute"):
                if mode == "compute":
                    found[mode] = await first_token(two, mine, mode, tokens)
                else:
                    found[mode] = await first_token_stopped(two, mine, tokens, stop)
            if number >= 0:
                samples.append({"part": "stopped", "transport": transport, "stop": stop, "length": length, **found})
    return samples


@contextmanager
def stopping(two: Two, stop: str) -> Iterator[None]:
    """The owner stops at that point, by a signal of its receiver's, and goes on at the end."""
    signed, loop = Fetches._signed, asyncio.get_running_loop()

    def granted(self: Fetches, fetch: Fetch) -> None:
        signed(self, fetch)
        if stop == "granted":
            two.side.signal(signal.SIGSTOP)
            return
        loop.call_soon(half_come, fetch)

    def half_come(fetch: Fetch) -> None:
        if fetch.marks is None:
            return  # it is over
        if 2 * fetch.marks.gone() >= fetch.marks.count:
            two.side.signal(signal.SIGSTOP)
        else:
            loop.call_later(LOOK_S, half_come, fetch)

    try:
        if stop == "asked":
            two.side.signal(signal.SIGSTOP)
            yield
        else:
            with patch.object(Fetches, "_signed", granted):
                yield
    finally:
        two.side.signal(signal.SIGCONT)


async def first_token_stopped(two: Two, channel: grpc.aio.Channel, tokens: list[int], stop: str) -> dict[str, Any]:
    """Each time as if the owner stopped for the first time."""
    await first_token(two, channel, "fetch", tokens)  # so that it is believed to be fast
    costs = two.fetches.costs
    silent = sum(each.silent for each in costs.owners.values())
    waited_s, gather = [], Gatherer.gather

    async def timed(self: Gatherer, asked: Prefix) -> Gathered:
        began_s = time.perf_counter()
        try:
            return await gather(self, asked)
        finally:
            waited_s.append(time.perf_counter() - began_s)

    with stopping(two, stop), patch.object(Gatherer, "gather", timed):
        found = await first_token(two, channel, "choose", tokens)
    assert found["fetched"] == 0 or stop == "half", found
    found["waited"] = sum(waited_s)
    await two.emptied()
    found["asked"] = sum(each.silent for each in costs.owners.values()) - silent
    two.fetches._pauses.clear()
    costs.owners.clear()
    return found


def report_stopped(samples: list[dict[str, Any]]) -> str:
    """Judged by what a prompt waited over computing's median: computing varies by more than the bar allows. Beside it
    the ratios of the whole times, in one round each. Without rounds whose blocks had all come before the owner stopped.
    """
    lines = [
        "transport  stops    tokens  compute ms  waited ms (max)  1 + waited/compute  "
        "stopped/compute (half of the rounds)  in vain"
    ]
    for transport, stop, length in sorted({(s["transport"], s["stop"], s["length"]) for s in samples}):
        all_of_it = [s for s in samples if (s["transport"], s["stop"], s["length"]) == (transport, stop, length)]
        mine = [s for s in all_of_it if not s["stopped"]["fetched"]]
        if not mine:
            lines.append(f"{transport:9}  {stop:7}  {length:6}  all came, {len(all_of_it)} times")
            continue
        ratios = sorted(s["stopped"]["seconds"] / s["compute"]["seconds"] for s in mine)
        compute_s = statistics.median(s["compute"]["seconds"] for s in all_of_it)
        waits_s = sorted(s["stopped"]["waited"] for s in mine)
        waited_s, quarter = statistics.median(waits_s), len(mine) // 4
        asked = sum(s["stopped"]["asked"] for s in mine)
        ratio = 1 + waited_s / compute_s
        lines.append(
            f"{transport:9}  {stop:7}  {length:6}  {1e3 * compute_s:10.1f}  "
            f"{1e3 * waited_s:6.1f} ({1e3 * waits_s[-1]:6.1f})  "
            f"{ratio:18.2f}  {statistics.median(ratios):.2f} ({ratios[quarter]:.2f}..{ratios[-1 - quarter]:.2f})"
            f"  {asked} of {len(all_of_it)}" + ("" if ratio <= STOPPED_BAR else "  MISSED")
        )
    return "\n".join(lines)


def crossover(ratios: dict[int, float]) -> str:
    """Where fetching over computing, by length, first comes to less than 1 for good."""
    lengths = sorted(ratios)
    slower = [n for n in lengths if ratios[n] >= 1]
    if not slower:
        return f"below {lengths[0]} tokens"
    if slower[-1] == lengths[-1]:
        return f"beyond {lengths[-1]} tokens"
    low, high = slower[-1], lengths[lengths.index(slower[-1]) + 1]
    share = math.log(ratios[low]) / (math.log(ratios[low]) - math.log(ratios[high]))
    return f"at about {low * (high / low) ** share:.0f} tokens"


def report_choice(samples: list[dict[str, Any]]) -> str:
    lines = ["transport  tokens  compute ms  fetch ms  choice ms  fetch/compute  choice/better  fetched by choice"]
    for transport in sorted({s["transport"] for s in samples}):
        ratios: dict[int, float] = {}
        for length in sorted({s["length"] for s in samples if s["transport"] == transport}):
            mine = [s for s in samples if (s["transport"], s["length"]) == (transport, length)]
            middle = {mode: statistics.median(s[mode]["seconds"] for s in mine) for mode in MODES}
            ratios[length] = middle["fetch"] / middle["compute"]
            better = min("fetch", "compute", key=lambda mode: middle[mode])
            choice = statistics.median(s["choose"]["seconds"] / s[better]["seconds"] for s in mine)
            share = statistics.mean(s["choose"]["fetched"] / s["fetch"]["fetched"] for s in mine)
            lines.append(
                f"{transport:9}  {length:6}  {1e3 * middle['compute']:10.1f}  {1e3 * middle['fetch']:8.1f}  "
                f"{1e3 * middle['choose']:9.1f}  {ratios[length]:13.2f}  {choice:13.2f}  {share:17.2f}"
                + ("" if choice <= CHOICE_BAR else "  MISSED")
            )
        lines.append(f"{transport}: fetching is sooner than computing from a length {crossover(ratios)}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts or ("rate", "choice"):
            for transport in options.transports or ("shm", "tcp"):
                folder = Path(name) / part
                if part == "rate":
                    for mib in options.mib:
                        samples += run_as_process(measure_rate(transport, mib, options.rounds, folder))
                elif part == "stopped":
                    samples += run_as_process(measure_stopped(transport, list(STOPPED_TOKENS), options.rounds, folder))
                else:
                    samples += run_as_process(measure_choice(transport, options.tokens, options.rounds, folder))
            mine = [sample for sample in samples if sample["part"] == part]
            report = {"rate": report_rate, "choice": report_choice, "stopped": report_stopped}[part]
            print(report(mine), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(samples))
