"""A process of its own for the conformance suite: a writer, or a receiver, told what to do by lines of JSON on stdin.

Every command is answered by one line {"reply": ...}; what happens by itself is a line {"event": ...}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import ReceiverPort, Seal, WriteOps, WriterLink
from tests.conformance.transport_kits import (
    KITS,
    RDMA_KITS,
    UCX_KITS,
    ConnectErrors,
    Everything,
    endpoint_from_json,
    endpoint_to_json,
)
from tests.support.shm_peer import Events, say, source_bytes


class Peer:
    def __init__(self) -> None:
        self.links: dict[str, WriterLink] = {}
        self.port: ReceiverPort | None = None

    async def do(self, command: dict[str, Any]) -> Any:
        return await getattr(self, "do_" + command.pop("do"))(**command)

    async def do_link(
        self, kit: str, name: str, endpoint: dict[str, Any], pair: list[int], seed: int, nbytes: int
    ) -> str:
        maker = next(k for k in (*KITS, *RDMA_KITS, *UCX_KITS) if k.name == kit)
        try:
            self.links[name] = await maker.link(
                endpoint_from_json(endpoint),
                Pair(receiver=Incarnation(pair[0]), writer=Incarnation(pair[1])),
                source_bytes(seed, nbytes),
                Events(),
            )
        except ConnectErrors as error:
            return "none" if error.reason is None else error.reason.name
        return "linked"

    async def do_post(
        self, name: str, grant: str, src: list[int], dst: list[int], nbytes: list[int], times: int
    ) -> None:
        ops = WriteOps(src=np.array(src, np.int64), dst=np.array(dst, np.int64), nbytes=np.array(nbytes, np.int64))
        for _ in range(times):
            self.links[name].post(GrantId(bytes.fromhex(grant)), ops)

    async def do_seal(self, name: str, grant: str, epoch: int, writes: int, bytes_written: int) -> None:
        self.links[name].seal(
            Seal(grant=GrantId(bytes.fromhex(grant)), epoch=Epoch(epoch), writes=writes, bytes_written=bytes_written)
        )

    async def do_fenced(self, name: str) -> bool:
        return self.links[name].fenced

    async def do_close(self, name: str) -> None:
        await self.links[name].close()

    async def do_receive(self, kit: str, nbytes: int, pair: list[int], epoch: int, grants: list[str]) -> dict[str, Any]:
        maker = next(k for k in (*KITS, *RDMA_KITS, *UCX_KITS) if k.name == kit)
        self.port = maker.port(maker.region(nbytes), Events())
        of = Pair(receiver=Incarnation(pair[0]), writer=Incarnation(pair[1]))
        for grant in grants:
            self.port.allow(of, Epoch(epoch), GrantId(bytes.fromhex(grant)), Everything())
        return endpoint_to_json(self.port.expect(of, Epoch(epoch)))


async def main() -> None:
    peer = Peer()
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        say({"reply": await peer.do(json.loads(line))})


if __name__ == "__main__":
    asyncio.run(main())
