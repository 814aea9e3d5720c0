"""The parts of a plan that are arithmetic: DeepSpeed, vLLM, host memory, buffers of communication, and the margin.

Each function says where its numbers come from. A phase with such parts is labelled "computed" if they replace tensors of the
rehearsal, and stays "rehearsed" if they only add a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.arguments import ColocateSettings, MemorySettings, StorageFormat, is_servable_adapter
from lowpeak.memory import Kind, PhaseMemory, bytes_outside_allocator, most_streamed_bytes
from lowpeak.parallel import Sharding, decoder_layers
from lowpeak.plan.hardware import GB, Machine
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.model_counts import ModelCounts
from lowpeak.plan.rehearsal import Rehearsal
from lowpeak.plan.request import PlanRequest
from lowpeak.records import SLICE_BYTES

# Of the peak: what the caching allocator reserves and cannot use.
FRAGMENTATION = 0.04
# Of one process in host memory: Python, torch, CUDA's libraries, the tokenizer and the dataset's index.
PROCESS_BYTES = 3 * GB
# vLLM beside weights and KV cache: its context, CUDA graphs and the activations of a profiling forward.
VLLM_BYTES = int(2.5 * GB)
VLLM_ASLEEP_BYTES = int(1.2 * GB)
_SERVER_SHARE = 0.9  # of its device, which a vLLM server takes by default
_MAX_SERVER_DEVICES = 64  # of one server, which takes as many as its weights need
ENGINE_AWAKE = ("sync", "rollout", "reward")  # phases in which an engine is awake
FROZEN_PHASES = ("score", "reward")  # in which frozen models run
_FORWARDS = ("rollout", "score", "forward", "backward")
BF16_BYTES = 2


def margin(machine: Machine, tensors: int) -> int:
    """Return the bytes of a device beside tensors; none on a CPU, where resident memory is not planned."""
    if machine.device == "cpu":
        return 0
    return bytes_outside_allocator(machine.uses_nccl) + int(FRAGMENTATION * tensors)


def state_bytes(row: Sharding, storage: StorageFormat | None, counts: Any, *, bf16: bool) -> dict[Kind, int]:
    """Return the bytes of the whole model's weights, gradients and optimizer states, before they are divided.

    A trained parameter takes 4 + 4 + 8 bytes, or those of a storage format; under DeepSpeed 2 + 2 (4 + 4 in fp32) and 12 of fp32
    weight and moments (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
    """
    per_parameter: tuple[float, float, float] = (4, 4, 8)
    if storage is not None:
        per_parameter = (storage.weight_bytes, storage.gradient_bits / 8, storage.state_bytes)
    elif not row.has_formats:
        width = BF16_BYTES if bf16 else 4
        per_parameter = (width, width, 12)
    weights, gradients, states = (int(num_bytes * counts.trained) for num_bytes in per_parameter)
    return {Kind.WEIGHTS: weights + counts.frozen_bytes, Kind.GRADIENTS: gradients, Kind.OPTIMIZER: states}


def place_by_strategy(
    inputs: RunInputs, rehearsal: Rehearsal, gather_budget: int, num_batches: int
) -> Mapping[str, PhaseMemory]:
    """Return the phases with bytes that a rehearsal on FSDP2 or one device lacks: ZeRO's shares, shards in host memory."""
    row = inputs.request.sharding
    if not row.has_formats:
        return place_on_ranks(inputs, rehearsal.with_largest_passes(), gather_budget, num_batches)
    return {name: _without(phase, row.on_host) for name, phase in rehearsal.phases.items()}


def place_on_ranks(
    inputs: RunInputs, phases: Mapping[str, PhaseMemory], gather_budget: int, num_batches: int
) -> dict[str, PhaseMemory]:
    """Return the phases of one device with a strategy's shares of weights, gradients and states, gathered layers and buckets."""
    request, row, storage = inputs.request, inputs.request.sharding, inputs.storage
    whole = state_bytes(row, storage, inputs.counts, bf16=bool(inputs.args.bf16))
    shares = {kind: request.share_of(kind, value) for kind, value in whole.items()}
    model, gathered, copied = (
        gatherable_bytes(inputs),
        _gathered_bytes(inputs),
        _layerwise_gathers(inputs, gather_budget),
    )
    gathered |= {name: own for name, (own, _) in copied.items()}
    buckets = {} if row.has_formats else _zero_buckets(inputs)
    buckets |= {name: copies for name, (_, copies) in copied.items()}
    offloads = storage is not None and storage.offload
    on_host = row.on_host | ({Kind.GRADIENTS, Kind.OPTIMIZER} if offloads else set())
    placed = {}
    for name, phase in phases.items():
        kinds = {**shares, **_absent_state(row, name, shares, num_batches)}
        kinds |= {Kind.GATHERED: gathered.get(name, 0), Kind.BUCKETS: buckets.get(name, 0)}
        kinds[Kind.FROZEN] = request.share_of(Kind.FROZEN, phase.device.get(Kind.FROZEN, 0))
        kinds |= _logits_of_rows(inputs, phase) if name == "rollout" and 0 < gathered[name] < model else {}
        placed[name] = _without(phase.computed(kinds), on_host)
    return placed


def _logits_of_rows(inputs: RunInputs, phase: PhaseMemory) -> dict[Kind, int]:
    """Return the bytes of logits where each rank has rows of the head: on CPUs they are mostly those rows, widened."""
    divided = _num_shards(inputs.request) if inputs.request.machine.device == "cpu" else 1
    return {Kind.LOGITS: phase.device.get(Kind.LOGITS, 0) // divided}


def _gathered_bytes(inputs: RunInputs) -> dict[str, int]:
    """Return the bytes that are gathered in each phase with forwards: a layer, the next one, embeddings, head, a teacher's head."""
    model = gatherable_bytes(inputs)
    own = min(model, gathered_itemsize(inputs) * inputs.counts.in_pass)
    return {name: own + (held_head_bytes(inputs, name) if model else 0) for name in _FORWARDS}


def _layerwise_gathers(inputs: RunInputs, gather_budget: int) -> dict[str, tuple[int, int]]:
    """Return, by phase, the bytes that lowpeak's Gatherer gathers and those that gloo copies: rollouts, a reference's scores.

    One layer at a time, in addition to `gather_budget` or the head; gloo copies three tensors.
    """
    model, itemsize, on_cpu = (
        gatherable_bytes(inputs),
        gathered_itemsize(inputs),
        inputs.request.machine.device == "cpu",
    )

    def gathers(counts: ModelCounts, kept: int) -> tuple[int, int]:
        copies = itemsize * counts.largest_three_of_layer if model and on_cpu else 0
        return min(model and itemsize * counts.total, itemsize * counts.largest_layer + kept), copies

    found = {} if inputs.rollout(0) is None else {"rollout": gathers(inputs.counts, gather_budget)}
    if inputs.has_separate_reference and not inputs.scoring_needs & {"old", "entropy", "values"}:
        reference = inputs.reference_counts
        found["score"] = gathers(reference, itemsize * reference.head)
    return found


def _absent_state(row: Sharding, phase: str, shares: Mapping[Kind, int], num_batches: int) -> dict[Kind, int]:
    """Return a phase's share of gradients and states, if it is not the rank's whole share."""
    kinds = {}
    held = {"backward", "optimizer"} | ({"forward"} if num_batches > 1 else set())
    if phase not in held and (row.has_formats or not row.gathers):  # ZeRO-3 keeps a buffer of gradients
        kinds[Kind.GRADIENTS] = 0
    if phase == "load":  # DeepSpeed's fp32 weights, before the moments
        kinds[Kind.OPTIMIZER] = 0 if row.has_formats else shares[Kind.OPTIMIZER] // 3
    return kinds


def _zero_buckets(inputs: RunInputs) -> dict[str, int]:
    """Return DeepSpeed 0.19's bytes besides state in a backward and in an update (measured).

    A backward has the largest gradient whole, or ZeRO-2's share twice; an update has copies of the gradients.
    """
    request, bf16 = inputs.request, bool(inputs.args.bf16)
    gathers, largest = request.sharding.gathers, 4 * inputs.counts.largest_trained
    share = request.share_of(Kind.OPTIMIZER, 4 * inputs.counts.trained)
    update = share if gathers and not bf16 else 3 * share // 2
    return {"backward": largest if gathers else max(largest, share), "optimizer": update}


def casts_weights(inputs: RunInputs) -> bool:
    """Return whether each rank has the whole model in fp32 and computes in bf16, so that a rollout copies weights."""
    request, model = inputs.request, inputs.settings.model
    in_fp32 = not model.trains_bf16 if request.peft_config is None else inputs.checkpoint_dtype.itemsize == 4
    is_whole = request.sharding.has_formats and request.mesh.shards == request.tensor_parallel == 1
    return inputs.generates_natively and is_whole and bool(inputs.args.bf16) and in_fp32


def gather_budget_of(inputs: RunInputs) -> int:
    """Return the bytes for a rollout's gathered layers or copied weights: by default half of those that the KV cache leaves."""
    budget = inputs.settings.memory.gather_budget if inputs.is_online else 0
    free = free_bytes(inputs, gradients=False)
    return max(0, free - inputs.sizes.kv_cache_bytes) // 2 if budget is None else int(budget)


def free_bytes(inputs: RunInputs, gradients: bool = True) -> int:
    """Return the bytes that training leaves free on a device when a run starts; or that a rollout does, without gradients."""
    request, row, storage = inputs.request, inputs.request.sharding, inputs.storage
    held = state_bytes(row, storage, inputs.counts, bf16=bool(inputs.args.bf16))
    if inputs.has_separate_reference and not inputs.settings.memory.offload_frozen_models:
        held[Kind.FROZEN] = _reference_bytes(inputs, inputs.reference_counts.total)
    elsewhere = set(row.on_host) | (set() if gradients else {Kind.GRADIENTS})
    if storage is not None and storage.offload:
        elsewhere |= {Kind.GRADIENTS, Kind.OPTIMIZER}
    tensors = sum(request.share_of(kind, value) for kind, value in held.items() if kind not in elsewhere)
    return request.machine.memory - margin(request.machine, tensors) - tensors


def gatherable_bytes(inputs: RunInputs) -> int:
    """Return the bytes of the weights that passes gather from other ranks; 0 if each rank has them."""
    gathers = inputs.request.sharding.sends_weights(inputs.request.world_size)
    return gathered_itemsize(inputs) * int(inputs.counts.total) if gathers else 0


def gathered_itemsize(inputs: RunInputs) -> int:
    """Return the bytes of a gathered parameter."""
    in_bf16 = inputs.args.bf16 and not inputs.request.sharding.splits_tensors  # transformers' FSDP2 gathers fp32
    return BF16_BYTES if in_bf16 or inputs.storage is not None else 4


def _without(phase: PhaseMemory, on_host: Collection[Kind]) -> PhaseMemory:
    """Return a phase with these kinds in host memory."""
    if not on_host:
        return phase
    moved = {kind: phase.host.get(kind, 0) + phase.device.get(kind, 0) for kind in on_host}
    return replace(phase.computed(dict.fromkeys(on_host, 0)), host={**phase.host, **moved})


def engine_bytes(inputs: RunInputs, num_parameters: int) -> tuple[int, int]:
    """Return the bytes of a colocated vLLM on the device, awake and otherwise; 0 without one.

    Awake it takes `vllm_gpu_memory_utilization` of the device, as vLLM documents. Asleep it keeps its context and graphs.
    """
    where = inputs.colocated
    if where is None:
        return 0, 0
    awake = int(where.gpu_memory_utilization * inputs.request.machine.total)
    if where.kv_cache_bytes is not None:
        awake = vllm_bytes(num_parameters, where.tensor_parallel_size) + where.kv_cache_bytes
    return awake, VLLM_ASLEEP_BYTES if where.sleeps else awake


@dataclass(frozen=True)
class EngineMemory:
    """An engine of a run: the devices that it is spread over, the ranks that it generates for, and its KV cache on each device.

    `ranks` is fractional for servers, which share the ranks. They are planned on devices like the run's; `cache_bytes` is None if
    the model exceeds one.
    `has_graphs`: on GPUs it decodes by CUDA graphs.
    """

    parallel: int
    ranks: float
    cache_bytes: int | None
    has_graphs: bool = True


def engine_memory(inputs: RunInputs) -> EngineMemory:
    """Return the engine that generates for rank 0."""
    vllm = inputs.settings.vllm if inputs.is_online else None
    if vllm is None:
        cache_bytes = inputs.sizes.kv_cache_bytes if inputs.is_online else 0
        return EngineMemory(inputs.request.tensor_parallel, 1, cache_bytes, inputs.has_graphs)
    if not isinstance(vllm.where, ColocateSettings):
        total, parallel = int(_SERVER_SHARE * inputs.request.machine.total), 1
        while (room := total - vllm_bytes(inputs.counts.total, parallel)) <= 0 and parallel < _MAX_SERVER_DEVICES:
            parallel *= 2
        return EngineMemory(parallel, inputs.request.world_size / len(vllm.where.base_urls), max(0, room))
    parallel = vllm.where.tensor_parallel_size
    awake, _ = engine_bytes(inputs, inputs.counts.total)
    return EngineMemory(parallel, parallel, max(0, awake - vllm_bytes(inputs.counts.total, parallel)))


def serves_adapters(inputs: RunInputs) -> bool:
    """Return whether vLLM servers get adapters in place of merged weights."""
    vllm, config = inputs.settings.vllm if inputs.is_online else None, inputs.request.peft_config
    return bool(vllm and config and inputs.colocated is None and vllm.adapters and is_servable_adapter(config))


def vllm_bytes(num_parameters: int, parallel: int) -> int:
    """Return a colocated vLLM's bytes on each of `parallel` devices beside its KV cache: bf16 weights, and the rest."""
    return BF16_BYTES * num_parameters // parallel + VLLM_BYTES


def copied_for_rollout(inputs: RunInputs, phases: Mapping[str, PhaseMemory], score_batches: int) -> int:
    """Return the bytes over the link to the host for a rollout with so many scoring passes."""
    memory, where, engine = inputs.settings.memory, inputs.colocated, 0
    if where is not None and where.sleeps:
        engine = BF16_BYTES * inputs.counts.total // where.tensor_parallel_size
    moves, streams = memory.offload_during_rollout, memory.offload_frozen_models and "score" in phases
    return rollout_copies(
        moved=phases["optimizer"].device.get(Kind.OPTIMIZER, 0) * moves,
        moved_frozen=phases["load"].device.get(Kind.FROZEN, 0) * moves,
        streamed=phases["score"].host.get(Kind.FROZEN, 0) if streams else 0,
        passes=score_batches,
        engine=engine,
    )


def rollout_copies(
    *, moved: int = 0, moved_frozen: int = 0, streamed: int = 0, passes: int = 0, engine: int = 0
) -> int:
    """Return 2 * (moved + moved_frozen + engine) + streamed * passes, in bytes.

    Optimizer states (`moved`), frozen models and the weights of a sleeping `engine` leave the device and return. Each of the
    scoring `passes` copies the frozen models that are `streamed`.
    """
    return 2 * (moved + moved_frozen + engine) + streamed * passes


def sync_bytes(inputs: RunInputs) -> int:
    """Return the bytes of buckets that are sent to vLLM: one is filled while another is sent. The native engine needs none."""
    vllm = inputs.settings.vllm if inputs.is_online else None
    return 0 if vllm is None else 2 * int(vllm.bucket_bytes)


def save_bytes(inputs: RunInputs) -> int:
    """Return the bytes that saving needs: a slice of exported weights, or an adapter; or pieces of compact states."""
    request, parts, itemsize = inputs.request, inputs.request.tensor_parallel, inputs.trained_dtype.itemsize
    if request.peft_config is not None:  # rank 0 gathers the adapter, which is fp32
        exported = 4 * inputs.counts.trained if _num_shards(request) > 1 else 0
    elif parts > 1:  # a slice of the whole tensor, and the rows from which it is cut
        exported = 2 * min(SLICE_BYTES, itemsize * inputs.counts.largest * parts)
    else:
        exported = min(SLICE_BYTES, itemsize * inputs.counts.largest // _num_shards(request))
    return max(exported, decoded_bytes(inputs))


def decoded_bytes(inputs: RunInputs) -> int:
    """Return the bytes of two decoded pieces of compact states, which saving needs at a time; 0 for torch's AdamW."""
    storage = inputs.storage
    if storage is None or (storage.weight_bits is None and storage.state_bits != 8):
        return 0
    return 2 * min(SLICE_BYTES, 4 * inputs.counts.largest_trained // _num_shards(inputs.request))


def _num_shards(request: PlanRequest) -> int:
    ranks = request.world_size
    return ranks // request.sharding.num_copies(ranks, request.machine.num_hosts) if request.sharding.gathers else 1


def _reference_bytes(inputs: RunInputs, parameters: int) -> int:
    """Return the bytes of parameters of a separate reference, or of the teacher, as loaded."""
    counts = inputs.reference_counts
    if inputs.request.teacher_config is None:
        return inputs.checkpoint_dtype.itemsize * parameters
    return parameters * counts.loaded_bytes // counts.total


def streamed_bytes(inputs: RunInputs, phase: str) -> int:
    """Return the bytes of frozen models on a device while a phase runs one of them from host memory."""
    if phase not in FROZEN_PHASES:
        return 0
    if inputs.request.world_size > 1:  # gathered by FSDP2
        return _reference_bytes(inputs, inputs.reference_counts.in_pass)
    key = (phase, inputs.checkpoint_dtype)
    if key not in inputs.streamed:
        makers: list[Callable[[], nn.Module]] = [reward.make_model for reward in inputs.rewards]
        if phase == "score":
            makers = [inputs.make_reference] if inputs.has_separate_reference else []
        with FakeTensorMode(allow_non_fake_inputs=True):
            models = [make() for make in makers]
            most = (most_streamed_bytes(model, decoder_layers(model)) for model in models)
            inputs.streamed[key] = max(most, default=0)
    return inputs.streamed[key]


def held_head_bytes(inputs: RunInputs, phase: str) -> int:
    """Return the bytes of a teacher's head that a step's passes copy, if its weights are elsewhere."""
    teaches = inputs.algorithm.divergence is not None and inputs.has_separate_reference
    return _reference_bytes(inputs, inputs.reference_counts.head) if teaches and phase in ("forward", "backward") else 0


def host_of_process(
    inputs: RunInputs, phases: Mapping[str, PhaseMemory], model_bytes: int, frozen: int
) -> dict[str, dict[Kind, int]]:
    """Return one process's host memory by phase: offloaded tensors, and the process itself.

    `frozen` are the bytes of its frozen models.
    """
    optimizer_bytes = phases["optimizer"].device.get(Kind.OPTIMIZER, 0) if "optimizer" in phases else 0
    process_bytes = PROCESS_BYTES if inputs.request.machine.device == "cuda" else 0
    found: dict[str, dict[Kind, int]] = {}
    for name, phase in phases.items():
        host = {**phase.host, Kind.MARGIN: process_bytes}
        if name == "load" and process_bytes and inputs.request.sharding.loads_once:
            host[Kind.CHECKPOINT] = model_bytes
        if name == "save":
            host[Kind.BUCKETS] = 2 * SLICE_BYTES
        found[name] = _with_offloaded(host, name, inputs.settings.memory, frozen, optimizer_bytes)
    return found


def _with_offloaded(
    host: dict[Kind, int], phase: str, memory: MemorySettings, frozen: int, optimizer_bytes: int
) -> dict[Kind, int]:
    """Return host memory with this phase's offloads: frozen models, states of the optimizer."""
    offloads_rollout = phase in ENGINE_AWAKE and memory.offload_during_rollout
    if offloads_rollout:
        host = {**host, Kind.OPTIMIZER: host.get(Kind.OPTIMIZER, 0) + optimizer_bytes}
    if memory.offload_frozen_models or (offloads_rollout and phase != "reward"):
        host = {**host, Kind.FROZEN: frozen}
    return host
