"""How each strategy places a model on its ranks: one row per name. Code asks a row's fields, never the name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from lowpeak.memory import Kind


class Over(Enum):
    """The ranks that a kind of memory is divided over."""

    NONE = "none"  # each rank has all of it
    COPY = "copy"  # the ranks that share one copy of the model


class Reduces(Enum):
    """When ranks combine their gradients."""

    NEVER = "never"
    AT_END = "at the end"  # after the last backward of a step, which nothing hides
    BESIDE_LAST = "beside the last"  # once a step, while the last backward runs
    EACH_BATCH = "each batch"  # in each micro-batch, while its backward runs


@dataclass(frozen=True)
class Sharding:
    """A strategy: a rank's share of each kind of bytes, and the collectives of its passes.

    Under tensor parallelism a "model" is a device's part of it, and ranks are groups of devices.

    weights, gradients, states, frozen   ranks that they are divided over (`frozen`: reference and reward models)
    on_host          kinds that stay in host memory
    copies           copies of the model: one, one on each host, or one on each rank
    gathers          passes gather weights layer by layer, if there are several ranks
    reduces          when gradients are combined
    resends_weights  updated weights are sent again after the update
    has_formats      weight_bits and offload_optimizer act, and layers pass on bf16 (DeepSpeed has formats of its own)
    loads_once       one process of a host reads the checkpoint for all of its processes
    streams_frozen   offload_frozen_models works
    grows            more devices lower the state of each
    splits_tensors   over the devices of a rank
    is_offered       `--fit` may choose it; with `needs_gpu` on GPUs alone
    least_gain       `--fit` takes it only if its step, times this, is still the fastest
    preset           accelerate preset with this strategy
    """

    name: str
    weights: Over = Over.NONE
    gradients: Over = Over.NONE
    states: Over = Over.NONE
    frozen: Over = Over.NONE
    on_host: frozenset[Kind] = frozenset()
    copies: Literal["one", "per host", "per rank"] = "one"
    gathers: bool = False
    reduces: Reduces = Reduces.NEVER
    resends_weights: bool = False
    has_formats: bool = True
    loads_once: bool = False
    streams_frozen: bool = True
    grows: bool = False
    splits_tensors: bool = False
    is_offered: bool = True
    needs_gpu: bool = False
    least_gain: float = 1.0
    preset: str = ""

    def num_copies(self, ranks: int, hosts: int) -> int:
        """Return the copies of the model on so many ranks."""
        return {"one": 1, "per host": hosts, "per rank": ranks}[self.copies]

    def mesh(self, ranks: int, hosts: int) -> tuple[int, int]:
        """Return (shards, copies) of a rehearsal; (1, 1) for DeepSpeed, whose own code cannot be rehearsed."""
        if not self.has_formats:
            return 1, 1
        copies = self.num_copies(ranks, hosts)
        return (ranks // copies if self.gathers else 1), copies

    def share(self, kind: Kind, ranks: int, copies: int) -> float:
        """Return a rank's fraction of a kind's bytes, with so many copies of the model on all ranks."""
        over = {Kind.WEIGHTS: self.weights, Kind.GRADIENTS: self.gradients, Kind.OPTIMIZER: self.states}
        return 1.0 if over.get(kind, self.frozen) is Over.NONE else copies / ranks

    def fraction(self, kind: Kind, ranks: int, copies: int) -> float:
        """Return the fraction on a rank's device: its share, or 0 for kinds in host memory."""
        return 0.0 if kind in self.on_host else self.share(kind, ranks, copies)

    def sends_weights(self, ranks: int) -> bool:
        """Return whether passes gather weights from other ranks."""
        return self.gathers and ranks > 1

    def runs_on(self, devices: int, hosts: int) -> bool:
        """Return whether it differs from a plainer strategy on so many devices and hosts."""
        return (devices == 1) == (self.reduces is Reduces.NEVER) and (hosts > 1 or self.copies != "per host")

    def crosses_hosts(self, hosts: int) -> bool:
        """Return whether the ranks of one copy are on several hosts."""
        return hosts > 1 and self.copies != "per host"


TRAINED_KINDS = frozenset({Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER})


_SINGLE = Sharding("single", preset="single")
_FSDP2 = Sharding(
    "fsdp2",
    *(Over.COPY, Over.COPY, Over.COPY, Over.COPY),
    gathers=True,
    reduces=Reduces.EACH_BATCH,
    loads_once=True,
    grows=True,
    needs_gpu=True,
    preset="fsdp2",
)
_ZERO2 = Sharding(
    "zero2",
    *(Over.NONE, Over.COPY, Over.COPY, Over.NONE),
    reduces=Reduces.EACH_BATCH,
    resends_weights=True,
    has_formats=False,
    least_gain=1.03,
    preset="zero2",
)
_ZERO3 = replace(
    _ZERO2,
    name="zero3",
    weights=Over.COPY,
    frozen=Over.COPY,
    gathers=True,
    resends_weights=False,
    grows=True,
    preset="zero3",
)


def _offloaded(row: Sharding) -> Sharding:
    name = f"{row.name}-offload"
    return replace(row, name=name, on_host=TRAINED_KINDS, is_offered=False, preset=name)


SHARDINGS: dict[str, Sharding] = {
    row.name: row
    for row in (
        _SINGLE,
        replace(_SINGLE, name="ddp", copies="per rank", reduces=Reduces.AT_END, preset="ddp"),
        _FSDP2,
        replace(_FSDP2, name="hsdp", copies="per host", grows=False, preset="hsdp"),
        replace(_FSDP2, name="tp", splits_tensors=True, loads_once=False, streams_frozen=False, preset="fsdp2-tp"),
        replace(
            _ZERO2,
            name="zero1",
            gradients=Over.NONE,
            reduces=Reduces.BESIDE_LAST,
            resends_weights=False,
            is_offered=False,
            preset="zero1",
        ),
        _ZERO2,
        _ZERO3,
        _offloaded(_FSDP2),
        _offloaded(_ZERO3),
    )
}
