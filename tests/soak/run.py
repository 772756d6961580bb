"""Garbage on every port of a cluster beside streams: none of them notices; memory, files and threads stay as they are.

A few minutes of it show leaks that one attack does not: each process is looked at again and again.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cli.supervisor import DIRECTORY_NAME, ROUTER_NAME
from tests.support.attack import STREAMS, Bystanders, Front, bystanders, front_door
from tests.support.loop_holds import Holds
from tests.support.ports import free_ports

_ERROR: Final = re.compile(r"^\d{4}-.* ERROR .*(?:\n(?!\d{4}-).*)*", re.MULTILINE)
"""With its traceback."""
LOOKS: Final = 20
"""At each process. The first quarter is for warming up."""
RSS_GROWTH_MIB_MAX: Final = 24
"""From the second quarter's mean to the last one's."""
FILES_GROWTH_MAX: Final = 192
"""A connection at a router's gRPC port has three, and how many are open at a moment is chance."""
THREADS_GROWTH_MAX: Final = 4
LOG_LINES_PER_S_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Soaked:
    """What a soak has shown."""

    seconds: float
    thrown: Mapping[str, int]
    answers: int
    longest_hold_ms: float
    """Of the router."""
    gap_p99_ms: float
    gap_max_ms: float
    looks: Mapping[str, Sequence[Holds]]
    """By process."""
    log_lines: Mapping[str, int]
    errors: Sequence[str]
    """What the processes have logged as errors: bugs of ours."""

    def growth(self, name: str, what: str) -> float:
        """Of a process, from the second quarter of its looks to the last."""
        values: list[float] = [getattr(look, what) for look in self.looks[name]]
        quarter = len(values) // 4
        return sum(values[-quarter:]) / quarter - sum(values[quarter : 2 * quarter]) / quarter

    def table(self) -> dict[str, Any]:
        """For people."""
        last = {name: looks[-1] for name, looks in self.looks.items()}
        return {
            "seconds": round(self.seconds),
            "connections": sum(self.thrown.values()),
            "thrown": dict(sorted(self.thrown.items())),
            "answers": self.answers,
            "longest_hold_ms": round(self.longest_hold_ms, 1),
            "errors": list(self.errors),
            "gap_p99_ms": round(self.gap_p99_ms, 1),
            "gap_max_ms": round(self.gap_max_ms, 1),
            "processes": {
                name: {
                    "rss_mib": round(last[name].rss_kib / 1024),
                    "rss_growth_mib": round(self.growth(name, "rss_kib") / 1024, 1),
                    "files": last[name].files,
                    "files_growth": round(self.growth(name, "files"), 1),
                    "threads": last[name].threads,
                    "threads_growth": round(self.growth(name, "threads"), 1),
                    "cpu_s": round(last[name].cpu_s, 1),
                    "log_lines": self.log_lines[name],
                }
                for name in self.looks
            },
        }

    def check(self) -> None:
        assert not self.errors, self.errors
        for name in self.looks:
            assert self.growth(name, "rss_kib") <= RSS_GROWTH_MIB_MAX * 1024, (name, self.table())
            assert self.growth(name, "files") <= FILES_GROWTH_MAX, (name, self.table())
            assert self.growth(name, "threads") <= THREADS_GROWTH_MAX, (name, self.table())
            assert self.log_lines[name] <= LOG_LINES_PER_S_MAX * self.seconds, (name, self.table())


def _targets(front: Front, data: Sequence[str]) -> list[str]:
    """Each port, with what is thrown at it."""
    served = dict(re.findall(r"(\w+)=(127\.0\.0\.1:\d+)", front.log_text(ROUTER_NAME)))
    endpoints = front.cluster.endpoints
    targets = [f"grpc={endpoints[name]}" for name in endpoints]
    targets += [f"http={front.http}", *(f"data={endpoint}" for endpoint in data), "shm=baton-shm-"]
    targets += [f"{kind}={served[what]}" for what, kind in (("admin", "grpc"), ("metrics", "http")) if what in served]
    # Most of it at what the public reaches.
    return targets + [f"http={front.http}", f"grpc={front.cluster.router}"] * 2


async def _soak(front: Front, data: Sequence[str], *, seconds: float, seed: int) -> tuple[Bystanders, Soaked]:
    command = [sys.executable, "-m", "tests.soak.garbage", str(seed), str(seconds), *_targets(front, data)]
    readers = {name: await front.holds(name) for name in front.cluster.names}
    looks: dict[str, list[Holds]] = {name: [] for name in readers}
    before = {name: front.log_text(name).count("\n") for name in readers}
    async with bystanders(front) as others:
        for reader in readers.values():
            await reader.reset()
        throwing = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            for _ in range(LOOKS):
                await asyncio.sleep(seconds / LOOKS)
                for name, reader in readers.items():
                    looks[name].append(await reader.read())
            out, _ = await throwing.communicate()
        finally:
            if throwing.returncode is None:
                throwing.kill()
                await throwing.wait()
    for reader in readers.values():
        await reader.close()
    gaps_s = sorted(gap_s for each in others.each for gap_s in each.gaps_s)
    return others, Soaked(
        seconds=seconds,
        thrown=Counter(json.loads(out)),
        answers=sum(each.answers for each in others.each),
        longest_hold_ms=others.longest_hold_ms(),
        gap_p99_ms=gaps_s[len(gaps_s) * 99 // 100] * 1e3,
        gap_max_ms=gaps_s[-1] * 1e3,
        looks=looks,
        errors=[found for name in readers for found in _ERROR.findall(front.log_text(name))],
        log_lines={name: front.log_text(name).count("\n") - before[name] for name in readers},
    )


def soak(*, seconds: float, seed: int) -> tuple[Bystanders, Soaked]:
    """Over a cluster with a decode node of each transport. The caller checks both."""
    ports = [f"127.0.0.1:{port}" for port in free_ports(1)]
    with front_door(
        tokenizer=True,
        decode=2,
        prefill_flags={"transports": "tcp,shm"},
        node_flags={
            "decode-0": {"transports": "tcp", "data_listen": ports[0]},
            "decode-1": {"transports": "shm"},
        },
    ) as front:
        assert {ROUTER_NAME, DIRECTORY_NAME} <= set(front.cluster.names)
        others, soaked = front.run(_soak(front, ports, seconds=seconds, seed=seed))
        others.check()
    assert len(others.each) == STREAMS
    return others, soaked
