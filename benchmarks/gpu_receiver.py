"""The receiving process of `benchmarks/gpu.py`: a region on the device, one cuda_ipc port, a commit that is answered
when the seal of its grant has landed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from typing import Any

import grpc

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.device.driver import CudaDriver, DeviceDriver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DataEndpoint, Seal, TransportName
from kvtransfer.transports.cuda_ipc import CudaIpcReceiverPort

PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(2))
GRANT = GrantId(bytes(16))
REGION_BYTES = 512 << 20
SERVICE = "baton.benchmark.Handoff"
COMMIT = f"/{SERVICE}/Commit"
"""The request is the grant's id; both messages are bare bytes."""


def make_driver(device: str) -> DeviceDriver:
    """CUDA's, or the tests' stand-in for a smoke test of the benchmark."""
    if device == "cuda":
        return CudaDriver()
    from tests.support.fake_device import FakeDriver

    return FakeDriver()


def endpoint_from(fields: dict[str, Any]) -> DataEndpoint:
    return DataEndpoint(
        transport=TransportName.CUDA_IPC,
        address=fields["address"],
        secret=bytes.fromhex(fields["secret"]),
        epoch=Epoch(1),
    )


class _Events:
    def __init__(self) -> None:
        self.sealed: defaultdict[GrantId, asyncio.Event] = defaultdict(asyncio.Event)

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self.sealed[seal.grant].set()

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        asyncio.get_running_loop().stop()


async def _serve_commits(events: _Events) -> tuple[grpc.aio.Server, int]:
    async def commit(grant: bytes, context: Any) -> bytes:
        await events.sealed[GrantId(grant)].wait()
        return b""

    server = grpc.aio.server()
    methods = {"Commit": grpc.unary_unary_rpc_method_handler(commit)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def _listen(device: str) -> None:
    events = _Events()
    server, commit_port = await _serve_commits(events)
    region = DeviceRegion(make_driver(device), REGION_BYTES, "bench-region")
    port = CudaIpcReceiverPort(
        region=region,
        events=events,
    )
    endpoint = port.expect(PAIR, Epoch(1))
    reported = {"address": endpoint.address, "secret": endpoint.secret.hex(), "commit_port": commit_port}
    print(json.dumps(reported), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_listen(sys.argv[1]))
