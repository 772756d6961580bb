"""`DeviceStreams` by torch.cuda. Runs on a GPU only; the order of the calls is what the tests check, elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from triton.errors import TritonError

from kvtransfer.device.copy_kernel import copy_records
from kvtransfer.device.streams import DeviceError
from kvtransfer.transport import WriteOps


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        with _device_errors():
            return bool(self.event.query())


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self) -> CudaEvent:
        with _device_errors():
            event = torch.cuda.Event()
            event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: CudaEvent) -> None:
        with _device_errors():
            self.stream.wait_event(event.event)


class CudaStreams:
    """The streams of one CUDA device. Side streams have high priority: a copy that waits delays another node."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> CudaStream:
        stream = torch.cuda.current_stream(self._device)
        # Blocks are computed on one thread and posted on another too, which knows of the device's default stream only.
        assert stream == torch.cuda.default_stream(self._device), (
            "transfers are posted from the device's default stream"
        )
        return CudaStream(stream)

    def side(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self._device, priority=-1))

    def copy(self, stream: CudaStream, dst: torch.Tensor, src: torch.Tensor, ops: WriteOps) -> None:
        with _device_errors(), torch.cuda.stream(stream.stream):
            copy_records(dst, src, ops)


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Whatever CUDA raises, or Triton for a kernel that it cannot compile or launch. After an error of a kernel the
    context is lost: every later call raises it again."""
    try:
        yield
    except (RuntimeError, TritonError) as error:
        raise DeviceError(str(error)) from error
