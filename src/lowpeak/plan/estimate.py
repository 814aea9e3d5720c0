"""Estimates of candidates: settings that `lowpeak plan --fit` may choose, their peaks, and the seconds of a step.

Weights, gradients and optimizer states are arithmetic. What a pass takes beside them comes from rehearsals of the model with two
and four layers: it is linear in the layers. The sizes of a rollout are the fastest ones that fit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lowpeak.arguments import ColocateSettings
from lowpeak.device_kind import rehearse_device
from lowpeak.errors import ArgumentError
from lowpeak.heads import rehearse_experts
from lowpeak.memory import Kind
from lowpeak.plan.candidate import ACTIVATIONS, CACHE, FROZEN, GATHER, SHARE, STATES, USABLE_SHARE, Candidate, Estimate
from lowpeak.plan.computed import (
    BF16_BYTES,
    FRAGMENTATION,
    PROCESS_BYTES,
    VLLM_ASLEEP_BYTES,
    margin,
    rollout_copies,
    state_bytes,
    streamed_bytes,
    sync_bytes,
    vllm_bytes,
)
from lowpeak.plan.cost import Work, computes_in_bf16, gradient_bytes, make_work, step_seconds
from lowpeak.plan.derived_configs import with_arguments, with_layers
from lowpeak.plan.hardware import Machine
from lowpeak.plan.inputs import PlanRequest, RunInputs
from lowpeak.plan.plan import ModelCounts, free_bytes, rehearsal_inputs
from lowpeak.plan.rehearsal import rehearse

_FEW, _MORE = 2, 4  # layers of the small rehearsals
_LEAST_TOKENS, _MOST_TOKENS = 1 << 9, 1 << 17  # of a candidate's micro-batch
_PASS_KINDS = (Kind.ACTIVATIONS, Kind.LOGITS)
_MIB = 1 << 20
_SPARE_SHARE = 0.05  # of the device, for what vLLM's kernels need beyond the estimate, if there is room
_SHARE_STEPS = 100  # vLLM's share of a device is a multiple of 1 / _SHARE_STEPS


@dataclass(frozen=True)
class _Resident:
    """Bytes of a candidate that live longer than a pass: on the device by kind, and in host memory."""

    weights: int
    gradients: int
    states: int
    frozen: int
    host: int = 0

    @property
    def update(self) -> int:
        return self.weights + self.gradients + self.states + self.host


@dataclass(frozen=True)
class _Rollout:
    """Sizes of a rollout: arguments, bytes of its engine while it generates and otherwise, and the work with them."""

    work: Work
    awake: int = 0
    otherwise: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)


class Estimator:
    """Estimates for one run and one machine; the rehearsals are made once."""

    def __init__(
        self, request: PlanRequest, report: Callable[[str], object], factors: Mapping[str, float] | None = None
    ) -> None:
        self._request, self._report, self._factors = request, report, factors or {}
        self._given: frozenset[str] = frozenset(request.args.given)
        self._passes: dict[tuple[bool, bool, bool, int], int] = {}
        self._decoding = 0  # bytes of a rollout's activations

    def for_machine(self, machine: Machine) -> Estimator:
        """Return an estimator for another machine, with the same rehearsals."""
        other = copy.copy(self)
        other._request = replace(self._request, machine=machine)
        other.__dict__.pop("inputs", None)
        return other

    @cached_property
    def inputs(self) -> RunInputs:
        """The run on one device, with its parameters counted."""
        with rehearse_device(self._request.machine.device):
            inputs = RunInputs(replace(self._request, strategy="single", tensor_parallel=1), free_bytes)
            inputs.counts = ModelCounts.of(inputs.make_policy)
        return inputs

    @cached_property
    def token_sizes(self) -> list[int]:
        """The tokens that a candidate's micro-batch may have."""
        given = self.inputs.settings.memory.micro_batch_tokens
        if given is not None:
            return [int(given)]
        sizes = [size for size in self.inputs.token_sizes if _LEAST_TOKENS <= size <= _MOST_TOKENS]
        return sizes or [self.inputs.longest_sequence]

    @property
    def colocated(self) -> ColocateSettings | None:
        """The settings of a vLLM on the run's devices."""
        vllm = self.inputs.settings.vllm if self.inputs.is_online else None
        return vllm.where if vllm is not None and isinstance(vllm.where, ColocateSettings) else None

    @cached_property
    def frozen_bytes(self) -> int:
        """The bytes of reference and reward models."""
        with rehearse_device(self._request.machine.device):
            counted = [ModelCounts.of(reward.make_model).loaded_bytes for reward in self.inputs.rewards]
            if self.inputs.has_separate_reference:
                counted.append(ModelCounts.of(self.inputs.make_reference).loaded_bytes)
        return sum(counted)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the peak and the seconds of a candidate."""
        machine, inputs, offloads = self._request.machine, self.inputs, candidate.offloads
        resident = self._resident(candidate)
        passes = self._pass_bytes_of_device(candidate)
        gathered = self._gathered(candidate)
        streamed = min(resident.frozen, streamed_bytes(inputs))
        frozen = 0 if FROZEN in offloads else resident.frozen
        train = resident.weights + resident.gradients + resident.states + frozen + passes + gathered
        between_steps = resident.weights + (0 if STATES in offloads else frozen + resident.states)
        scoring = resident.weights + resident.states + (streamed if FROZEN in offloads else frozen)
        work = self._work(candidate, resident)
        decoding = self._decoding if self.colocated is None else 0
        room = self._room() - between_steps - gathered - decoding
        rollout = self._rollout(candidate, work, room, self._room() - train)
        work = rollout.work
        tensors = max(
            between_steps + gathered + decoding + rollout.awake,
            train + rollout.otherwise,
            scoring + gathered + rollout.otherwise,
        )
        seconds = sum(step_seconds(work, machine, self._factors).values())
        peak = tensors + margin(machine, tensors)
        return Estimate(candidate, peak, self._host_bytes(candidate, resident, work), seconds, rollout.sizes)

    def _host_bytes(self, candidate: Candidate, resident: _Resident, work: Work) -> int:
        """Return the bytes of a host: its processes, and what they offload."""
        machine, offloads = self._request.machine, candidate.offloads
        host = resident.host + (PROCESS_BYTES if machine.device == "cuda" else 0)
        host += resident.frozen if FROZEN in offloads or STATES in offloads else 0
        host += resident.states if STATES in offloads else 0
        host += work.activation_bytes // max(1, work.num_batches)
        host *= machine.devices_on_host
        if machine.device == "cuda" and candidate.sharding.loads_once:  # one process reads the checkpoint
            host = max(host, PROCESS_BYTES * machine.devices_on_host + self.inputs.counts.loaded_bytes)
        return host

    def _room(self) -> int:
        """Return the bytes that tensors may have on a device."""
        machine = self._request.machine
        fragmentation = FRAGMENTATION if machine.device == "cuda" else 0.0
        return int((USABLE_SHARE * machine.memory - margin(machine, 0)) / (1 + fragmentation))

    def _resident(self, candidate: Candidate) -> _Resident:
        whole = state_bytes(candidate.sharding, candidate.storage, self.inputs.counts, bf16=bool(self.inputs.args.bf16))
        whole[Kind.FROZEN] = self.frozen_bytes
        held = {kind: self._share_of(candidate, kind, value) for kind, value in whole.items()}
        host = 0
        if candidate.storage is not None and candidate.storage.offload:
            host = held[Kind.GRADIENTS] + held[Kind.OPTIMIZER]
            held |= {Kind.GRADIENTS: 0, Kind.OPTIMIZER: 0}
        return _Resident(held[Kind.WEIGHTS], held[Kind.GRADIENTS], held[Kind.OPTIMIZER], held[Kind.FROZEN], host)

    def _share_of(self, candidate: Candidate, kind: Kind, num_bytes: float) -> int:
        """Return a device's share of a kind's bytes."""
        machine, row = self._request.machine, candidate.sharding
        world = machine.num_devices // candidate.tensor_parallel
        copies = row.num_copies(world, machine.num_hosts)
        return int(num_bytes * row.share(kind, world, copies) / candidate.tensor_parallel)

    def _gathered(self, candidate: Candidate) -> int:
        """Return the bytes of the layers that a pass of a sharded model gathers."""
        gathers = candidate.sharding.sends_weights(self._request.machine.num_devices // candidate.tensor_parallel)
        return int(BF16_BYTES * self.inputs.counts.in_pass // candidate.tensor_parallel) if gathers else 0

    def _work(self, candidate: Candidate, resident: _Resident) -> Work:
        inputs = self.inputs
        work = make_work(inputs, [])
        world = self._request.machine.num_devices // candidate.tensor_parallel
        trained = inputs.rows_per_step
        if inputs.is_online and inputs.algorithm.unit == "pair":  # a pair of each group
            trained = 2 * trained // self._group_size
        rows = -(-trained // world)
        tokens = rows * (work.completion + work.prompt // max(1, min(rows, self._group_size)))
        sequences = -(-inputs.settings.rollout.num_sequences // world) if inputs.is_online else 0
        batches = max(1, -(-tokens // candidate.tokens))
        # An engine of vLLM generates for the ranks of all its devices.
        engine_sequences = sequences * (candidate.engine_parallel if self.colocated is not None else 1)
        engine_parallel = candidate.engine_parallel if self.colocated is not None else candidate.tensor_parallel
        itemsize = BF16_BYTES if self._passes_bf16(candidate) else 4
        activations = itemsize * tokens * work.layers * work.hidden if ACTIVATIONS in candidate.offloads else 0
        placed = replace(
            work,
            train_tokens=tokens,
            num_batches=batches,
            sequences=engine_sequences,
            prompts=-(-engine_sequences // self._group_size),
            score_tokens=sequences * (work.prompt + work.completion) if work.score_passes else 0,
            checkpointing=candidate.checkpointing,
            sharding=candidate.sharding,
            tensor_parallel=candidate.tensor_parallel,
            update_bytes=resident.update,
            host_bytes=self._copied_for_update(candidate, batches),
            in_bf16=computes_in_bf16(inputs, candidate.storage),
            gradient_bytes=gradient_bytes(candidate.storage),
            engine_parallel=engine_parallel,
            activation_bytes=activations,
        )
        return replace(placed, rollout_bytes=self._copied_for_rollout(candidate, resident, placed))

    def _copied_for_update(self, candidate: Candidate, batches: int) -> int:
        """Return the bytes that `offload_optimizer` copies in a step."""
        if candidate.storage is None or not candidate.storage.offload:
            return 0
        copied = self.inputs.counts.trained * candidate.storage.copied_bytes(batches)
        return self._share_of(candidate, Kind.OPTIMIZER, copied)

    def _copied_for_rollout(self, candidate: Candidate, resident: _Resident, work: Work) -> int:
        moves, streams = STATES in candidate.offloads, FROZEN in candidate.offloads
        weights = BF16_BYTES * int(self.inputs.counts.total) // candidate.engine_parallel
        return rollout_copies(
            moved=resident.states * moves,
            moved_frozen=resident.frozen * (moves and not streams),
            streamed=resident.frozen * streams,
            passes=work.score_batches,
            engine=weights * candidate.sleeps,
        )

    @property
    def _group_size(self) -> int:
        """Sequences with the same prompt: a group, or the two of a pair of preferences."""
        if self.inputs.is_online:
            return int(self.inputs.settings.sampling.num_generations)
        return 2 if self._request.kind == "reward" else 1

    # rollouts

    def _rollout(self, candidate: Candidate, work: Work, room: int, room_in_training: int) -> _Rollout:
        """Return the sizes of the fastest rollout that fits into `room`; the least ones if none does."""
        if not work.sequences or (self.inputs.settings.vllm is not None and self.colocated is None):
            return _Rollout(replace(work, slots=max(1, work.sequences)))
        if self.colocated is not None:
            return self._colocated(candidate, work, room, room_in_training)
        options = list(self._native(candidate, work, room))
        return min(options, key=lambda option: step_seconds(option.work, self._request.machine)["rollout"])

    def _native(self, candidate: Candidate, work: Work, room: int) -> Iterator[_Rollout]:
        """Yield KV caches from one sequence's to all sequences'; what a cache leaves keeps layers gathered."""
        memory, parts = self.inputs.settings.memory, candidate.tensor_parallel
        one = work.kv_bytes * (work.prompt + work.completion) // parts
        least = self.inputs.least_cache_bytes // parts
        is_sharded = self._gathered(candidate) > 0
        # Bytes that can be gathered.
        model = BF16_BYTES * self.inputs.counts.total // parts if is_sharded else 0
        if memory.kv_cache_bytes is not None:
            caches = [memory.kv_cache_bytes]
        else:
            caches = sorted({max(least, cache) for cache in _doubled(one, work.sequences)})
        for number, cache in enumerate(caches):
            if number and cache > room:
                return
            gather = min(model, max(0, room - cache)) // _MIB * _MIB
            if memory.gather_budget is not None:
                gather = min(model, memory.gather_budget)
            slots = max(1, min(work.sequences, cache // one))
            share = gather / model if is_sharded else 1.0
            sizes = {CACHE: cache, **({GATHER: gather} if is_sharded else {})}
            yield _Rollout(replace(work, slots=slots, gathered_share=share), cache + gather, 0, sizes)

    def _colocated(self, candidate: Candidate, work: Work, room: int, room_in_training: int) -> _Rollout:
        """Return vLLM's share of the device: what training leaves, or with sleep mode what a rollout leaves."""
        assert self.colocated is not None
        memory, parallel = self._request.machine.total, candidate.engine_parallel
        weights = vllm_bytes(self.inputs.counts.total, parallel)
        one = work.kv_bytes * (work.prompt + work.completion) // parallel
        least, most = weights + one, weights + one * work.sequences + int(_SPARE_SHARE * memory)
        room -= sync_bytes(self.inputs)
        limit = min(most, room if candidate.sleeps else min(room, room_in_training))
        share = max(-(-least * _SHARE_STEPS // memory), limit * _SHARE_STEPS // memory) / _SHARE_STEPS
        sizes: dict[str, Any] = {SHARE: share}
        if SHARE in self._given:
            share = self.colocated.gpu_memory_utilization
        awake = int(share * memory)
        if self.colocated.kv_cache_bytes is not None:
            awake, sizes = weights + self.colocated.kv_cache_bytes, {}
        slots = max(1, min(work.sequences, (awake - weights) // one))
        buckets = sync_bytes(self.inputs)
        asleep = VLLM_ASLEEP_BYTES if candidate.sleeps else awake
        return _Rollout(replace(work, slots=slots, gathered_share=1.0), max(awake, least) + buckets, asleep, sizes)

    # passes

    def _pass_bytes_of_device(self, candidate: Candidate) -> int:
        """Return the bytes of a pass on one device: tensor parallelism splits all but what layers pass on."""
        whole, text = self._pass_bytes(candidate, candidate.tokens), self._request.config.get_text_config()
        tokens = max(candidate.tokens, self.inputs.longest_sequence)
        copies = 1 if candidate.checkpointing else 4  # of a layer: its input, and what its norms save
        itemsize = BF16_BYTES if self._passes_bf16(candidate) else 4
        replicated = min(whole, copies * text.num_hidden_layers * tokens * text.hidden_size * itemsize)
        return replicated + (whole - replicated) // candidate.tensor_parallel

    def _pass_bytes(self, candidate: Candidate, tokens: int) -> int:
        """Return what the largest pass takes beside weights, gradients and states, of a model with all of its layers."""
        low, high = self.token_sizes[0], self.token_sizes[-1]
        if tokens not in (low, high):
            at = (tokens - low) / (high - low)
            first, last = self._pass_bytes(candidate, low), self._pass_bytes(candidate, high)
            return int(first + at * (last - first))
        offloads = ACTIVATIONS in candidate.offloads
        key = (self._passes_bf16(candidate), candidate.checkpointing, offloads, tokens)
        if key not in self._passes:
            words = f"checkpointing {candidate.checkpointing}{', activations offloaded' if offloads else ''}"
            self._report(f"rehearsing {_FEW} and {_MORE} layers, {tokens:,} tokens, {words}")
            layers = self._request.config.get_text_config().num_hidden_layers
            least, most = min(_FEW, layers), min(_MORE, layers)
            few = self._rehearsed_passes(least, *key)
            more = self._rehearsed_passes(most, *key) if most > least else few
            steps = (layers - least) / max(1, most - least)
            self._passes[key] = max(int(few[name] + steps * (more[name] - few[name])) for name in few)
        return self._passes[key]

    def _passes_bf16(self, candidate: Candidate) -> bool:
        """Return whether layers pass on bf16: with bf16 weights, and under FSDP2, which casts fp32 ones."""
        casts = self._gathered(candidate) > 0 and candidate.sharding.has_formats and bool(self.inputs.args.bf16)
        return candidate.storage is not None or (casts and self._can_store_bf16)

    @cached_property
    def _can_store_bf16(self) -> bool:
        return self._request.peft_config is None and self.accepts({"weight_bits": 32})

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

    def _rehearsed_passes(
        self, layers: int, in_bf16: bool, checkpointing: bool, offloads: bool, tokens: int
    ) -> dict[str, int]:
        """Return the bytes of each phase's pass of a model with so many layers."""
        arguments = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing, ACTIVATIONS: offloads}
        if in_bf16 and self.inputs.storage is None:
            arguments["weight_bits"] = 32
        request = replace(
            self._request,
            args=with_arguments(self._request.args, arguments),
            config=with_layers(self._request.config, layers),
            strategy="single",
            tensor_parallel=1,
        )
        with rehearse_device(request.machine.device), rehearse_experts():
            inputs = RunInputs(request, lambda inputs: request.machine.memory // 2)
            inputs.counts = self.inputs.counts
            phases = rehearse(rehearsal_inputs(inputs, inputs.step_batches(), updates=False)).phases
        if "rollout" in phases:
            kinds = phases["rollout"].device
            self._decoding = max(self._decoding, kinds.get(Kind.ACTIVATIONS, 0) + kinds.get(Kind.LOGITS, 0))
        return {
            name: sum(phase.device.get(kind, 0) for kind in _PASS_KINDS)
            for name, phase in phases.items()
            if name not in ("load", "rollout")
        }


def _doubled(one: int, count: int) -> list[int]:
    """Return the bytes of 1, 2, 4 ... sequences, and of all `count`."""
    powers = [1 << power for power in range(count.bit_length()) if 1 << power < count]
    return [one * number for number in (*powers, count)]
