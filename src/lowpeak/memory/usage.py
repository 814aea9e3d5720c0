"""The record of memory by phase and kind, whether rehearsed, computed or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal


class Kind(StrEnum):
    """A kind of bytes that are alive at a phase's peak."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # states, low bits, and the optimizer step's temporaries
    ACTIVATIONS = "activations"  # and other temporaries of forward and backward passes
    LOGITS = "logits chunk"  # and everything else inside the head
    KV_CACHE = "KV cache"
    GATHERED = "gathered weights"
    BUCKETS = "buckets"  # of gradients that are reduced, and of weights that are sent or saved
    FROZEN = "frozen models"
    TEACHER = "teacher's states"  # hidden states of a step, which are kept until its micro-batches have trained
    ENGINE = "engine"
    CHECKPOINT = "checkpoint"  # that one process of a host reads for all of them, in host memory
    MARGIN = "margin"  # the device's context, communicators, and fragmentation
    MEASURED = "measured"  # everything, where kinds are unknown


Source = Literal["rehearsed", "computed", "measured"]


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes that are alive when a phase uses most: on one device, and in the host memory of its process."""

    device: Mapping[Kind, int]
    host: Mapping[Kind, int] = field(default_factory=dict)
    source: Source = "rehearsed"

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())

    @property
    def host_peak(self) -> int:
        return sum(self.host.values())

    def computed(self, kinds: Mapping[Kind, int]) -> PhaseMemory:
        """Return this record with other bytes of some kinds on the device, by arithmetic."""
        return PhaseMemory({**self.device, **kinds}, self.host, "computed")

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON, with its sums."""
        both = {"device": self.device, "host": self.host}
        numbers = {place: {str(kind): value for kind, value in kinds.items() if value} for place, kinds in both.items()}
        return {"peak": self.peak, "host_peak": self.host_peak, "source": self.source, **numbers}


PhaseMemories = Mapping[str, PhaseMemory]  # by the phase's name, in the order of a step
