"""Lists of devices on the command line: `1,2`, `cuda:0,cuda:3`, a GPU's UUID (`GPU-8f2e...`), `cpu`."""

from __future__ import annotations

from lowpeak.errors import ArgumentError
from lowpeak.vllm.serving import CPU


def read_devices(text: str, argument: str, num_devices: int | None = None) -> tuple[str, ...]:
    """Return the devices of a list: indexes as digits, UUIDs as they are, or `("cpu",)`; None: the machine's number is unknown."""
    devices = tuple(_read_one(each.strip(), text, argument) for each in text.split(","))
    if len(set(devices)) < len(devices):
        raise ArgumentError(f"{argument} {text} names a device twice.")
    if CPU in devices and len(devices) > 1:
        raise ArgumentError(f"{argument} {text}: cpu stands alone, or not at all.")
    for each in devices:
        if num_devices is not None and each.isdigit() and int(each) >= num_devices:
            there = f"0 to {num_devices - 1}" if num_devices else "none; cpu is always there"
            raise ArgumentError(f"{argument} names the device {each}, and the devices of this machine are {there}.")
    return devices


def _read_one(each: str, text: str, argument: str) -> str:
    index = each.partition(":")[2] if each.startswith(("cuda:", "gpu:", "hip:")) else each
    if index.isdigit():
        return str(int(index))
    if index == CPU or index.startswith(("GPU-", "MIG-")):
        return index
    raise ArgumentError(f"{argument} {text}: {each!r} is no device; write indexes as in 0,3, a GPU's UUID, or cpu.")
