"""Which strategy a run has: what the user asked of accelerate, and an error when that is not in force."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from lowpeak.errors import ArgumentError
from lowpeak.strategies.replicated import Replicated
from lowpeak.strategies.strategy import Strategy

_ONE_DEVICE = (DistributedType.NO,)


def detect_strategy(accelerator: Accelerator) -> Strategy:
    """The strategy for an accelerator's distributed type; ArgumentError for one that lowpeak does not run."""
    kind = accelerator.distributed_type
    if kind not in _ONE_DEVICE:
        raise ArgumentError(
            f"accelerate was configured for {kind.value} on {accelerator.num_processes} processes; this version of "
            "lowpeak trains on one device: start it without a launcher, or with --num_processes 1."
        )
    return Replicated(accelerator)
