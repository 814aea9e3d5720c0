"""Lists of devices on the command line: `1,2`, `cuda:0,cuda:3`, a GPU's own name (`GPU-8f2e...`), `cpu`."""

from __future__ import annotations

from collections.abc import Sequence

from lowpeak.errors import ArgumentError
from lowpeak.rollout.vllm.command import CPU


def named(text: str, argument: str) -> tuple[str, ...]:
    """The devices of a list: indexes as digits, names as they are, or `("cpu",)`."""
    found = tuple(_name(each.strip(), text, argument) for each in text.split(","))
    if len(set(found)) < len(found):
        raise ArgumentError(f"{argument} {text} names a device twice.")
    if CPU in found and len(found) > 1:
        raise ArgumentError(f"{argument} {text}: cpu stands alone, or not at all.")
    return found


def _name(each: str, text: str, argument: str) -> str:
    index = each.partition(":")[2] if each.startswith(("cuda:", "gpu:", "hip:")) else each
    if index.isdigit():
        return str(int(index))
    if index == CPU or index.startswith(("GPU-", "MIG-")):
        return index
    raise ArgumentError(f"{argument} {text}: {each!r} is no device; write indexes as in 0,3, a GPU's own name, or cpu.")


def check_there(devices: Sequence[str], argument: str, num_devices: int) -> None:
    """ArgumentError where an index is not one of this machine's devices."""
    for each in devices:
        if each.isdigit() and int(each) >= num_devices:
            there = f"0 to {num_devices - 1}" if num_devices else "none; cpu is always there"
            raise ArgumentError(f"{argument} names the device {each}, and the devices of this machine are {there}.")


def check_apart(train: Sequence[str], vllm: Sequence[str]) -> None:
    """ArgumentError where a device is to train and to serve, or may be: an index and a GPU's own name cannot be compared."""
    if len({each.isdigit() for each in (*train, *vllm) if each != CPU}) > 1:
        raise ArgumentError(
            "--train_devices and --vllm_devices name GPUs in two ways: write both lists as indexes, or both as GPUs' own names."
        )
    both = [each for each in vllm if each in train and each != CPU]
    if both:
        raise ArgumentError(
            f"--train_devices and --vllm_devices both name {', '.join(both)}: give vLLM its own, or use --vllm_mode colocate."
        )
