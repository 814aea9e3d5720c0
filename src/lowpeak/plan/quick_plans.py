"""Plans of candidates without a rehearsal of their own, by which `lowpeak plan --fit` ranks them.

What a pass takes comes from rehearsals on one device, which many candidates share; `place_on_ranks` computes the shares of weights,
gradients and states, and the layers that a pass gathers. All else is the plan's. The sizes of a rollout are the fastest that fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lowpeak.arguments import show_bytes
from lowpeak.device_kind import rehearse_device
from lowpeak.errors import ArgumentError
from lowpeak.heads import rehearse_experts
from lowpeak.memory import Kind, PhaseMemory
from lowpeak.plan.candidate import ACTIVATIONS, BATCH, CACHE, GATHER, SHARE, USABLE_SHARE, Candidate
from lowpeak.plan.computed import (
    BF16_BYTES,
    ENGINE_AWAKE,
    FRAGMENTATION,
    free_bytes,
    gather_budget_of,
    gatherable_bytes,
    margin,
    place_on_ranks,
    vllm_bytes,
)
from lowpeak.plan.cost import step_seconds
from lowpeak.plan.derived_configs import with_arguments
from lowpeak.plan.hardware import Machine
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.layers import FewLayers
from lowpeak.plan.model_counts import ModelCounts
from lowpeak.plan.plan import Plan, complete_plan, largest_batch, rehearse_step
from lowpeak.plan.planned_batches import longest_record
from lowpeak.plan.rehearsal import Rehearsal
from lowpeak.plan.request import PlanRequest
from lowpeak.records import MicroBatch

_LEAST_TOKENS, _MOST_TOKENS = 1 << 9, 1 << 17  # of a candidate's micro-batch
_MIB = 1 << 20
_SPARE_SHARE = 0.05  # of the device, for what vLLM's kernels need beyond the plan, if there is room
_SHARE_STEPS = 100  # vLLM's share of a device is a multiple of 1 / _SHARE_STEPS


@dataclass(frozen=True)
class QuickPlan:
    """The plan of a candidate from rehearsals that it shares with others; `sizes` are the arguments of its rollout."""

    candidate: Candidate
    plan: Plan
    sizes: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.plan.step_seconds

    def fits(self, machine: Machine, beyond: float = 1.0) -> bool:
        """Return whether the device and the host have room, the peak multiplied by `beyond`."""
        return beyond * self.plan.peak <= USABLE_SHARE * machine.memory and not self.plan.host_excess

    def reason(self, machine: Machine) -> str:
        """Return why the candidate does not fit."""
        if self.plan.peak > USABLE_SHARE * machine.memory:
            words = f"about {show_bytes(self.plan.peak)} on a device of {show_bytes(machine.memory)}"
            share = f", of which a search fills {100 * USABLE_SHARE:.0f} %"
            return words + (share if self.plan.peak <= machine.memory else "")
        return self.reason_of_host(machine)

    def reason_of_host(self, machine: Machine) -> str:
        """Return the bytes of host memory that the candidate needs, of those that a host has."""
        return f"about {show_bytes(self.plan.host_peak)} of a host's memory of {show_bytes(machine.host_memory or 0)}"


class QuickPlanner:
    """Quick plans for one run and one machine; the rehearsals are made once."""

    def __init__(
        self, request: PlanRequest, report: Callable[[str], object], factors: Mapping[str, float] | None = None
    ) -> None:
        self._request, self._report, self.factors = request, report, factors or {}
        self._given: frozenset[str] = frozenset(request.args.given)
        self._rehearsals: dict[tuple[bool, bool, bool, int], tuple[int, Rehearsal]] = {}
        self._parts: dict[int, RunInputs] = {}

    def for_request(self, request: PlanRequest) -> QuickPlanner:
        """Return a planner for the run on another machine, or with another batch, with the same rehearsals."""
        other = copy.copy(self)
        other._request = request
        other._parts = {}
        other.__dict__.pop("inputs", None)
        return other

    @cached_property
    def inputs(self) -> RunInputs:
        """The run on one device, with its parameters counted."""
        return self._counted(replace(self._request, strategy="single", tensor_parallel=1))

    def _counted(self, request: PlanRequest) -> RunInputs:
        with rehearse_device(request.machine.device):
            inputs = RunInputs(request, free_bytes)
            inputs.counts = ModelCounts.of(inputs.make_policy)
        return inputs

    @cached_property
    def token_sizes(self) -> list[int]:
        """The tokens that a candidate's micro-batch may have."""
        given = self.inputs.settings.memory.micro_batch_tokens
        if given is not None:
            return [int(given)]
        sizes = [size for size in self.inputs.token_sizes if _LEAST_TOKENS <= size <= _MOST_TOKENS]
        return sizes or [longest_record(self.inputs)]

    @cached_property
    def frozen_bytes(self) -> int:
        """The bytes of reference and reward models."""
        if not self.inputs.has_separate_reference:
            return self._reward_bytes
        with rehearse_device(self._request.machine.device):
            return self._reward_bytes + ModelCounts.of(self.inputs.make_reference).loaded_bytes

    @cached_property
    def _reward_bytes(self) -> int:
        with rehearse_device(self._request.machine.device):
            return sum(ModelCounts.of(reward.make_model).loaded_bytes for reward in self.inputs.rewards)

    @cached_property
    def _layers(self) -> FewLayers:
        return FewLayers.of(self.inputs, least=2)  # on one device no layer waits for others

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether arguments go with those that are given, such as a dtype."""
        args = with_arguments(self._request.args, arguments)
        if "weight_bits" in arguments and "bf16" in self._given and not args.bf16:
            return False
        try:
            RunInputs(replace(self._request, args=args))
        except ArgumentError:
            return False
        return True

    def plan(self, candidate: Candidate) -> QuickPlan:
        """Return the plan of a candidate with the fastest sizes of a rollout that fit; with the least ones if none do."""
        plan, sizes = self._plan(apply_candidate(self._request, candidate, {})[0]), list[dict[str, Any]]()
        if self.inputs.colocated is not None:
            sizes = [self._engine_share(candidate, plan)]
        elif self.inputs.generates_natively:
            sizes = list(self._native_sizes(plan))
        if not any(sizes):
            return QuickPlan(candidate, plan, {})
        best = min(sizes, key=lambda each: self._rollout_seconds(plan, each)) if len(sizes) > 1 else sizes[0]
        return QuickPlan(candidate, self._plan(apply_candidate(self._request, candidate, best)[0]), best)

    def _plan(self, request: PlanRequest) -> Plan:
        with rehearse_device(request.machine.device), rehearse_experts():
            inputs = RunInputs(request, free_bytes)
            inputs.share_model_of(self._part(request))
            batches = inputs.step_batches()
            rehearsal = self._placed(inputs, batches)
            return complete_plan(inputs, batches, rehearsal).calibrated(self.factors)

    def _part(self, request: PlanRequest) -> RunInputs:
        """Return the run with one device's part of the model, its parameters counted."""
        if request.tensor_parallel == 1:
            return self.inputs
        if request.tensor_parallel not in self._parts:
            self._parts[request.tensor_parallel] = self._counted(request)
        return self._parts[request.tensor_parallel]

    # passes

    def _placed(self, inputs: RunInputs, batches: Sequence[MicroBatch]) -> Rehearsal:
        """Return the rehearsal of a run, computed from one on one device."""
        num_batches, tokens = len(batches), largest_batch(batches)
        phases = dict(self._passes(inputs, tokens).with_largest_passes())
        if inputs.request.tensor_parallel > 1:
            phases = {name: self._split(inputs, phase, tokens) for name, phase in phases.items()}
        if "rollout" in phases:
            most = inputs.sequences_of_rank * inputs.least_cache_bytes
            cache = {Kind.KV_CACHE: min(most, max(inputs.sizes.kv_cache_bytes, inputs.least_cache_bytes))}
            phases["rollout"] = phases["rollout"].computed(cache)
        phases = place_on_ranks(inputs, phases, gather_budget_of(inputs), num_batches)
        activations = num_batches * phases["forward"].host.get(Kind.ACTIVATIONS, 0)
        storage, copied = inputs.storage, 0
        if storage is not None and storage.offload:
            copied = inputs.request.share_of(Kind.OPTIMIZER, inputs.counts.trained * storage.copied_bytes(num_batches))
        return Rehearsal(phases, to_host=activations, to_device=activations + copied)

    def _split(self, inputs: RunInputs, phase: PhaseMemory, tokens: int) -> PhaseMemory:
        """Return a phase of a tensor parallel device: everything is split except layer outputs and a chunk's logits."""
        text = inputs.config.get_text_config()
        # Of each layer: its input, or without checkpointing what norms, residual sums and column-parallel products save (measured).
        per_value = (BF16_BYTES if self._passes_bf16(inputs) else 4) if inputs.args.checkpoints_activations else 16
        passed_on = per_value * text.num_hidden_layers * tokens * text.hidden_size
        activations, frozen = (phase.device.get(kind, 0) for kind in (Kind.ACTIVATIONS, Kind.FROZEN))
        replicated, parts = min(activations, passed_on), inputs.request.tensor_parallel
        whole = min(frozen, self._reward_bytes)  # reward models are not split
        return phase.computed(
            {
                Kind.ACTIVATIONS: replicated + (activations - replicated) // parts,
                Kind.FROZEN: whole + (frozen - whole) // parts,
            }
        )

    def _passes(self, inputs: RunInputs, tokens: int) -> Rehearsal:
        """Return a rehearsal on one device with so many tokens in the largest micro-batch: it is linear in them."""
        offloads = bool(inputs.settings.memory.activation_offloading)
        settings = (self._passes_bf16(inputs), bool(inputs.args.checkpoints_activations), offloads)
        few, low = self._rehearse(*settings, self.token_sizes[0])
        if tokens == few:
            return low
        more, high = self._rehearse(*settings, self.token_sizes[-1])
        return low.extended([(high, tokens - few, more - few)]) if more > few else low

    def _passes_bf16(self, inputs: RunInputs) -> bool:
        """Return whether layers pass on bf16: with bf16 weights, and under FSDP2, which casts fp32 ones."""
        row = inputs.request.sharding
        shards = row.sends_weights(inputs.request.world_size) and not row.splits_tensors
        casts = (shards or not row.has_formats) and bool(inputs.args.bf16)  # DeepSpeed's weights are bf16
        return inputs.storage is not None or (casts and self._can_store_bf16)

    @cached_property
    def _can_store_bf16(self) -> bool:
        return self._request.peft_config is None and self.accepts({"weight_bits": 32})

    def _rehearse(self, in_bf16: bool, checkpointing: bool, offloads: bool, tokens: int) -> tuple[int, Rehearsal]:
        """Return the tokens of the largest micro-batch, and the rehearsal."""
        key = (in_bf16, checkpointing, offloads, tokens)
        if key not in self._rehearsals:
            words = f"checkpointing {checkpointing}{', activations offloaded' if offloads else ''}"
            self._report(f"rehearsing {tokens:,} tokens, {words}")
            arguments = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing, ACTIVATIONS: offloads}
            if in_bf16 and self.inputs.storage is None:
                arguments["weight_bits"] = 32
            args = with_arguments(self._request.args, arguments)
            request = replace(self._request, args=args, strategy="single", tensor_parallel=1)
            inputs = RunInputs(request, lambda inputs: request.machine.memory // 2)
            inputs.share_model_of(self.inputs)
            batches = inputs.step_batches()
            rollout = next(
                (found.phases.get("rollout") for of, (_, found) in self._rehearsals.items() if of[0] == in_bf16), None
            )
            found = rehearse_step(inputs, batches, self._layers, updates=False, generates=rollout is None)
            phases = {**found.phases, "optimizer": found.phases["sync"]}  # the optimizer's states are arithmetic
            if "rollout" in found.moments:
                rollout = found.with_largest_passes()["rollout"]
            phases |= {} if rollout is None else {"rollout": rollout}
            moments = {name: each for name, each in found.moments.items() if name != "rollout"}
            self._rehearsals[key] = largest_batch(batches), replace(found, phases=phases, moments=moments)
        return self._rehearsals[key]

    # rollouts

    def _room(self) -> int:
        """Return the bytes that tensors may have on a device."""
        machine = self.inputs.request.machine
        fragmentation = FRAGMENTATION if machine.device == "cuda" else 0.0
        return int((USABLE_SHARE * machine.memory - margin(machine, 0)) / (1 + fragmentation))

    def _native_sizes(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """Yield KV caches from one sequence's to all sequences'; the remaining bytes keep layers gathered."""
        inputs, work, held = plan.inputs, plan.work, plan.phases["rollout"].device
        memory, model = inputs.settings.memory, gatherable_bytes(inputs)
        kept = min(gather_budget_of(inputs), model)
        tensors = sum(held.values()) - held.get(Kind.MARGIN, 0) - held.get(Kind.KV_CACHE, 0) - kept
        room, least = self._room() - tensors, inputs.least_cache_bytes
        one = work.kv_bytes * (work.prompt + work.completion) // work.tensor_parallel
        caches = sorted({max(least, cache) for cache in _doubled(one, work.sequences)})
        if memory.kv_cache_bytes is not None:
            caches = [memory.kv_cache_bytes]
        for number, cache in enumerate(caches):
            if number and cache > room:
                return
            gather = min(model, max(0, room - cache)) // _MIB * _MIB
            if memory.gather_budget is not None:
                gather = min(model, memory.gather_budget)
            yield {CACHE: cache, **({GATHER: gather} if model else {})}

    def _rollout_seconds(self, plan: Plan, sizes: Mapping[str, Any]) -> float:
        """Return the seconds of a native rollout with a KV cache and a gather budget."""
        work = plan.work
        slots = work.tensor_parallel * sizes[CACHE] // (work.kv_bytes * (work.prompt + work.completion))
        share = sizes[GATHER] / gatherable_bytes(plan.inputs) if GATHER in sizes else 1.0
        return step_seconds(replace(work, slots=max(1, slots), gathered_share=share), plan.request.machine)["rollout"]

    def _engine_share(self, candidate: Candidate, plan: Plan) -> dict[str, Any]:
        """Return vLLM's share of the device: what training leaves, or with sleep mode what a rollout leaves."""
        assert self.inputs.colocated is not None
        if SHARE in self._given or self.inputs.colocated.kv_cache_bytes is not None:
            return {}
        work, memory, parallel = plan.work, self._request.machine.total, candidate.engine_parallel
        weights = vllm_bytes(self.inputs.counts.total, parallel)
        one = work.kv_bytes * (work.prompt + work.completion) // parallel
        least, most = weights + one, weights + one * work.sequences + int(_SPARE_SHARE * memory)
        rooms = {True: self._room(), False: self._room()}  # while the engine is awake, and otherwise
        for name, phase in plan.phases.items():
            tensors = sum(value for kind, value in phase.device.items() if kind not in (Kind.ENGINE, Kind.MARGIN))
            rooms[name in ENGINE_AWAKE] = min(rooms[name in ENGINE_AWAKE], self._room() - tensors)
        limit = min(most, rooms[True] if candidate.sleeps else min(rooms.values()))
        return {SHARE: max(-(-least * _SHARE_STEPS // memory), limit * _SHARE_STEPS // memory) / _SHARE_STEPS}


def apply_candidate(
    request: PlanRequest, candidate: Candidate, sizes: Mapping[str, Any]
) -> tuple[PlanRequest, dict[str, Any]]:
    """Return the request of a candidate, and the arguments that are set; those that were given stay, except for the batch."""
    given = request.args.given - {BATCH}
    arguments = {name: value for name, value in {**candidate.arguments, **sizes}.items() if name not in given}
    args = with_arguments(request.args, arguments)
    placed = replace(request, args=args, strategy=candidate.strategy, tensor_parallel=candidate.tensor_parallel)
    return placed, arguments


def _doubled(one: int, count: int) -> list[int]:
    """Return the bytes of 1, 2, 4 ... sequences, and of all `count`."""
    powers = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    return [one * number for number in (*powers, count)]
