"""Devices of this machine: their number, and lists of them on the command line."""

from __future__ import annotations

from lowpeak.errors import ArgumentError
from lowpeak.vllm.serving import CPU


def num_devices() -> int:
    """Return the number of accelerators that this process may use; 0 on a machine with CPUs only."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def read_devices(text: str, argument: str, num_devices: int | None = None) -> tuple[str, ...]:
    """Return the devices of a list such as `1,2`, `cuda:0,cuda:3`, `GPU-8f2e...` (a UUID) or `cpu`.

    Indexes become digits; UUIDs and `cpu` stay. `num_devices` None skips the check of indexes. ArgumentError for a device that
    does not exist or is named twice.
    """
    devices = tuple(_read_device(each.strip(), text, argument) for each in text.split(","))
    if len(set(devices)) < len(devices):
        raise ArgumentError(f"{argument} {text} names a device twice.")
    if CPU in devices and len(devices) > 1:
        raise ArgumentError(f"{argument} {text}: cpu must be the only device; name cpu alone, or remove it.")
    for each in devices:
        if num_devices is not None and each.isdigit() and int(each) >= num_devices:
            available = f"its devices are 0 to {num_devices - 1}" if num_devices else "this machine has no GPU"
            raise ArgumentError(f"{argument} names the device {each}, but {available}; cpu is always available.")
    return devices


def _read_device(each: str, text: str, argument: str) -> str:
    index = each.partition(":")[2] if each.startswith(("cuda:", "gpu:", "hip:")) else each
    if index.isdigit():
        return str(int(index))
    if index == CPU or index.startswith(("GPU-", "MIG-")):
        return index
    raise ArgumentError(f"{argument} {text}: {each!r} is not a device; use indexes such as 0,3, a GPU's UUID, or cpu.")
