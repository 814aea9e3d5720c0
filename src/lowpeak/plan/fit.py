"""The choice of settings with which a run fits and is fastest: candidates by an estimate, the best of them rehearsed.

An estimate adds up weights, gradients and optimizer states by arithmetic, and what a pass takes beside them by rehearsals
of the model with two and four layers, from which the bytes of the other layers follow: they are linear in the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lowpeak.arguments import StorageFormat
from lowpeak.device_kind import rehearse_device
from lowpeak.memory import Kind
from lowpeak.models import rehearse_experts
from lowpeak.plan.computed import PROCESS_BYTES, margin, zero_shares
from lowpeak.plan.cost import Work, computes_in_bf16, step_seconds, work_of
from lowpeak.plan.hardware import Machine
from lowpeak.plan.inputs import PlanRequest, RunInputs
from lowpeak.plan.plan import ModelCounts, Plan, free_bytes, make_plan, rehearse_inputs

_FEW, _MORE = 2, 4  # layers of the small rehearsals
_LEAST_TOKENS, _MOST_TOKENS = 1 << 9, 1 << 17  # of a candidate's micro-batch
_MOST_REHEARSED = 4  # candidates that are rehearsed with all layers before the search gives up
# What a step keeps free: estimates of peaks are a little below those of all layers.
_HEADROOM = 0.97
_PASS_KINDS = (Kind.ACTIVATIONS, Kind.LOGITS, Kind.KV_CACHE)
_HALF = 2
_BATCH = "per_device_train_batch_size"


@dataclass(frozen=True)
class Candidate:
    """Settings that the search may choose: arguments to set, and where the run is placed."""

    strategy: str
    tensor_parallel: int
    arguments: Mapping[str, Any]
    storage: StorageFormat | None
    checkpointing: bool
    tokens: int

    def __str__(self) -> str:
        parts = [self.strategy if self.tensor_parallel == 1 else f"{self.strategy} (tp {self.tensor_parallel})"]
        parts.append("16 bytes a parameter" if self.storage is None else _storage_words(self.storage))
        parts.append("checkpointing" if self.checkpointing else "no checkpointing")
        parts.append(f"micro-batches of {self.tokens:,} tokens")
        return ", ".join(parts)


def _storage_words(storage: StorageFormat) -> str:
    total = storage.weight_bytes + storage.gradient_bits / 8 + storage.state_bytes
    words = f"{total:.1f} bytes a parameter"
    return f"{words}, of which {storage.weight_bytes} on the device" if storage.offload else words


@dataclass(frozen=True)
class Estimate:
    """The estimated peak of a candidate in bytes, and the seconds of a step."""

    candidate: Candidate
    peak: int
    host: int
    seconds: float
    work: Work


@dataclass(frozen=True)
class Fit:
    """The chosen plan, or None if nothing fits; what was rejected and why; the smallest change with which the run would fit."""

    plan: Plan | None
    candidate: Candidate | None
    rejected: Sequence[tuple[Candidate, str]] = ()
    smallest_change: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for JSON."""
        return {
            "chosen": None if self.candidate is None else str(self.candidate),
            "arguments": dict(self.arguments),
            "rejected": [{"settings": str(candidate), "reason": reason} for candidate, reason in self.rejected],
            "smallest_change": self.smallest_change,
        }


_FORMATS: tuple[tuple[dict[str, Any], StorageFormat | None], ...] = (
    ({}, None),
    ({"weight_bits": 32}, StorageFormat(32, 8, 16)),
    ({"weight_bits": 16}, StorageFormat(16, 8, 16)),
    ({"weight_bits": 32, "offload_optimizer": True}, StorageFormat(32, 8, 32, offload=True)),
    ({"weight_bits": 16, "offload_optimizer": True}, StorageFormat(16, 8, 32, offload=True)),
)


class Search:
    """A search over candidates for one run and one machine."""

    def __init__(
        self,
        request: PlanRequest,
        report: Callable[[str], object] = lambda text: None,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self._request, self._report, self._factors = request, report, factors or {}
        self._given: frozenset[str] = frozenset(request.args.given)

    def run(self) -> Fit:
        """Return the fastest candidate that fits; each of the best is rehearsed whole before it is chosen."""
        machine = self._request.machine
        estimates = [self._estimate(candidate) for candidate in self._candidates()]
        fitting = sorted((e for e in estimates if self._fits(e)), key=_preference)
        rejected = [(e.candidate, self._why_not(e)) for e in _best_by_strategy(estimates) if not self._fits(e)]
        for estimate in fitting[:_MOST_REHEARSED]:
            request, arguments = self._applied(estimate.candidate)
            self._report(f"rehearsing {estimate.candidate}")
            plan = make_plan(request, self._report).calibrated(self._factors)
            if plan.fits:
                slower = [e for e in _best_by_strategy(fitting) if e.candidate.strategy != estimate.candidate.strategy]
                rejected += [(e.candidate, f"{e.seconds:.1f} s a step") for e in slower]
                return Fit(plan, estimate.candidate, rejected, arguments=arguments)
            peak = f"{plan.peak / 1e9:.1f} GB in {plan.peak_phase}"
            rejected.append((estimate.candidate, f"rehearsed with {peak}, of {machine.memory / 1e9:.1f}"))
        return Fit(None, None, rejected, self._smallest_change(estimates))

    # candidates

    def _candidates(self) -> Iterator[Candidate]:
        for strategy, tensor_parallel in self._strategies():
            for arguments, storage in self._formats(strategy):
                for checkpointing in self._checkpointing():
                    for tokens in self._token_sizes:
                        changes = {**arguments, "micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
                        if tensor_parallel > 1:  # its devices are one rank: as many sequences a step as without it
                            changes[_BATCH] = tensor_parallel * self._request.args.per_device_train_batch_size
                        yield Candidate(strategy, tensor_parallel, changes, storage, checkpointing, tokens)

    def _strategies(self) -> list[tuple[str, int]]:
        machine, frozen = self._request.machine, self._request.peft_config is not None
        if machine.num_devices == 1:
            return [("single", 1)]
        found = [("ddp", 1), ("fsdp2", 1), ("zero2", 1), ("zero3", 1)]
        if machine.num_hosts > 1:
            found.append(("hsdp", 1))
        if not frozen and self._request.kind != "reward" and not getattr(self._request.args, "use_vllm", False):
            heads = self._request.config.get_text_config().num_attention_heads
            sizes = [size for size in (2, 4, 8) if size <= machine.devices_on_host and heads % size == 0]
            found += [("tp", size) for size in sizes if machine.num_devices % size == 0]
        if machine.device == "cpu":
            return [each for each in found if each[0] in ("ddp", "zero2", "zero3")]
        return found

    def _formats(self, strategy: str) -> list[tuple[dict[str, Any], StorageFormat | None]]:
        if strategy.startswith("zero") or self._request.peft_config is not None or self._chooses_format:
            return [({}, None if strategy.startswith("zero") else self._inputs.storage)]
        offloads = self._request.machine.device == "cuda"
        return [each for each in _FORMATS if offloads or each[1] is None or not each[1].offload]

    @property
    def _chooses_format(self) -> bool:
        given = self._given & {
            "weight_bits",
            "state_bits",
            "gradient_bits",
            "offload_optimizer",
            "shard_optimizer_states",
        }
        return bool(given) or self._inputs.storage is not None or "optim" in self._given

    def _checkpointing(self) -> list[bool]:
        given = self._given & {"gradient_checkpointing", "activation_checkpointing"}
        return [self._inputs.args.checkpoints_activations] if given else [False, True]

    @cached_property
    def _token_sizes(self) -> list[int]:
        given = self._inputs.settings.memory.micro_batch_tokens
        if given is not None:
            return [int(given)]
        sizes = [size for size in self._inputs.token_sizes if _LEAST_TOKENS <= size <= _MOST_TOKENS]
        return sizes or [self._inputs.longest_sequence]

    # estimates

    @cached_property
    def _inputs(self) -> RunInputs:
        with rehearse_device(self._request.machine.device):
            inputs = RunInputs(self._request, free_bytes)
            inputs.counts = ModelCounts.of(inputs.make_policy)
        return inputs

    def _estimate(self, candidate: Candidate) -> Estimate:
        request, _ = self._applied(candidate)
        machine, counts = self._request.machine, self._inputs.counts
        device, host, update = _held(candidate, counts, self._inputs, machine)
        passes = self._pass_bytes(candidate.checkpointing, candidate.tokens) // (candidate.tensor_parallel or 1)
        shards = _shards(candidate, machine)
        gathered = 0
        if candidate.strategy in ("fsdp2", "hsdp", "tp", "zero3") and shards > 1:
            gathered = _HALF * 2 * (counts.largest_layer + 2 * counts.head) // candidate.tensor_parallel
        tensors = device + passes + gathered
        host += PROCESS_BYTES if machine.device == "cuda" else 0
        model_bytes = _HALF * counts.total // candidate.tensor_parallel
        # By default half of the free memory keeps layers gathered in a rollout.
        kept = 1.0 if gathered == 0 else min(1.0, max(0, machine.memory - tensors) / 2 / model_bytes)
        work = replace(self._work(candidate, request, update), gathered_share=kept)
        seconds = sum(step_seconds(work, machine, self._factors).values())
        return Estimate(candidate, tensors + margin(machine, tensors), host * machine.devices_on_host, seconds, work)

    def _work(self, candidate: Candidate, request: PlanRequest, update: int) -> Work:
        inputs = self._inputs
        work = work_of(inputs, [])
        world = request.world_size
        rows = -(-inputs.rows_per_step // world)
        tokens = rows * (work.completion + work.prompt // max(1, min(rows, self._group_size)))
        sequences = -(-inputs.settings.rollout.num_sequences // world) if inputs.is_online else 0
        offloads = candidate.storage is not None and candidate.storage.offload
        batches = max(1, -(-tokens // candidate.tokens))
        copies = inputs.counts.trained * (8 + 4 + 2 * batches) // _shards(candidate, request.machine) if offloads else 0
        return replace(
            work,
            train_tokens=tokens,
            num_batches=batches,
            sequences=sequences,
            prompts=-(-sequences // self._group_size),
            score_tokens=sequences * (work.prompt + work.completion) if work.score_passes else 0,
            checkpointing=candidate.checkpointing,
            strategy=candidate.strategy,
            tensor_parallel=candidate.tensor_parallel,
            update_bytes=update,
            host_bytes=copies,
            in_bf16=computes_in_bf16(inputs, candidate.storage),
            gradient_bytes=4 if candidate.storage is None else 2,
        )

    @property
    def _group_size(self) -> int:
        return int(self._inputs.settings.sampling.num_generations) if self._inputs.is_online else 1

    def _pass_bytes(self, checkpointing: bool, tokens: int) -> int:
        """Return what the largest pass takes beside weights, gradients and states, of a model with all of its layers."""
        low, high = self._token_sizes[0], self._token_sizes[-1]
        if tokens not in (low, high):
            at = (tokens - low) / (high - low)
            first, last = self._pass_bytes(checkpointing, low), self._pass_bytes(checkpointing, high)
            return int(first + at * (last - first))
        key = (checkpointing, tokens)
        if key not in self._passes:
            self._report(f"rehearsing {_FEW} and {_MORE} layers, {tokens:,} tokens, checkpointing {checkpointing}")
            few, more = (self._rehearsed_pass(layers, checkpointing, tokens) for layers in (_FEW, _MORE))
            layers = self._request.config.get_text_config().num_hidden_layers
            self._passes[key] = max(0, int(few + (more - few) * (layers - _FEW) / (_MORE - _FEW)))
        return self._passes[key]

    @cached_property
    def _passes(self) -> dict[tuple[bool, int], int]:
        return {}

    def _rehearsed_pass(self, layers: int, checkpointing: bool, tokens: int) -> int:
        arguments = {"micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
        request = replace(
            self._request,
            args=with_arguments(self._request.args, arguments),
            config=with_layers(self._request.config, layers),
            strategy="single",
            machine=replace(self._request.machine, num_devices=1),
        )
        with rehearse_device(request.machine.device), rehearse_experts():
            inputs = RunInputs(request, lambda inputs: request.machine.memory // 2)
            inputs.counts = self._inputs.counts
            phases = rehearse_inputs(inputs, inputs.step_batches()).phases
        return max(sum(phases[name].device.get(kind, 0) for kind in _PASS_KINDS) for name in phases if name != "load")

    # results

    def _applied(self, candidate: Candidate) -> tuple[PlanRequest, dict[str, Any]]:
        kept = self._given - {_BATCH}
        arguments = {name: value for name, value in candidate.arguments.items() if name not in kept}
        args = with_arguments(self._request.args, arguments)
        request = replace(
            self._request, args=args, strategy=candidate.strategy, tensor_parallel=candidate.tensor_parallel
        )
        return request, arguments

    def _fits(self, estimate: Estimate) -> bool:
        machine = self._request.machine
        on_host = machine.host_memory is None or estimate.host <= machine.host_memory
        return estimate.peak <= _HEADROOM * machine.memory and on_host

    def _why_not(self, estimate: Estimate) -> str:
        machine = self._request.machine
        if estimate.peak > _HEADROOM * machine.memory:
            return f"about {estimate.peak / 1e9:.1f} GB on a device of {machine.memory / 1e9:.1f}"
        return f"about {estimate.host / 1e9:.0f} GB of host memory of {(machine.host_memory or 0) / 1e9:.0f}"

    def _smallest_change(self, estimates: Sequence[Estimate]) -> str:
        """Return the least change of hardware or training with which an estimate fits."""
        machine = self._request.machine
        closest = min(estimates, key=lambda e: e.peak)
        needs = (
            f"{closest.candidate} needs about {closest.peak / 1e9:.1f} GB on each device, of {machine.memory / 1e9:.1f}"
        )
        for factor in (2, 4, 8):
            larger = replace(machine, num_devices=machine.num_devices * factor)
            search = copy.copy(self)  # which has the rehearsals of this one
            search._request = replace(self._request, machine=larger)
            if any(search._fits(search._estimate(candidate)) for candidate in search._candidates()):
                return f"{needs}. The smallest change that fits: {larger.num_devices} such devices (--gpus {larger.num_devices})."
        if self._request.peft_config is None:
            return f"{needs}. Train LoRA adapters in place of all weights (--use_peft), or shorten completions."
        return f"{needs}. Shorten completions, or load the base in 4 bits (--load_in_4bit)."


def _held(candidate: Candidate, counts: ModelCounts, inputs: RunInputs, machine: Machine) -> tuple[int, int, int]:
    """Return bytes held on the device and in host memory through a step, and those that an update touches."""
    shards, world = _shards(candidate, machine), machine.num_devices // candidate.tensor_parallel
    trained = counts.trained
    checkpoint = inputs.checkpoint_dtype.itemsize
    reference = checkpoint * counts.total if inputs.has_separate_reference else 0
    if candidate.strategy.startswith("zero"):
        update = sum(zero_shares(int(candidate.strategy[-1]), trained, counts.frozen_bytes, world).values())
        return update + reference // shards, 0, update
    storage = candidate.storage
    weight_bytes = 4 if storage is None else storage.weight_bytes
    beside = 12.0 if storage is None else storage.gradient_bits / 8 + storage.state_bytes
    weights = int(weight_bytes * trained + counts.frozen_bytes) // shards
    others = int(beside * trained) // shards
    offloads = storage is not None and storage.offload
    on_device = weights + (0 if offloads else others) + reference // shards
    return on_device, others if offloads else 0, weights + others


def _shards(candidate: Candidate, machine: Machine) -> int:
    """Return over how many devices weights, gradients and states are spread."""
    world = machine.num_devices
    return {"fsdp2": world, "tp": world, "zero3": world, "hsdp": machine.devices_on_host}.get(candidate.strategy, 1)


def _preference(estimate: Estimate) -> tuple[float, int]:
    """Return what the search minimises: the seconds of a step, then the peak.

    What changes a run's numbers, or needs another package, must save time: bf16 weights with their low bits and DeepSpeed 3 %, and
    weights of 16 bits, whose rounding has noise, a tenth.
    """
    candidate = estimate.candidate
    least_gain = {None: 1.0, 32: 1.03, 16: 1.1}[candidate.arguments.get("weight_bits")]
    if candidate.strategy.startswith("zero"):
        least_gain *= 1.03
    return estimate.seconds * least_gain, estimate.peak


def _best_by_strategy(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimate with the lowest peak of each strategy and format."""
    best: dict[tuple[str, int, StorageFormat | None], Estimate] = {}
    for estimate in sorted(estimates, key=lambda e: e.peak):
        candidate = estimate.candidate
        best.setdefault((candidate.strategy, candidate.tensor_parallel, candidate.storage), estimate)
    return list(best.values())


def with_arguments(args: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a trainer's config with other values of some arguments, as if they were given."""
    changed = copy.copy(args)
    for name, value in changes.items():
        if name == "gradient_checkpointing" and hasattr(changed, "activation_checkpointing"):
            changed.activation_checkpointing = value
            continue
        setattr(changed, name, value)
    changed.given = frozenset(args.given) | frozenset(changes)
    return changed


def with_layers(config: Any, layers: int) -> Any:
    """Return the config of a model with fewer layers of the same kind."""
    fewer = copy.deepcopy(config)
    text = fewer.get_text_config()
    layers = min(layers, text.num_hidden_layers)
    text.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(text, name, None):
            setattr(text, name, list(getattr(text, name))[:layers])
    return fewer
