"""The time of a step by a cost model: arithmetic, memory bandwidth, and the volumes that devices send each other.

A model, not a measurement: it ranks configurations of one run on one machine. A journal of a similar run calibrates it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowpeak.memory import Kind
from lowpeak.parallel import SHARDINGS, Reduces, Sharding
from lowpeak.plan.computed import BF16_BYTES, casts_weights, copied_for_rollout, engine_memory, serves_adapters
from lowpeak.plan.hardware import Card, Machine
from lowpeak.plan.planned_batches import longest_record, reference_batches

# Shares of the data sheets' numbers that kernels of a step reach.
FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.6
LINK_SHARE = 0.7
_FLOPS_RANGE, _BANDWIDTH_RANGE, _LINK_RANGE = (0.25, 0.55), (0.4, 0.8), (0.5, 0.85)  # of these shares
# Of the shorter of computation and communication: what does not overlap.
_EXPOSED = 0.2
# Seconds of a layer's forward, however few tokens it has: 41 kernels of a decode step (benchmarks/decode_launches.py) at 5.6 ms of
# host time for 24 layers, and 2 to 2.5 us for each launch, are 0.33 to 0.4 ms. No GPU has confirmed it.
_LAYER_LATENCY = {"cuda": 3.6e-4, "cpu": 3e-4}
_GRAPH_LATENCY = 1.3e-4  # of a layer in a CUDA graph, as vLLM decodes: a third of it; not confirmed either
_COLLECTIVE_LATENCY = 3e-5  # seconds of a collective inside a host, however small
_FP32_BYTES = 4


@dataclass(frozen=True)
class Work:
    """What one device computes for a step (under tensor parallelism its whole group), and how its run is placed.

    parameters, trained        of the model
    active_parameters          that one token uses: fewer in a mixture of experts
    teacher_parameters         that one token uses of a teacher; 0 without one
    teacher_tokens             that a teacher reads of a step
    layers, hidden, kv_bytes   of the model; `kv_bytes` are of one token, on average over a sequence
    prompt, completion         tokens of a sequence
    train_tokens               tokens of the device's micro-batches in a step
    score_tokens, score_passes tokens of its scoring passes of a rollout, and their number
    sequences, prompts         that its engine generates for a rollout
    slots                      sequences that decode together
    engine_parallel            devices of one engine
    rollout_bytes              that a rollout copies between device and host: offloaded models and states, an engine that sleeps
    activation_bytes           of a step's activations that passes copy to host memory, and back
    num_batches                micro-batches of a step
    steps                      steps that a rollout serves
    checkpointing              whether activations are recomputed
    sharding, tensor_parallel  of the trainer
    gathered_share             of the weights, which stays gathered in a rollout
    update_bytes               that an optimizer step reads and writes
    host_bytes                 that it copies between device and host
    in_bf16                    whether passes compute in bf16, as they do on every GPU
    has_graphs                 whether the engine decodes by CUDA graphs
    casts_weights              whether it casts fp32 weights for each token
    gradient_bytes             bytes of a gradient that replicas average
    pushed_bytes               of weights that a rollout begins with, to servers
    overlaps                   whether the policy trains while rollouts are generated
    """

    parameters: int
    trained: int
    active_parameters: int
    layers: int
    hidden: int
    kv_bytes: int
    prompt: int
    completion: int
    train_tokens: int
    score_tokens: int
    score_passes: int
    sequences: int
    prompts: int
    slots: int
    num_batches: int
    steps: int
    checkpointing: bool
    sharding: Sharding = SHARDINGS["single"]
    tensor_parallel: int = 1
    gathered_share: float = 1.0
    update_bytes: int = 0
    host_bytes: int = 0
    in_bf16: bool = True
    gradient_bytes: int = 2
    engine_parallel: int = 1
    rollout_bytes: int = 0
    activation_bytes: int = 0
    has_graphs: bool = False
    casts_weights: bool = False
    teacher_parameters: int = 0
    teacher_tokens: int = 0
    pushed_bytes: int = 0
    overlaps: bool = False

    @property
    def score_batches(self) -> int:
        """Micro-batches of a rollout's scoring pass, of as many tokens as those of a step."""
        return -(-self.score_tokens * self.num_batches // max(1, self.train_tokens))


def step_seconds(work: Work, machine: Machine) -> dict[str, float]:
    """Return the seconds of a step by phase; those of a rollout are divided by the steps that it serves."""
    push = work.pushed_bytes / (LINK_SHARE * min(machine.card.link, machine.network))
    return {
        **({"sync": push / work.steps} if push else {}),
        "rollout": _rollout(work, machine) / work.steps,
        "score": _score(work, machine) / work.steps + _teacher_seconds(work, machine),
        "train": _train(work, machine),
        "optimizer": _optimizer(work, machine),
    }


def total_seconds(seconds: Mapping[str, float], *, overlaps: bool) -> float:
    """Return the sum of a step's phases; with rollouts ahead max(rollout, all others) + sync."""
    if not overlaps:
        return sum(seconds.values())
    rollout, push = seconds["rollout"], seconds.get("sync", 0.0)
    return max(rollout, sum(seconds.values()) - rollout - push) + push


def seconds_range(work: Work, machine: Machine) -> tuple[float, float]:
    """Return the least and the most seconds of a step, over the shares of a data sheet's numbers that no GPU has confirmed."""
    seconds = []
    for number in (1, 0):
        flops, bandwidth = _FLOPS_RANGE[number] / FLOPS_SHARE, _BANDWIDTH_RANGE[number] / BANDWIDTH_SHARE
        scaled = scale_machine(machine, flops, bandwidth, _LINK_RANGE[number] / LINK_SHARE)
        seconds.append(total_seconds(step_seconds(work, scaled), overlaps=work.overlaps))
    return seconds[0], seconds[1]


def scale_machine(machine: Machine, flops: float, bandwidth: float, link: float, latency: float = 1.0) -> Machine:
    """Return the machine with its speeds, and the time that kernels take to start, times these factors."""
    card = machine.card
    scaled = replace(card, flops=flops * card.flops, bandwidth=bandwidth * card.bandwidth)
    scaled = replace(scaled, link=link * card.link, host_link=link * card.host_link)
    return replace(machine, card=scaled, network=link * machine.network, latency=latency * machine.latency)


def _rollout(work: Work, machine: Machine) -> float:
    if not work.sequences:
        return 0.0
    card, parts = machine.card, work.engine_parallel
    flops, bandwidth = _flops(work, machine), BANDWIDTH_SHARE * card.bandwidth
    prefill = 2 * work.active_parameters / parts * work.prompts * work.prompt / flops
    slots = max(1, min(work.slots, work.sequences))
    waves = -(-work.sequences // slots)
    weights = (BF16_BYTES if work.in_bf16 else _FP32_BYTES) * work.parameters / parts
    if work.casts_weights:  # reads fp32, and writes and reads bf16
        weights *= 4
    cache = slots * work.kv_bytes / parts * (work.prompt + work.completion / 2)
    gather = _gathered_bytes(work, machine) / _link(machine, work.sharding)
    gathers = (1 - work.gathered_share) * gather
    token = max((weights + cache) / bandwidth, 2 * work.active_parameters / parts * slots / flops)
    sums = 2 * work.layers * _COLLECTIVE_LATENCY if parts > 1 else 0.0
    copies = work.rollout_bytes / (LINK_SHARE * card.host_link)
    latency = work.layers * machine.latency * _LAYER_LATENCY[machine.device]
    if work.has_graphs and machine.device == "cuda":
        latency = work.layers * machine.latency * _GRAPH_LATENCY
    # What stays gathered is gathered once.
    return copies + gather + prefill + waves * work.completion * (max(token, latency) + gathers + sums)


def _flops(work: Work, machine: Machine) -> float:
    card = machine.card
    return FLOPS_SHARE * (card.flops if work.in_bf16 or card.fp32_flops is None else card.fp32_flops)


def _score(work: Work, machine: Machine) -> float:
    flops = 2 * work.active_parameters / work.tensor_parallel * work.score_tokens * work.score_passes
    computing = flops / _flops(work, machine)
    gathers = work.score_passes * work.score_batches
    return _overlapped(computing, gathers * _gathered_bytes(work, machine) / _link(machine, work.sharding))


def _teacher_seconds(work: Work, machine: Machine) -> float:
    """Return the seconds of a teacher's pass over the tokens of a step."""
    return 2 * work.teacher_parameters * work.teacher_tokens / _flops(work, machine)


def _train(work: Work, machine: Machine) -> float:
    factor = 2 + (4 if work.trained > 0.5 * work.parameters else 2) + (2 if work.checkpointing else 0)
    flops = factor * work.active_parameters / work.tensor_parallel * work.train_tokens
    passes = 3 + work.checkpointing  # a backward has two forwards' kernels
    latency = work.num_batches * passes * work.layers * machine.latency * _LAYER_LATENCY[machine.device]
    products = flops / _flops(work, machine)
    # A GPU starts kernels while others run; a CPU does one after the other.
    computing = latency + products if machine.device == "cpu" else max(latency, products)
    sending = _sent_bytes(work, machine) / _link(machine, work.sharding)
    both = computing + sending if work.sharding.reduces is Reduces.AT_END else _overlapped(computing, sending)
    copies = 2 * work.activation_bytes / (LINK_SHARE * machine.card.host_link)
    return _overlapped(both, copies) + _tensor_sums(work, machine) + _replica_sums(work, machine)


def _sent_bytes(work: Work, machine: Machine) -> float:
    """Return what a device sends in a step's passes: gathers of weights, and reductions of gradients."""
    world = machine.num_devices // work.tensor_parallel
    part = (world - 1) / world
    gradients = BF16_BYTES * work.trained / work.tensor_parallel * part
    if work.sharding.sends_weights(world):
        return work.num_batches * (2 * _gathered_bytes(work, machine) * part + gradients)
    if work.sharding.resends_weights:
        return work.num_batches * gradients + BF16_BYTES * work.trained * part
    return 0.0 if world == 1 else 2 * work.gradient_bytes * work.trained * part


def _tensor_sums(work: Work, machine: Machine) -> float:
    """Return the seconds of tensor parallelism's sums: two in each layer's forward, two in its backward, on the critical path."""
    if work.tensor_parallel == 1:
        return 0.0
    part = 2 * (work.tensor_parallel - 1) / work.tensor_parallel
    passes = 6 if work.checkpointing else 4
    num_bytes = passes * work.layers * work.train_tokens * work.hidden * BF16_BYTES * part
    latency = work.num_batches * passes * work.layers * _COLLECTIVE_LATENCY
    return latency + num_bytes / (LINK_SHARE * machine.card.link)


def _replica_sums(work: Work, machine: Machine) -> float:
    """Return the seconds in which hosts with a copy each sum the gradients of their shards, in each micro-batch."""
    if work.sharding.copies != "per host":
        return 0.0
    shard = BF16_BYTES * work.trained / machine.devices_on_host
    part = 2 * (machine.num_hosts - 1) / machine.num_hosts
    return work.num_batches * shard * part / (LINK_SHARE * machine.network)


def _optimizer(work: Work, machine: Machine) -> float:
    """Return the seconds of an update: memory that is read and written, and copies to host memory and back."""
    updating = 2 * work.update_bytes / (BANDWIDTH_SHARE * machine.card.bandwidth)
    return updating + work.host_bytes / (LINK_SHARE * machine.card.host_link)


def _gathered_bytes(work: Work, machine: Machine) -> float:
    """Return the bytes of all bf16 weights, or of a tensor parallel device's part, if a pass gathers them."""
    gathers = work.sharding.sends_weights(machine.num_devices // work.tensor_parallel)
    return BF16_BYTES * work.parameters / work.tensor_parallel if gathers else 0.0


def _link(machine: Machine, sharding: Sharding) -> float:
    """Return bytes per second between devices: the slowest link of a ring over those with one copy."""
    crosses = sharding.crosses_hosts(machine.num_hosts)
    return LINK_SHARE * (min(machine.card.link, machine.network) if crosses else machine.card.link)


def _overlapped(computing: float, sending: float) -> float:
    return max(computing, sending) + _EXPOSED * min(computing, sending)


def make_work(inputs: Any, batches: Sequence[Any]) -> Work:
    """Return the work of rank 0 in a planned run; under tensor parallelism that of its whole group."""
    text, settings = inputs.config.get_text_config(), inputs.settings
    counts, request = inputs.counts, inputs.request
    parts = request.tensor_parallel
    prompt, completion = request.prompt_tokens, inputs.completion_tokens
    cache_dtype = torch.bfloat16 if inputs.args.bf16 else torch.float32
    kv_bytes = parts * inputs.sequence_bytes(prompt + completion, cache_dtype) // (prompt + completion)
    passes = _scoring_passes(inputs)
    teacher_parameters, teacher_tokens = _teacher_work(inputs)
    scored = inputs.sequences_of_rank if inputs.is_online else -(-inputs.rows_per_step // inputs.request.world_size)
    engine = engine_memory(inputs)
    sequences = math.ceil(inputs.generated_share * inputs.sequences_of_rank * engine.ranks)
    slots = sequences
    if engine.cache_bytes is not None:
        slots = engine.parallel * engine.cache_bytes // (kv_bytes * (prompt + completion))
    return Work(
        parameters=parts * counts.total,
        trained=parts * counts.trained,
        active_parameters=parts * counts.active,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        kv_bytes=kv_bytes,
        prompt=prompt,
        completion=completion,
        train_tokens=sum(batch.input_ids_BL.numel() for batch in batches),
        score_tokens=scored * longest_record(inputs) if passes else 0,
        score_passes=passes,
        teacher_parameters=teacher_parameters,
        teacher_tokens=teacher_tokens,
        sequences=sequences,
        prompts=-(-sequences // settings.sampling.num_generations) if inputs.is_online else 0,
        slots=max(1, slots),
        num_batches=len(batches),
        steps=settings.rollout.num_steps if inputs.is_online else 1,
        checkpointing=inputs.args.checkpoints_activations,
        sharding=request.sharding,
        tensor_parallel=parts,
        in_bf16=_computes_in_bf16(inputs),
        gradient_bytes=_gradient_bytes(inputs.storage),
        engine_parallel=engine.parallel,
        has_graphs=engine.has_graphs,
        pushed_bytes=_pushed_bytes(inputs),
        overlaps=inputs.is_online and inputs.settings.max_staleness > 0,
    )


def _pushed_bytes(inputs: Any) -> int:
    """Return the bf16 bytes that servers get for a rollout: all weights, or those of an adapter."""
    vllm = inputs.settings.vllm if inputs.is_online else None
    if vllm is None or inputs.colocated is not None:
        return 0
    counts: int = inputs.counts.trained if serves_adapters(inputs) else inputs.counts.total
    return BF16_BYTES * inputs.request.tensor_parallel * counts


def _scoring_passes(inputs: Any) -> int:
    """Return how often a completion of a rollout, or of an offline run's step, is scored."""
    if inputs.frees_reference:
        return 0
    needs = inputs.scoring_needs
    # Of mismatched pairs the reference scores two completions of each prompt.
    return bool(needs & {"old", "entropy", "values"}) + ("reference" in needs) * (1 + inputs.scores_mismatched)


def _teacher_work(inputs: Any) -> tuple[int, int]:
    """Return the parameters that one token uses of a teacher, and the tokens that it reads of a step; zeros without one."""
    if inputs.algorithm.divergence is None:
        return 0, 0
    return inputs.reference_counts.active, sum(batch.input_ids_BL.numel() for batch in reference_batches(inputs))


def _computes_in_bf16(inputs: Any) -> bool:
    """Return whether a planned run's passes compute in bf16: by autocast, or on bf16 weights of a storage format."""
    return bool(inputs.request.machine.device == "cuda" or inputs.args.bf16 or inputs.storage is not None)


def _gradient_bytes(storage: Any) -> int:
    """Return the bytes of a gradient that replicas average."""
    return 4 if storage is None else int(storage.gradient_bits) // 8


def add_planned_bytes(work: Work, plan: Any, gather_budget: int) -> Work:
    """Return the work with the bytes that a plan knows: those of an update, of copies, and how much stays gathered."""
    held, host = plan.phases["optimizer"].device, plan.phases["forward"].host
    update = sum(held.get(kind, 0) for kind in (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER))
    rollout = plan.phases.get("rollout")
    share = 1.0
    gathered = _gathered_bytes(work, plan.request.machine)
    if rollout is not None and gathered and plan.inputs.settings.vllm is None:
        share = min(1.0, gather_budget / gathered)
    activations = host.get(Kind.ACTIVATIONS, 0) * work.num_batches
    return replace(
        work,
        update_bytes=update,
        host_bytes=max(0, plan.to_host + plan.to_device - 2 * activations),
        gathered_share=share,
        activation_bytes=activations,
        casts_weights=rollout is not None and casts_weights(plan.inputs) and not rollout.device.get(Kind.GATHERED),
        rollout_bytes=0 if rollout is None else copied_for_rollout(plan.inputs, plan.phases, work.score_batches),
    )


def calibration(rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, float]) -> dict[str, float]:
    """Return measured over predicted seconds of each phase, of a journal's steps after the first."""
    factors = {}
    for phase, seconds in predicted.items():
        measured = [float(row[key]) for row in rows[1:] if (key := f"time/{phase}") in row and row[key] is not None]
        if measured and seconds > 0:
            factors[phase] = statistics.median(measured) / seconds
    return factors


def measure_cpu() -> Card:
    """Return this host's CPU as a card, by short measurements: products in bf16 and fp32, and a copy."""
    fp32, bf16 = (_measure_flops(dtype) / FLOPS_SHARE for dtype in (torch.float32, torch.bfloat16))
    source = torch.rand(1 << 23)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    # The model takes shares of a data sheet's numbers, and these are reached.
    return Card(0, bf16, bandwidth / BANDWIDTH_SHARE, bandwidth / 4, bandwidth, fp32)


def _measure_flops(dtype: torch.dtype, size: int = 1024) -> float:
    left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
    torch.mm(left, right)
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right))


def _seconds(call: Any) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best
