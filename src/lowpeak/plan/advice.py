"""The settings that lower a plan's peak most, and their cost in time: by arithmetic on the kinds of the plan's phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lowpeak.arguments import StorageFormat
from lowpeak.memory import Kind, PhaseMemories, PhaseMemory
from lowpeak.optim import NUM_PIECES, PIECE
from lowpeak.parallel import SHARDINGS
from lowpeak.plan.computed import (
    BF16_BYTES,
    ENGINE_AWAKE,
    FROZEN_PHASES,
    VLLM_ASLEEP_BYTES,
    gatherable_bytes,
    gathered_itemsize,
    margin,
    rollout_copies,
    streamed_bytes,
)
from lowpeak.plan.cost import Work, step_seconds, total_seconds
from lowpeak.plan.hardware import Machine
from lowpeak.plan.plan import Plan

Scales = Mapping[Kind, float]
_TRAINED = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER)
_SHARDED = (*_TRAINED, Kind.FROZEN)
_PASSES = ("score", "forward", "backward")
_LEAST_GAIN = 0.005  # of the peak
_MOST_SLOWER = 4.0  # times the seconds of a step
_ROUNDS = "; rounds stochastically, so that the run learns a little differently"
_FP32 = StorageFormat(None, 32, 32)  # bytes of weights, gradients and states without a format


@dataclass(frozen=True)
class Change:
    """One setting change: factor per kind of memory, and the resulting step work.

    `phases` are those that it acts in (empty: all), `note` says what else it changes, `added` are bytes that phases get.
    """

    setting: str
    scales: Scales
    work: Work
    machine: Machine
    phases: tuple[str, ...] = ()
    note: str = ""
    added: Mapping[str, int] = field(default_factory=dict)

    def peak(self, phases: PhaseMemories) -> int:
        """Return the highest peak of the changed phases."""
        return max(self._changed(name, phase) for name, phase in phases.items())

    def _changed(self, name: str, phase: PhaseMemory) -> int:
        scales = self.scales if name in self.phases or not self.phases else {}
        kinds = {kind: value for kind, value in phase.device.items() if kind != Kind.MARGIN}
        changed = int(sum(value * scales.get(kind, 1.0) for kind, value in kinds.items())) + self.added.get(name, 0)
        return changed + margin(self.machine, changed) if Kind.MARGIN in phase.device else changed


@dataclass(frozen=True)
class Advice:
    """A setting, with estimates of its peak and the seconds added to a step.

    `note` says what else it changes.
    """

    setting: str
    peak: int
    added_seconds: float
    note: str = ""


def advise(plan: Plan, count: int | None = 3) -> list[Advice]:
    """Return the changes that lower the plan's peak most, the best first; all of them with a `count` of None.

    A change that makes a step many times slower is left out.
    """
    overlaps = plan.work.overlaps
    before = total_seconds(step_seconds(plan.work, plan.request.machine), overlaps=overlaps)
    found = []
    for change in _changes(plan, plan.work):
        peak = change.peak(plan.phases)
        if peak < (1 - _LEAST_GAIN) * plan.peak:
            seconds = total_seconds(step_seconds(change.work, change.machine), overlaps=overlaps)
            if seconds <= _MOST_SLOWER * before:
                found.append(Advice(change.setting, peak, seconds - before, change.note))
    return sorted(found, key=lambda advice: advice.peak)[:count]


def _changes(plan: Plan, work: Work) -> Iterator[Change]:
    machine, inputs = plan.request.machine, plan.inputs

    def change(
        setting: str,
        scales: Scales,
        work: Work = work,
        machine: Machine = machine,
        phases: tuple[str, ...] = (),
        note: str = "",
        added: Mapping[str, int] | None = None,
    ) -> Change:
        return Change(setting, scales, work, machine, phases, note, added or {})

    tokens, longest = plan.tokens, work.prompt + work.completion
    if tokens // 2 >= longest:
        halved = replace(work, num_batches=2 * work.num_batches)
        yield change(f"micro_batch_tokens={tokens // 2}", {Kind.ACTIVATIONS: 0.5}, halved, phases=_PASSES)
    chunk = int(plan.sizes["logprob_chunk_size"])
    if chunk > 64:
        yield change(f"logprob_chunk_size={chunk // 4}", {Kind.LOGITS: 0.25}, phases=_PASSES)
    if "rollout" in plan.phases and work.sequences:
        yield from _rollout_changes(plan, work, change)
    if not work.checkpointing:
        share = _checkpointed_share(inputs.config)
        checkpointed = replace(work, checkpointing=True)
        yield change("gradient_checkpointing=True", {Kind.ACTIVATIONS: share}, checkpointed, phases=_PASSES[1:])
    yield from _format_changes(plan, work, change)
    yield from _sleep_changes(plan, work, change)
    frozen = plan.phases["load"].device.get(Kind.FROZEN, 0)
    if frozen and not inputs.settings.memory.offload_frozen_models:
        streamed = rollout_copies(streamed=frozen, passes=work.score_batches)
        moved = replace(work, rollout_bytes=work.rollout_bytes + streamed)
        streamed = max(streamed_bytes(inputs, phase) for phase in FROZEN_PHASES)
        yield change("offload_frozen_models=True", {Kind.FROZEN: min(1.0, streamed / frozen)}, moved)
    yield from _placement_changes(plan, work, change)


def _sleep_changes(plan: Plan, work: Work, change: Callable[..., Change]) -> Iterator[Change]:
    """Yield sleep mode for a colocated vLLM that keeps its memory while the run trains."""
    where = plan.inputs.colocated
    if where is None or where.sleeps:
        return
    engine = max(phase.device.get(Kind.ENGINE, 0) for phase in plan.phases.values())
    copied = rollout_copies(engine=BF16_BYTES * plan.counts.total // where.tensor_parallel_size)
    yield change(
        "vllm_enable_sleep_mode=True",
        {Kind.ENGINE: VLLM_ASLEEP_BYTES / max(engine, VLLM_ASLEEP_BYTES)},
        replace(work, rollout_bytes=work.rollout_bytes + copied),
        phases=tuple(name for name in plan.phases if name not in ENGINE_AWAKE),
    )


def _rollout_changes(plan: Plan, work: Work, change: Callable[..., Change]) -> Iterator[Change]:
    """Yield smaller sizes of the native engine's rollout."""
    held, inputs = plan.phases["rollout"].device, plan.inputs
    cache, gathered = held.get(Kind.KV_CACHE, 0), held.get(Kind.GATHERED, 0)
    is_sharded = bool(gatherable_bytes(inputs))
    # Layers stay gathered where the cache was.
    keeps_more = is_sharded and gathered and inputs.settings.memory.gather_budget is None
    slots = min(work.slots, work.sequences)
    if cache and slots > 1 and not keeps_more:
        yield change(f"kv_cache_bytes={cache // 2}", {Kind.KV_CACHE: 0.5}, replace(work, slots=slots // 2))
    if gathered and not is_sharded:
        yield change("gather_budget=0", {Kind.GATHERED: 0.0}, replace(work, casts_weights=True), phases=("rollout",))
    elif gathered:
        half = replace(work, gathered_share=work.gathered_share / 2)
        yield change(f"gather_budget={gathered // 2}", {Kind.GATHERED: 0.5}, half, phases=("rollout",))


def _format_changes(plan: Plan, work: Work, change: Callable[..., Change]) -> Iterator[Change]:
    """Yield other bytes per parameter; DeepSpeed and adapters have their own."""
    if not plan.request.sharding.has_formats or plan.request.peft_config is not None:
        return
    inputs: Any = plan.inputs
    now = inputs.storage or _FP32
    fewer: tuple[tuple[Literal[32, 16], str], ...] = ((32, ""), (16, _ROUNDS))
    for bits, note in fewer:
        if now.weight_bits is None or (now.weight_bits > bits and not now.offload):
            ratios = _ratios(now, StorageFormat(bits, 8, 16))
            updating = replace(work, update_bytes=work.update_bytes // 2)
            yield change(f"weight_bits={bits}", ratios, updating, note=note)
    if not now.offload and plan.request.machine.device == "cuda":
        then = StorageFormat(now.weight_bits, now.state_bits, 32, offload=True)
        copied = int(plan.counts.trained * then.copied_bytes(work.num_batches))
        copied //= max(1, plan.request.mesh.shards)
        # Pieces of states and gradients visit the device.
        values = NUM_PIECES * min(PIECE, plan.counts.largest_trained)
        added = {"optimizer": int(values * (then.total_bytes - then.weight_bytes))}
        yield change(
            "offload_optimizer=True",
            _ratios(now, then),
            replace(work, host_bytes=work.host_bytes + copied),
            added=added,
        )


def _ratios(now: StorageFormat, then: StorageFormat) -> Scales:
    return {
        Kind.WEIGHTS: then.weight_bytes / now.weight_bytes,
        Kind.GRADIENTS: 0.0 if then.offload else then.gradient_bits / now.gradient_bits,
        Kind.OPTIMIZER: 0.0 if then.offload else then.state_bytes / now.state_bytes,
    }


def _placement_changes(plan: Plan, work: Work, change: Callable[..., Change]) -> Iterator[Change]:
    request, machine = plan.request, plan.request.machine
    if request.sharding.grows:
        larger = replace(machine, num_devices=2 * machine.num_devices)
        # Each device has as many sequences as before.
        updating = replace(work, update_bytes=work.update_bytes // 2)
        yield change(f"--gpus {larger.num_devices}", dict.fromkeys(_SHARDED, 0.5), updating, larger)
    elif not request.sharding.gathers and machine.num_devices > 1:
        scales = dict.fromkeys(_SHARDED, 1 / machine.num_devices)
        work = replace(work, sharding=SHARDINGS["fsdp2"])
        yield change("--accelerate_config fsdp2", scales, work, added=_gathered(plan))
    elif machine.num_devices == 1:
        larger = replace(machine, num_devices=2)
        sharded = replace(work, sharding=SHARDINGS["fsdp2"], update_bytes=work.update_bytes // 2)
        scales = dict.fromkeys(_SHARDED, 0.5)
        yield change("--gpus 2 --accelerate_config fsdp2", scales, sharded, larger, added=_gathered(plan))


def _gathered(plan: Plan) -> dict[str, int]:
    """Return the bytes that passes gather of a sharded model: a layer, the next one, embeddings and head."""
    return dict.fromkeys((*_PASSES, "rollout"), gathered_itemsize(plan.inputs) * plan.counts.in_pass)


def _checkpointed_share(config: Any) -> float:
    """Return activations with checkpointing over those without (Korthikanti et al. 2022, eq. 2, without attention scores)."""
    text = config.get_text_config()
    layer = 17 * text.hidden_size + 3 * (getattr(text, "intermediate_size", None) or 4 * text.hidden_size)
    return (text.num_hidden_layers * text.hidden_size + layer) / (text.num_hidden_layers * layer)
