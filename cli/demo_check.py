"""What the demo checks: the answers against one process, and that the nodes hold nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from baton.rpc_client import Channels
from cli.client import Answer
from cli.cluster_view import NodeView, view_nodes
from cli.demo_prompts import DemoRequest
from cli.reference import Reference
from engine.types import SamplingParams

IDLE_MS_MAX: Final = 5_000
"""How long after the last answer the nodes may take to let go of everything."""
IDLE_POLL_MS: Final = 100
STATUS_CALL_MS_MAX: Final = 2_000
_REFERENCE_BLOCKS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """An answer that is not what one process computes."""

    name: str
    what: str


async def find_mismatches(
    answers: Sequence[tuple[DemoRequest, Answer]], *, model: Path, compute_threads: int
) -> list[Mismatch]:
    """Compute every request again in this process. Raises BatonError where the model cannot be loaded."""
    reference = await asyncio.to_thread(Reference, model, num_blocks=_REFERENCE_BLOCKS, compute_threads=compute_threads)
    found = []
    for request, answer in answers:
        mismatch = _compare(request, answer, reference)
        if mismatch is not None:
            found.append(mismatch)
        await asyncio.sleep(0)  # let Ctrl-C in
    return found


def _compare(request: DemoRequest, answer: Answer, reference: Reference) -> Mismatch | None:
    prompt = reference.encode(request.prompt)
    if answer.stats.prompt_tokens != len(prompt):
        what = f"the prompt has {len(prompt)} tokens, the router counted {answer.stats.prompt_tokens}"
        return Mismatch(name=request.name, what=what)
    expected = reference.answer(prompt, _params(request))
    for index, (token, right) in enumerate(zip_longest(answer.ids, expected)):
        if token != right:
            what = f"output token {index} is {token}, one process draws {right}"
            return Mismatch(name=request.name, what=what)
    if answer.text != (text := reference.decode(expected)):
        return Mismatch(name=request.name, what=f"the text is {answer.text!r}, its tokens say {text!r}")
    return None


def _params(request: DemoRequest) -> SamplingParams:
    """What the router makes of the request, by the defaults that the interface states."""
    sampling = request.sampling
    assert sampling.max_tokens is not None and (sampling.seed is not None or sampling.temperature == 0), request.name
    return SamplingParams(
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        seed=sampling.seed or 0,
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


async def wait_idle(directory: str, *, channels: Channels, nodes_expected: int) -> list[str]:
    """Ask the nodes until none holds anything, for at most IDLE_MS_MAX; then what is still held, a line for each node.

    Raises BatonError where the directory does not answer.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + IDLE_MS_MAX / 1e3
    while True:
        views = await view_nodes(directory, channels=channels, call_ms_max=STATUS_CALL_MS_MAX)
        leftovers = [f"{view.record.name}: {what}" for view in views if (what := held_by(view))]
        if len(views) != nodes_expected:
            leftovers.append(f"the directory knows {len(views)} nodes instead of {nodes_expected}")
        if not leftovers or loop.time() >= give_up_s:
            return leftovers
        await asyncio.sleep(IDLE_POLL_MS / 1e3)


def held_by(view: NodeView) -> str:
    """What the node holds that an idle one does not; empty for nothing."""
    status = view.status
    if status is None:
        return f"does not answer: {view.problem}"
    load = status.record.load
    counts = {
        "requests": status.requests,
        "waiting requests": load.waiting_requests,
        "running requests": load.running_requests,
        "grants received": status.grants_received,
        "grants written": status.grants_written,
        "unacknowledged writes": status.unacknowledged_writes,
        "blocks held": load.blocks.held,
        "blocks owned by a writer": load.blocks.writer_owned,
        "blocks quarantined": load.blocks.quarantined,
        "blocks promised": load.blocks.promised,
        "conservation errors": status.conservation_errors,
    }
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)
