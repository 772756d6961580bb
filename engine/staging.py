"""From the host's arrays to a device, without a wait."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on `device`, queued behind what is queued there; on the CPU the array itself.

    Through pinned memory: for any other, the host waits until the device has done all that was queued before. PyTorch
    keeps the pinned copy until it has been read. The array may be changed at once where the device is not the CPU.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
