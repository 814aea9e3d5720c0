"""The devices and hosts that a run is planned for, and named cards with their data sheets' numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowpeak.errors import ArgumentError

GIB = 1 << 30
MIB = 1 << 20
GB = 10**9


@dataclass(frozen=True)
class Card:
    """Numbers of one device, from its vendor's data sheet except for the memory.

    memory        bytes of device memory that the driver reports (NVML; without ECC's share where it takes one)
    flops         dense bf16 products per second
    bandwidth     bytes per second of the device memory
    link          bytes per second, one way, to another device of the host
    host_link     bytes per second to host memory
    fp32_flops    fp32 products per second of a CPU; None: a GPU, whose passes compute in bf16
    """

    memory: int
    flops: float
    bandwidth: float
    link: float
    host_link: float
    fp32_flops: float | None = None


# Dense bf16 throughput without sparsity, and one direction of each link. Volta and Turing have no bf16 units: torch computes it in
# fp32. Apple's memory is three quarters of the unified memory, what Metal recommends to use.
CARDS: dict[str, Card] = {
    "rtx3060": Card(12 * GIB, 25e12, 360e9, 12e9, 12e9),
    "rtx4080": Card(16_376 * MIB, 97e12, 717e9, 12e9, 24e9),
    "rtx5090": Card(32_607 * MIB, 209e12, 1792e9, 24e9, 48e9),
    "t4": Card(15 * GIB, 8.1e12, 320e9, 12e9, 12e9),
    "v100": Card(32_510 * MIB, 15.7e12, 900e9, 150e9, 12e9),
    "v100-16": Card(16_160 * MIB, 15.7e12, 900e9, 150e9, 12e9),
    "l4": Card(23_034 * MIB, 121e12, 300e9, 24e9, 24e9),
    "rtxa6000": Card(49_140 * MIB, 154e12, 768e9, 24e9, 24e9),
    "rtx6000ada": Card(49_140 * MIB, 364e12, 960e9, 24e9, 24e9),
    "rtxpro6000": Card(97_887 * MIB, 503e12, 1792e9, 48e9, 48e9),
    "apple-m2-ultra": Card(144 * GIB, 27e12, 800e9, 800e9, 800e9),
    "apple-m3-max": Card(96 * GIB, 14e12, 400e9, 400e9, 400e9),
    "apple-m4-max": Card(96 * GIB, 18e12, 546e9, 546e9, 546e9),
    "rtx3090": Card(24 * GIB, 71e12, 936e9, 12e9, 12e9),
    "rtx4090": Card(24_564 * MIB, 165e12, 1008e9, 12e9, 24e9),
    "a10": Card(23_028 * MIB, 125e12, 600e9, 24e9, 24e9),
    "l40s": Card(46_068 * MIB, 362e12, 864e9, 24e9, 24e9),
    "a100-40": Card(40 * GIB, 312e12, 1555e9, 300e9, 24e9),
    "a100": Card(80 * GIB, 312e12, 2039e9, 300e9, 24e9),
    "h100": Card(81_559 * MIB, 989e12, 3350e9, 450e9, 50e9),
    "h200": Card(143_771 * MIB, 989e12, 4800e9, 450e9, 50e9),
    "b200": Card(183_359 * MIB, 2250e12, 8000e9, 900e9, 50e9),
    "mi250x": Card(64 * GIB, 191e12, 1638e9, 50e9, 36e9),  # one of the card's two devices, as on Frontier
    "mi300x": Card(192 * GIB, 1307e12, 5300e9, 64e9, 50e9),
}
# For a device of which only the memory is known.
_DEFAULT = "a100"


@dataclass(frozen=True)
class Machine:
    """The devices of a run. `device` "cpu" plans ranks on the CPUs of one host.

    memory        bytes of a device that the run may take
    host_memory   bytes of each host's memory; None: unknown, so never a limit
    per_host      devices of a host
    network       bytes per second, one way, that a device has to other hosts
    latency       factor on the cost model's seconds for the start of kernels
    """

    num_devices: int
    memory: int
    host_memory: int | None = None
    per_host: int = 8
    card: Card = CARDS[_DEFAULT]
    network: float = 25e9
    latency: float = 1.0
    device: Literal["cuda", "cpu"] = "cuda"
    device_memory: int | None = None  # bytes of the whole device, if `memory` is a budget
    sends_by_nccl: bool = False  # weights, to vLLM servers on other devices

    @property
    def total(self) -> int:
        """Bytes of the whole device."""
        return self.memory if self.device_memory is None else self.device_memory

    @property
    def uses_nccl(self) -> bool:
        return self.num_devices > 1 or self.sends_by_nccl

    @property
    def devices_on_host(self) -> int:
        return min(self.per_host, self.num_devices)

    @property
    def num_hosts(self) -> int:
        return -(-self.num_devices // self.per_host)


def card_of(name: str) -> Card:
    """Return the card whose name is part of a device's name, such as "NVIDIA H100 80GB HBM3"; the default for others."""
    words = name.lower().replace("geforce ", "").replace(" ", "")
    keys = [key for key in CARDS if key.split("-")[0] in words]
    return CARDS[max(keys, key=lambda key: len(key.split("-")[0]), default=_DEFAULT)]


def card_name(card: Card) -> str:
    """Return a card's name in the table; empty for one that is not in it."""
    return next((name for name, each in CARDS.items() if each == card), "")


def find_card(name: str) -> Card:
    """Return a card by its name; ArgumentError for one that is not in the table."""
    key = name.lower().replace("_", "-").replace("-80", "")
    if key not in CARDS:
        raise ArgumentError(
            f"--gpu {name} is not in the table of cards ({', '.join(CARDS)}): give --gpu_memory in its place."
        )
    return CARDS[key]
