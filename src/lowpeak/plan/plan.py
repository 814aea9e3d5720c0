"""The plan of a run: the peak of each phase on a device and in host memory, against their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lowpeak.arguments import ModelParallel
from lowpeak.device_kind import rehearse_device
from lowpeak.errors import ArgumentError
from lowpeak.heads import rehearse_experts
from lowpeak.memory import Kind, PhaseMemories, PhaseMemory
from lowpeak.plan.computed import (
    BF16_BYTES,
    ENGINE_AWAKE,
    casts_weights,
    decoded_bytes,
    engine_bytes,
    free_bytes,
    gather_budget_of,
    gatherable_bytes,
    gathered_itemsize,
    held_head_bytes,
    host_of_process,
    margin,
    place_by_strategy,
    save_bytes,
    streamed_bytes,
    sync_bytes,
)
from lowpeak.plan.cost import add_planned_bytes, make_work, step_seconds, total_seconds
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.layers import FewLayers
from lowpeak.plan.model_counts import ModelCounts
from lowpeak.plan.planned_batches import reference_batches, scored_batches, teacher_prompt_tokens
from lowpeak.plan.rehearsal import Rehearsal, RehearsalInputs, rehearse
from lowpeak.plan.request import PlanRequest
from lowpeak.records import MicroBatch
from lowpeak.setup import max_prompt_tokens

PHASES = ("load", "sync", "rollout", "reward", "score", "forward", "backward", "optimizer", "save")
# Of rank 0's micro-batches this many are run: the peak of a step is in its second one, when gradients exist.
_REHEARSED_BATCHES = 2


@dataclass(frozen=True)
class Plan:
    """Peak memory by phase of a run on its busiest device, and of one process in host memory.

    `sizes` are the run's, with `auto` resolved; `num_batches` are the micro-batches of rank 0 in a step, and `tokens` those
    of its largest one. `inputs` and `work` are what the plan was made of, and the work of one device.
    """

    request: PlanRequest
    phases: PhaseMemories
    sizes: Mapping[str, Any]
    counts: ModelCounts
    num_batches: int
    tokens: int
    to_host: int = 0
    to_device: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    inputs: Any = field(default=None, repr=False, compare=False)
    work: Any = field(default=None, repr=False, compare=False)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].peak)

    @property
    def peak(self) -> int:
        return self.phases[self.peak_phase].peak

    @property
    def host_peak(self) -> int:
        """Bytes of host memory of all processes of a host."""
        return sum(self.host_kinds.values())

    @property
    def host_kinds(self) -> dict[Kind, int]:
        """Bytes of host memory of all processes of a host by kind, in the phase that takes most."""
        processes = self.request.machine.devices_on_host
        phases = [
            {kind: value * (1 if kind == Kind.CHECKPOINT else processes) for kind, value in phase.host.items()}
            for phase in self.phases.values()
        ]
        return max(phases, key=lambda kinds: sum(kinds.values()))

    @property
    def host_excess(self) -> int:
        """Bytes that a host lacks; 0 if its memory is enough or unknown."""
        memory = self.request.machine.host_memory
        return 0 if memory is None else max(0, self.host_peak - memory)

    @property
    def fits(self) -> bool:
        return self.peak <= self.request.machine.memory and not self.host_excess

    def calibrated(self, factors: Mapping[str, float]) -> Plan:
        """Return the plan with the seconds of each phase times a factor; see `calibration`."""
        return replace(self, seconds={phase: factors.get(phase, 1.0) * value for phase, value in self.seconds.items()})

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, in which phases may overlap."""
        return total_seconds(self.seconds, overlaps=self.work.overlaps)

    @property
    def planned_steps(self) -> int:
        """Steps that `minutes` covers: max_steps, or 1,000 if it is unset."""
        steps = int(self.request.args.max_steps)
        return steps if steps > 0 else 1_000

    @property
    def minutes(self) -> float:
        """Minutes of `planned_steps` steps, without start and evaluation."""
        return self.planned_steps * self.step_seconds / 60

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of a step per second; for supervised runs all tokens of the rows."""
        inputs = self.inputs
        tokens = inputs.completion_tokens if inputs.is_online else inputs.longest_sequence
        rows = inputs.settings.rollout.num_sequences / self.work.steps if inputs.is_online else inputs.rows_per_step
        return float(rows * tokens / self.step_seconds)

    def dollars(self, hourly_price: float) -> float:
        """Return the price of `minutes`, in dollars; `hourly_price` covers all GPUs."""
        return self.minutes / 60 * hourly_price

    def as_dict(self, hourly_price: float | None = None) -> dict[str, Any]:
        """Return the plan for JSON; `hourly_price` is in dollars for all GPUs."""
        machine = self.request.machine
        return {
            "algorithm": self.request.kind,
            "strategy": self.request.strategy,
            "tensor_parallel": self.request.tensor_parallel,
            "devices": machine.num_devices,
            "device_memory": machine.memory,
            "host_memory": machine.host_memory,
            "parameters": self.counts.total,
            "trained_parameters": self.counts.trained,
            "sizes": dict(self.sizes),
            "generation": self.inputs.generation,
            "layout": str(self.inputs.layout_choice),
            "micro_batches": self.num_batches,
            "micro_batch_tokens": self.tokens,
            "peak": self.peak,
            "peak_phase": self.peak_phase,
            "host_peak": self.host_peak,
            "fits": self.fits,
            "seconds_per_step": dict(self.seconds),
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "steps": self.planned_steps,
            "minutes": self.minutes,
            "dollars": None if hourly_price is None else self.dollars(hourly_price),
            "bytes_to_host_per_step": self.to_host,
            "bytes_to_device_per_step": self.to_device,
            "bytes_copied_per_rollout": 0 if self.work is None else self.work.rollout_bytes,
            "phases": {name: phase.as_dict() for name, phase in self.phases.items()},
        }


def check_context(request: PlanRequest) -> str:
    """Return a warning if the planned prompts leave the model's context; empty if they fit.

    ArgumentError, as in the run, if completions alone fill the context.
    """
    with rehearse_device(request.machine.device):
        inputs = RunInputs(request)
    if not inputs.is_online:
        return ""
    prompts, completion = inputs.settings.prompts, inputs.completion_tokens
    policy: Any = SimpleNamespace(config=request.config)
    limit = max_prompt_tokens(policy, None, completion, prompts.vllm_max_model_length)
    name = max("prompt_tokens", "teacher_prompt_tokens", key=partial(getattr, request))
    if limit is None or getattr(request, name) <= limit:
        return ""
    return (
        f"{name}={getattr(request, name)} and max_completion_length={completion} exceed the model's context of "
        f"{limit + completion} tokens: the run {'drops' if prompts.overlong_prompts == 'drop' else 'refuses'} prompts of more "
        f"than {limit} tokens; lower {name} or max_completion_length."
    )


def make_plan(request: PlanRequest, report: Callable[[str], object] = lambda text: None) -> Plan:
    """Rehearse and compute a run; `report` gets the name of each part when it begins."""
    with rehearse_device(request.machine.device), rehearse_experts():
        report("counting parameters")
        inputs = RunInputs(request, free_bytes)
        if request.tensor_parallel > 1:
            inputs.check_tensor_parallel(ModelParallel(request.tensor_parallel, request.world_size))
        inputs.counts = ModelCounts.of(inputs.make_policy)
        batches = inputs.step_batches()
        report(f"rehearsing a step of {len(batches)} micro-batches")
        rehearsal = rehearse_step(inputs, batches)
        phases = place_by_strategy(inputs, rehearsal, gather_budget_of(inputs), len(batches))
    return complete_plan(inputs, batches, replace(rehearsal, phases=phases))


def complete_plan(inputs: RunInputs, batches: list[MicroBatch], placed: Rehearsal) -> Plan:
    """Return the plan of a run whose tensors are placed on ranks: with engines, host memory, the margin, and its seconds."""
    rehearsed = max(1, min(len(batches), _REHEARSED_BATCHES))
    phases = _with_teacher_states(inputs, placed.phases, batches, placed.teacher_token_bytes)
    plan = Plan(
        inputs.request,
        _complete(inputs, phases),
        inputs.sizes.as_dict(),
        inputs.counts,
        len(batches),
        tokens=largest_batch(batches),
        to_host=placed.to_host + placed.batches_to_host * max(1, len(batches)) // rehearsed,
        to_device=placed.to_device + placed.batches_to_device * max(1, len(batches)) // rehearsed,
        inputs=inputs,
    )
    work = add_planned_bytes(make_work(inputs, batches), plan, gather_budget_of(inputs))
    return replace(plan, work=work, seconds=step_seconds(work, inputs.request.machine))


def largest_batch(batches: Sequence[MicroBatch]) -> int:
    """Return the tokens of the largest micro-batch; 0 without one."""
    return max((batch.input_ids_BL.numel() for batch in batches), default=0)


def rehearse_step(
    inputs: RunInputs,
    batches: list[MicroBatch],
    layers: FewLayers | None = None,
    *,
    updates: bool = True,
    generates: bool = True,
) -> Rehearsal:
    """Rehearse a planned run's step; a model of many layers from few of them, by default those of `FewLayers.of(inputs)`.

    `updates` and `generates` say whether the optimizer and the native engine take part.
    """

    def rehearse_run(run: RunInputs, gather_budget: int) -> Rehearsal:
        rollout = run.rollout(gather_budget) if generates else None
        try:
            return rehearse(replace(_rehearsal_inputs(run, batches), rollout=rollout, updates=updates))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            model_type = inputs.config.get_text_config().model_type
            raise ArgumentError(
                f"{model_type} has no plan: its code reads values of tensors ({error.func}), and a plan's tensors have none."
            ) from error

    layers = layers or FewLayers.of(inputs)
    if not layers.extrapolates:
        return rehearse_run(inputs, gather_budget_of(inputs))
    budget, kept = _gathered_in_rollout(inputs)
    rehearsal = layers.rehearse(lambda few: rehearse_run(inputs.with_layers(few), budget))
    if not kept or "rollout" not in rehearsal.phases:
        return rehearsal
    rollout = rehearsal.phases["rollout"]
    device = {**rollout.device, Kind.GATHERED: rollout.device.get(Kind.GATHERED, 0) + kept}
    return replace(rehearsal, phases={**rehearsal.phases, "rollout": replace(rollout, device=device)})


def _gathered_in_rollout(inputs: RunInputs) -> tuple[int, int]:
    """Return a few-layer model's gather budget, and the bytes that the whole model keeps gathered beyond it."""
    if inputs.rollout(0) is None:
        return 0, 0
    budget = gather_budget_of(inputs)
    if inputs.request.mesh.shards == 1:
        # A run copies all or nothing, and few layers would fit where the model does not. Embeddings count, though they are not
        # copied; with LoRA the adapter alone is fp32.
        copied = inputs.counts.total if casts_weights(inputs) else inputs.counts.trained
        return (budget if budget >= BF16_BYTES * copied else 0), 0
    if budget >= gatherable_bytes(inputs):
        return budget, 0  # all is gathered, of few layers, too
    layer = gathered_itemsize(inputs) * inputs.counts.largest_layer
    return 0, layer * max(0, budget // layer - 1)  # a buffer of one layer serves the others in turn


def _rehearsal_inputs(inputs: RunInputs, batches: list[MicroBatch]) -> RehearsalInputs:
    """Return a planned run's step for `rehearse`, without its rollout, with the largest of rank 0's micro-batches."""
    request = inputs.request
    needs, teaches = inputs.scoring_needs, inputs.algorithm.divergence is not None
    reads_others = inputs.scores_mismatched or teacher_prompt_tokens(inputs) > 0
    return RehearsalInputs(
        inputs.make_policy,
        _largest(batches, _REHEARSED_BATCHES),
        replace(inputs.algorithm, needs=needs),
        inputs.logprobs,
        mesh_shape=request.mesh,
        compute=inputs.compute,
        storage=inputs.storage,
        scored=_largest(scored_batches(inputs), 1) if needs else None,
        reference_batches=_largest(reference_batches(inputs), _REHEARSED_BATCHES if teaches else 1)
        if reads_others
        else None,
        make_reference=inputs.make_reference if inputs.has_separate_reference else None,
        rewards=inputs.rewards,
        activation_offloading=inputs.settings.memory.activation_offloading,
        device=request.machine.device,
    )


def _largest(batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    return sorted(batches, key=lambda batch: -batch.input_ids_BL.numel())[:count]


def _complete(inputs: RunInputs, placed: Mapping[str, PhaseMemory]) -> PhaseMemories:
    """Add the phases that have no tensors of their own, engines, host memory and the margin."""
    phases = _with_buckets(inputs, dict(placed))
    awake, otherwise = engine_bytes(inputs, inputs.counts.total)
    frozen = phases["load"].device.get(Kind.FROZEN, 0)
    for name, phase in phases.items():
        generates = name in ENGINE_AWAKE
        device = {**phase.device, **_offloaded_kinds(inputs, name, frozen)}
        device[Kind.ENGINE] = 0 if name == "load" else awake if generates else otherwise
        device[Kind.MARGIN] = margin(inputs.request.machine, sum(device.values()))
        phases[name] = replace(phase, device=device)
    hosts = host_of_process(inputs, phases, inputs.counts.loaded_bytes, frozen)
    return {name: replace(phases[name], host=hosts[name]) for name in PHASES if name in phases}


def _with_teacher_states(
    inputs: RunInputs, phases: Mapping[str, PhaseMemory], batches: list[MicroBatch], token_bytes: int
) -> Mapping[str, PhaseMemory]:
    """Add a teacher's states of a step's micro-batches in host memory; on a CPU in device memory, of those not rehearsed."""
    if not token_bytes:
        return phases
    kept = {name: phases[name] for name in ("score", "forward", "backward")}
    num_bytes = token_bytes * _loss_tokens(batches)
    if inputs.request.machine.device == "cpu":
        others = {Kind.TEACHER: num_bytes - token_bytes * _loss_tokens(_largest(batches, _REHEARSED_BATCHES))}
        kept = {name: replace(phase, device={**phase.device, **others}) for name, phase in kept.items()}
    else:
        kept = {name: replace(phase, host={**phase.host, Kind.TEACHER: num_bytes}) for name, phase in kept.items()}
    return {**phases, **kept}


def _loss_tokens(batches: Sequence[MicroBatch]) -> int:
    return sum(len(batch.targets_T) for batch in batches)


def _with_buckets(inputs: RunInputs, phases: dict[str, PhaseMemory]) -> dict[str, PhaseMemory]:
    """Add sync, save, an engine's rollout and rewards by functions, from the memory between steps."""
    between_steps = phases.pop("sync")
    if inputs.is_online:
        phases["sync"] = _add_buckets(between_steps, sync_bytes(inputs))
        phases = {"rollout": between_steps.computed({}), "reward": between_steps.computed({}), **phases}
    saves = [_add_buckets(between_steps, save_bytes(inputs))]
    if "save" in phases:  # resharding copies of column-sharded tensors
        saves.append(_add_buckets(phases["save"], decoded_bytes(inputs)))
    phases["save"] = max(saves, key=lambda phase: phase.peak)
    return phases


def _offloaded_kinds(inputs: RunInputs, phase: str, frozen: int) -> dict[Kind, int]:
    """Return the bytes of offloaded kinds that stay on the device during a phase."""
    memory = inputs.settings.memory
    left = {Kind.FROZEN: 0} if inputs.frees_reference and phase not in ("load", "score") else {}
    if phase in ENGINE_AWAKE and memory.offload_during_rollout:
        left |= dict.fromkeys((Kind.GRADIENTS, Kind.OPTIMIZER), 0)
        if phase != "reward":
            left[Kind.FROZEN] = 0
    if memory.offload_frozen_models:
        left[Kind.FROZEN] = min(frozen, streamed_bytes(inputs, phase))
        if not inputs.request.sharding.sends_weights(inputs.request.world_size):
            left[Kind.FROZEN] += held_head_bytes(inputs, phase)
    return left


def _add_buckets(phase: PhaseMemory, num_bytes: int) -> PhaseMemory:
    """Return a phase with bytes of buckets beside those that it has."""
    return phase.computed({Kind.BUCKETS: phase.device.get(Kind.BUCKETS, 0) + num_bytes})
