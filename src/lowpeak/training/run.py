"""The wiring of a run, the present step's numbers, and the part of a trainer that the pipeline uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import StorageFormat
from lowpeak.batching import TokenBudget
from lowpeak.checkpoint import RunState
from lowpeak.journal import Journal
from lowpeak.memory import MemoryTracker
from lowpeak.models import Reference
from lowpeak.parallel import Strategy
from lowpeak.records import Metric
from lowpeak.sizes import PlannedMemory, Sizes
from lowpeak.training.signals import Interrupts
from lowpeak.training.step import LogprobSettings
from lowpeak.training.step_metrics import StepMetrics


@dataclass(frozen=True)
class Run:
    """The parts of a run, made once; only its sizes change: on resume, after errors of memory, by measured peaks.

    algorithm           the losses, and what they need
    logprob_settings    how every pass computes log-probs
    strategy            how the policy is placed on devices
    tracker             time and peak memory of each phase
    journal             records of steps and completions in `output_dir`
    sizes, budget       the bounds of memory, and how micro-batches are packed within them
    storage             the format of trained weights and optimizer states; None: fp32, or the optimizer's
    converts_weights    whether transformers stores the model's weights under other names or in other shapes
    reference           the reference policy, if the algorithm needs one
    planned             the plan of its memory, on the rank that writes the journal
    memory_budget       bytes that the run may take of a device; None without a budget
    interrupts          requests to stop, by signals
    """

    algorithm: Algorithm
    logprob_settings: LogprobSettings
    strategy: Strategy
    tracker: MemoryTracker
    journal: Journal
    sizes: Sizes
    budget: TokenBudget
    num_parameters: int
    memory_budget: int | None = None
    storage: StorageFormat | None = None
    converts_weights: bool = False
    reference: Reference | None = None
    planned: PlannedMemory | None = None
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def loads_only_shards(self) -> bool:
        """Whether a checkpoint's weights can be loaded from its sharded training states alone."""
        return self.strategy.shards_states or self.converts_weights

    @property
    def writes_shards(self) -> bool:
        """Whether checkpoints have sharded training states: trained weights in fp32, and optimizer states."""
        return self.loads_only_shards or self.storage is not None

    def memory_row(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the entries of budget and plan in a step's row; the plan is compared with the measured `values`."""
        row = {} if self.memory_budget is None else {"memory_budget": float(self.memory_budget)}
        return row if self.planned is None else {**row, **self.planned.row(values)}

    def with_sizes(self, sizes: Sizes) -> Run:
        """Return this run with every pass within `sizes`."""
        settings = replace(self.logprob_settings, chunk_size=sizes.logprob_chunk_size)
        return replace(self, sizes=sizes, logprob_settings=settings, budget=sizes.apply_to(self.budget))


@dataclass
class StepScratch:
    """Numbers of the step under way; each step gets a new record.

    start_state     state before the step, to save if the run stops in it; None between steps
    random          random states with which the step's passes begin; empty before
    metrics         metrics known before the step trains, such as those of its rollout
    measured        loss and metrics of the step, from its backward until they are reported
    seconds         duration of the step
    num_new         tokens of the step that no earlier step has seen (see StepBatches)
    """

    start_state: RunState | None = None
    random: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    measured: StepMetrics | None = None
    seconds: float = 0.0
    num_new: int = 0


class RunContext(Protocol):
    """The part of a trainer that the pipeline uses.

    It reads the members when it needs them: recovery and a resumed run replace `run`, and transformers sets `model_wrapped` and
    `optimizer` when training starts.
    """

    run: Run
    args: Any
    state: Any
    is_in_train: bool
    accelerator: Any
    model_wrapped: nn.Module
    optimizer: Any


class BuildContext(RunContext, Protocol):
    """The part of a trainer that a run is built from; transformers makes the optimizer of `optimizer_cls_and_kwargs`."""

    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    lr_scheduler: Any
    train_dataset: Any
    processing_class: Any
    callback_handler: Any
