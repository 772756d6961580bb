"""A process of its own for the conformance suite: a writer, or a receiver, told what to do by lines of JSON on stdin.

Every command is answered by one line {"reply": ...}; what happens by itself is a line {"event": ...}.
"""

from __future__ import annotations

import asyncio
from typing import Any

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import ReceiverPort
from tests.conformance.transport_kits import (
    KITS,
    RDMA_KITS,
    UCX_KITS,
    ConnectErrors,
    Everything,
    endpoint_from_json,
    endpoint_to_json,
)
from tests.support.shm_peer import Events, LinkPeer, source_bytes


class Peer(LinkPeer):
    def __init__(self) -> None:
        super().__init__()
        self.port: ReceiverPort | None = None

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
    await Peer().serve()


if __name__ == "__main__":
    asyncio.run(main())
