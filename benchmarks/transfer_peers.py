"""NIXL and Mooncake as sides of the transfer benchmark. Runs in the peers' own environment, which has NumPy and them.

    python -m benchmarks.transfer_peers nixl|nixl-spin|mooncake

`nixl-spin` has no progress thread: its receiver asks for notifications in a loop, for as long as it lives.
"""

from __future__ import annotations

import base64
import os
import sys
import threading
from typing import Any

import numpy as np

from benchmarks.transfer_side import REGION_BYTES, Plan, Side, memory, serve


class NixlSide:
    def __init__(self, *, spins: bool) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.region_U8 = memory(shared=False)
        self._base = self.region_U8.ctypes.data
        self._spins = spins
        config = nixl_agent_config(enable_prog_thread=not spins, backends=["UCX"])
        self._name = f"agent-{os.getpid()}"
        self._agent = nixl_agent(self._name, config)
        self._agent.register_memory([(self._base, REGION_BYTES, 0, "")], "DRAM")
        self._peer, self._peer_base = "", 0

    def address(self) -> dict[str, Any]:
        if self._spins:
            threading.Thread(target=self._spin, daemon=True).start()
        return {"metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(), "base": self._base}

    def _spin(self) -> None:
        while True:
            self._agent.get_new_notifs()

    def connect(self, address: dict[str, Any]) -> None:
        name = self._agent.add_remote_agent(base64.b64decode(address["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._peer_base = address["base"]
        self._agent.make_connection(self._peer)

    def prepare(self, plan: Plan) -> Any:
        descs = [
            self._agent.get_xfer_descs(
                np.stack([at + base, np.full(len(at), plan.size), np.zeros(len(at))], axis=1).astype(np.uint64), "DRAM"
            )
            for at, base in ((plan.src, self._base), (plan.dst, self._peer_base))
        ]
        return self._agent.initialize_xfer("WRITE", descs[0], descs[1], self._peer)

    def move(self, prepared: Any) -> None:
        state = self._agent.transfer(prepared)
        while state == "PROC":
            state = self._agent.check_xfer_state(prepared)
        assert state == "DONE", state


class MooncakeSide:
    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self.region_U8 = memory(shared=False)
        self._base = self.region_U8.ctypes.data
        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(self._base, REGION_BYTES) == 0
        self._peer, self._peer_base = "", 0

    def address(self) -> dict[str, Any]:
        return {"peer": f"127.0.0.1:{self._engine.get_rpc_port()}", "base": self._base}

    def connect(self, address: dict[str, Any]) -> None:
        self._peer, self._peer_base = address["peer"], address["base"]

    def prepare(self, plan: Plan) -> Any:
        return (plan.src + self._base).tolist(), (plan.dst + self._peer_base).tolist(), [plan.size] * len(plan.src)

    def move(self, prepared: Any) -> None:
        assert self._engine.batch_transfer_sync_write(self._peer, *prepared) == 0


def main(method: str) -> None:
    # The libraries print to stdout too, which belongs to the parent.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: Side = MooncakeSide() if method == "mooncake" else NixlSide(spins=method == "nixl-spin")
    serve(side, replies)


if __name__ == "__main__":
    main(sys.argv[1])
