"""The receiving process of `benchmarks/gpu.py`: a region on the device, one cuda_ipc port, a line for each seal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.device.driver import CudaDriver, DeviceDriver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DataEndpoint, Seal, TransportName
from kvtransfer.transports.cuda_ipc import CudaIpcReceiverPort

PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(2))
GRANT = GrantId(bytes(16))
REGION_BYTES = 512 << 20


def make_driver(device: str) -> DeviceDriver:
    """CUDA's, or the tests' stand-in for a smoke test of the benchmark."""
    if device == "cuda":
        return CudaDriver()
    from tests.fake_device import FakeDriver

    return FakeDriver()


def endpoint_from(fields: dict[str, Any]) -> DataEndpoint:
    return DataEndpoint(
        transport=TransportName.CUDA_IPC,
        address=fields["address"],
        secret=bytes.fromhex(fields["secret"]),
        epoch=Epoch(1),
    )


class _Events:
    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        print(seal.bytes_written, flush=True)

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        asyncio.get_running_loop().stop()


async def _listen(device: str) -> None:
    region = DeviceRegion(make_driver(device), REGION_BYTES, "bench-region")
    port = CudaIpcReceiverPort(
        region=region,
        events=_Events(),
        loop=asyncio.get_running_loop(),
        randomness=os.urandom,
    )
    endpoint = port.expect(PAIR, Epoch(1))
    print(json.dumps({"address": endpoint.address, "secret": endpoint.secret.hex()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_listen(sys.argv[1]))
