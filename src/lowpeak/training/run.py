"""A run's parts and counters, which the trainer and the pipeline share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowpeak.algorithms import Algorithm
from lowpeak.checkpoint import RunState
from lowpeak.journal import Journal
from lowpeak.memory import MemoryTracker
from lowpeak.parallel import Strategy
from lowpeak.records import Metric
from lowpeak.training.run_sizes import Sizes
from lowpeak.training.signals import Interrupts
from lowpeak.training.step import Core
from lowpeak.training.step_metrics import Readout


@dataclass
class Run:
    """What a run carries besides what transformers' Trainer does.

    `step_seconds` and `num_new` are the time and the new tokens of the step under way (see StepWork); `noted` are numbers
    of it that were known before it trained; `metrics` those of the steps since the last log.
    """

    algorithm: Algorithm
    core: Core
    strategy: Strategy
    tracker: MemoryTracker
    journal: Journal
    algorithm_state: Mapping[str, float]
    sizes: Sizes
    num_parameters: int
    resumed: RunState | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    noted: dict[str, Metric] = field(default_factory=dict)
    readout: Readout | None = None
    step_seconds: float = 0.0
    num_new: int = 0
    interrupts: Interrupts = field(default_factory=Interrupts)
