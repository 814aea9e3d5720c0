"""Devices with memory beside the host's: CUDA and others, by the functions that torch's device modules have in common."""

from __future__ import annotations

import torch


def has_memory(device: torch.device) -> bool:
    """Return whether a tensor on the device is not in host memory: False for the CPU and for Apple's shared memory."""
    return device.type not in ("cpu", "mps")


def with_index(device: torch.device) -> torch.device:
    """Return a device that has memory by its number, as its tensors name it; the current one if `device` has no number."""
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)
