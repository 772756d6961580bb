"""What a GPU's driver says of network cards that read and write its memory, and whether its calls work. Without one."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict

from benchmarks.gpu_children import Figures
from benchmarks.gpu_receiver import make_driver
from kvtransfer.device.driver import DeviceDriver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DeviceError

REGION_BYTES = (64 << 20) + 100
"""Not whole pages."""
FLUSHES = 200


def card(device: str, figures: Figures) -> None:
    """The attributes; what kind of file the region's dma-buf is, if there is one; the time of a flush of nothing. What
    the driver refuses is told in its words: what it says of the device and what it does are two things.

    Raises DeviceError: there is no device, or no room on it.
    """
    driver = make_driver(device)
    allowed = driver.gpudirect()
    figures.add(**asdict(allowed))
    region = DeviceRegion(driver, REGION_BYTES, "bench-card", shared=False)
    try:
        if allowed.dma_buf:
            try:
                _dma_buf(driver, region, figures)
            except DeviceError as refused:
                figures.add(dma_buf_refused=str(refused))
        if allowed.host_flushes:
            try:
                figures.add(flush_us=_flush_us(driver))
            except DeviceError as refused:
                figures.add(flush_refused=str(refused))
    finally:
        region.close()


def _dma_buf(driver: DeviceDriver, region: DeviceRegion, figures: Figures) -> None:
    made = driver.dma_buf(region.address, region.nbytes)
    try:
        figures.add(dma_buf_file=os.readlink(f"/proc/self/fd/{made.fd}"), dma_buf_offset=made.offset)
    finally:
        os.close(made.fd)


def _flush_us(driver: DeviceDriver) -> float:
    times_us = []
    for _ in range(FLUSHES):
        begin = time.perf_counter()
        driver.flush_remote_writes()
        times_us.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times_us)
