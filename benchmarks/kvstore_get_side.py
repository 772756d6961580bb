"""The owner of our side of `benchmarks.kvstore_mooncake`: looks tokens up, writes their blocks to who asks, over tcp.

python -m benchmarks.kvstore_get_side STREAMS
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

import numpy as np

from benchmarks.transfer_ours import OurSide
from benchmarks.transfer_side import cpu_s, fill, plan_of
from cachestore.tier_books import TierBooks, TierSlot, block_keys
from kvtransfer.transport import TransportName, WriteOps

ROOT, SALT = b"bench", b"tenant"
BLOCK_TOKENS = 16


def prompt(size: int, seed: int) -> list[int]:
    """As many tokens as the blocks of a run have."""
    return [seed + token for token in range(len(plan_of(size, seed).src) * BLOCK_TOKENS)]


class Owner(OurSide):
    def index(self, size: int, seed: int) -> None:
        """Enter every block of this run."""
        plan = plan_of(size, seed)
        self._src = plan.src
        self._books = TierBooks(len(plan.src), size)
        for slot, key in enumerate(block_keys(ROOT, SALT, prompt(size, seed), BLOCK_TOKENS)):
            assert self._books.restore(TierSlot(slot), key)
        self._books.end_restore()

    def get(self, size: int, tokens: str, dst: str) -> dict[str, Any]:
        """Digests of the tokens, the longest run that is here, and its blocks into the asker's memory."""
        cpu = cpu_s()
        tokens_ids = np.frombuffer(base64.b64decode(tokens), dtype=np.int64).tolist()
        slots = self._books.match(block_keys(ROOT, SALT, tokens_ids, BLOCK_TOKENS))
        dst_B = np.frombuffer(base64.b64decode(dst), dtype=np.int64)[: len(slots)].copy()
        self._books.begin_load(slots)
        self.move(WriteOps(src=self._src[slots], dst=dst_B, nbytes=np.full(len(slots), size, dtype=np.int64)))
        self._books.end_load(slots)
        return {"blocks": len(slots), "cpu_s": cpu_s() - cpu}


def main() -> None:
    side = Owner(TransportName.TCP, int(sys.argv[1]))
    fill(side.region_U8)
    print(json.dumps({"reply": "ready"}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = getattr(side, command.pop("do"))(**command)
        print(json.dumps({"reply": reply}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
