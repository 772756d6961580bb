"""What a GPU's driver says of network cards that read and write its memory, and whether its calls work. Without one."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict
from typing import Any

from benchmarks.gpu_receiver import make_driver
from kvtransfer.device.region import DeviceRegion

REGION_BYTES = (64 << 20) + 100
"""Not whole pages."""
FLUSHES = 200


def card(device: str) -> dict[str, Any]:
    """The attributes; what kind of file the region's dma-buf is, if there is one; the time of a flush of nothing.

    Raises DeviceError.
    """
    driver = make_driver(device)
    allowed = driver.gpudirect()
    figures: dict[str, Any] = asdict(allowed)
    region = DeviceRegion(driver, REGION_BYTES, "bench-card", shared=False)
    try:
        if allowed.dma_buf:
            made = driver.dma_buf(region.address, region.nbytes)
            try:
                figures["dma_buf_file"] = os.readlink(f"/proc/self/fd/{made.fd}")
                figures["dma_buf_offset"] = made.offset
            finally:
                os.close(made.fd)
        if allowed.host_flushes:
            times_us = []
            for _ in range(FLUSHES):
                begin = time.perf_counter()
                driver.flush_remote_writes()
                times_us.append((time.perf_counter() - begin) * 1e6)
            figures["flush_us"] = statistics.median(times_us)
    finally:
        region.close()
    return figures
