"""Mooncake Store's two sides of `benchmarks.kvstore_mooncake`. Runs in its own environment, which has NumPy and it.

    python -m benchmarks.kvstore_mooncake_side owner|getter PORT MASTER

The owner's segment has all objects; the getter has none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from benchmarks.transfer_side import REGION_BYTES, cpu_s, fill, has_landed, memory, plan_of

BUFFER_BYTES = 64 << 20


def names(size: int, seed: int, count: int) -> list[str]:
    return [f"{size}-{seed}-{i}" for i in range(count)]


class MooncakeStore:
    def __init__(self, role: str, port: str, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._region_U8 = memory(shared=False)
        if role == "owner":
            fill(self._region_U8)
        self._store = MooncakeDistributedStore()
        segment = REGION_BYTES if role == "owner" else 0
        place = (f"127.0.0.1:{port}", "P2PHANDSHAKE", segment, BUFFER_BYTES, "tcp", "", master)
        assert self._store.setup(*place) == 0
        self._base = self._region_U8.ctypes.data
        assert self._store.register_buffer(self._base, REGION_BYTES) == 0

    def put(self, size: int, seed: int) -> None:
        """Every object of this run."""
        plan = plan_of(size, seed)
        for name, src in zip(names(size, seed, len(plan.src)), plan.src, strict=True):
            assert self._store.put(name, self._region_U8[src : src + size].tobytes()) == 0, name

    def get(self, size: int, seed: int) -> dict[str, Any]:
        plan = plan_of(size, seed)
        self._region_U8[:] = 0
        keys, addresses = names(size, seed, len(plan.dst)), (plan.dst + self._base).tolist()
        cpu, began_s = cpu_s(), time.perf_counter()
        results = self._store.batch_get_into(keys, addresses, [size] * len(keys))
        seconds, cpu = time.perf_counter() - began_s, cpu_s() - cpu
        whole = set(results) == {size} and has_landed(self._region_U8, plan, len(keys))
        return {"seconds": seconds, "cpu_s": cpu, "whole": whole}

    def cpu(self) -> float:
        return cpu_s()


def main() -> None:
    # The library prints to stdout too, which belongs to the parent.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = MooncakeStore(*sys.argv[1:])
    print(json.dumps({"reply": "ready"}), file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(side, command.pop("do"))(**command)
        print(json.dumps({"reply": reply}), file=replies, flush=True)
    os._exit(0)  # nothing to give back, and its destructors take long


if __name__ == "__main__":
    main()
