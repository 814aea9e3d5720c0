"""Rehearsal of a run's phases on fake tensors, to learn the peak memory of each.

The phases run with the real code. Fake tensors have shapes and dtypes and no memory, and a fake process group stands
for the other ranks, so a step of any model on any number of ranks can be rehearsed on one CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from lowpeak.algorithms import Algorithm
from lowpeak.arguments import ModelSettings
from lowpeak.heads import causal_lm, eval_mode, is_peft, keep_critic_trainable
from lowpeak.memory import ActivationOffload, Kind, PhaseMemories, PhaseMemory
from lowpeak.models import Reference, convert_trainable
from lowpeak.optim import find_sum
from lowpeak.parallel import (
    AVERAGE_BYTES,
    Strategy,
    clip_grad_norm,
    shard_layers,
    torch_training_state,
    trained_parameters,
)
from lowpeak.plan.rehearsal.cpu_scratch import CpuScratch
from lowpeak.plan.rehearsal.fake_ranks import (
    FakeStrategy,
    fake_process_group,
    gather_on_fake_ranks,
    initialize_shards,
    make_mesh,
    prepare_like_accelerate,
    split_like_transformers,
    tag_fsdp_memory,
    wrap_shape_propagation,
)
from lowpeak.plan.rehearsal.rehearsal_inputs import RehearsalInputs, RehearsedRollout
from lowpeak.plan.rehearsal.rehearsed_host import (
    RehearsedHost,
    RehearsedMover,
    create_states,
    groups_by_mesh,
    rehearse_compact_adamw,
)
from lowpeak.plan.rehearsal.rollout import rehearse_decoding
from lowpeak.plan.rehearsal.storage_meter import CUDA_BLOCK, StorageMeter, run_methods_inside
from lowpeak.records import MicroBatch
from lowpeak.rollout.native import weight_copies
from lowpeak.training import TeacherStates, run_step, score, teacher_states


@dataclass(frozen=True)
class Rehearsal:
    """Peak memory of one rank by phase: load, sync, rollout, reward, score, forward, backward, optimizer.

    "load" and "sync" are what is in memory before the first step, and between two steps. Phases that the run lacks are omitted.
    The optimizer copies `to_host` and `to_device` bytes to host memory and back in a step. The rehearsed
    micro-batches copy `batches_to_host` and `batches_to_device`: gradients and activations. `moments` of a phase are
    those that may be its peak in a deeper model, or on more ranks. A token's states of a teacher are `teacher_token_bytes`.
    """

    phases: Mapping[str, PhaseMemory] = field(default_factory=dict)
    to_host: int = 0
    to_device: int = 0
    batches_to_host: int = 0
    batches_to_device: int = 0
    moments: Mapping[str, Sequence[Mapping[Kind, int]]] = field(default_factory=dict)
    teacher_token_bytes: int = 0

    def extended(self, others: Sequence[tuple[Rehearsal, int, int]]) -> Rehearsal:
        """Return self + the sum of (other - self) * times / divisor by kind of bytes; a phase has its largest moment."""
        found, kinds = [other for other, _, _ in others], partial(_on_line, [(n, of) for _, n, of in others])
        phases = {
            name: PhaseMemory(
                kinds(phase.device, *(other.phases[name].device for other in found)),
                kinds(phase.host, *(other.phases[name].host for other in found)),
            )
            for name, phase in self.phases.items()
        }
        moments: dict[str, Sequence[Mapping[Kind, int]]] = {}
        for name, mine in self.moments.items():
            # Of the last times of a phase, if one of them ran it more often.
            each = zip(*map(reversed, (mine, *(other.moments[name] for other in found))), strict=False)
            moments[name] = [kinds(*same) for same in each][::-1]
            phases[name] = replace(phases[name], device=max(moments[name], key=lambda each: sum(each.values())))
        copies = kinds(*(_copies(each) for each in (self, *found)))
        return replace(self, phases=phases, moments=moments, **copies)

    def with_largest_passes(self) -> PhaseMemories:
        """Return the phases, each at its moment with most bytes besides weights, gradients and states."""
        phases = dict(self.phases)
        for name, moments in self.moments.items():
            phases[name] = replace(phases[name], device=max(moments, key=_pass_bytes))
        return phases

    def peak(self, *names: str) -> int:
        """Return the highest peak of these phases on the device; 0 for phases that the run does not have."""
        return max(self.phases[name].peak if name in self.phases else 0 for name in names)


def _on_line(steps: Sequence[tuple[int, int]], low: Mapping[Any, int], *highs: Mapping[Any, int]) -> dict[Any, int]:
    kinds = low.keys() | {kind for high in highs for kind in high}
    lines = [(high, *each) for high, each in zip(highs, steps, strict=True)]
    return {
        kind: low.get(kind, 0) + sum((high.get(kind, 0) - low.get(kind, 0)) * n // of for high, n, of in lines)
        for kind in kinds
    }


def _copies(found: Rehearsal) -> dict[str, int]:
    names = ("to_host", "to_device", "batches_to_host", "batches_to_device")
    return {name: getattr(found, name) for name in names}


def _pass_bytes(kinds: Mapping[Kind, int]) -> int:
    return sum(kinds.get(kind, 0) for kind in (Kind.ACTIVATIONS, Kind.LOGITS, Kind.KV_CACHE))


def rehearse(inputs: RehearsalInputs) -> Rehearsal:
    """Return the peak of each phase of a step on rank 0.

    Counted is every storage that an operation returns, in the blocks of the device: weights, shards, gathered layers,
    activations, gradients, optimizer states. Not counted are other temporaries inside an operation, fragmentation, and the
    process with its libraries and communicators. Kernels are those of CPU devices. A real forward drops the mask of padded rows.

    ArgumentError in a process that is connected to other ranks; torch's DataDependentOutputException if a phase reads values.
    """
    with fake_process_group(inputs.mesh_shape.world_size), ExitStack() as stack:
        shape = inputs.mesh_shape
        mesh = make_mesh(shape.shards, shape.replicas, shape.parts)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        counts = (CUDA_BLOCK,) if inputs.device == "cuda" else (1, CpuScratch())
        meter = stack.enter_context(StorageMeter(*counts))
        stack.enter_context(wrap_shape_propagation(meter.paused))
        # It reads ranks from real tensors.
        stack.enter_context(run_methods_inside(DeviceMesh, {"__init__": unset_fake_temporarily}))
        stack.enter_context(tag_fsdp_memory(meter.counting_as))
        meter.begin("load", Kind.WEIGHTS)
        stage = _Stage(meter, inputs, mesh)
        stage.load_frozen()
        optimizer = stage.make_optimizer()
        meter.begin(None)
        load = meter.live.copy()
        initialize_shards(stage.model)
        if inputs.updates:
            with meter.counting_as(Kind.OPTIMIZER):
                create_states(optimizer, stage.trained)
        meter.peaks = {"load": load, "sync": meter.live.copy()}
        stage.run_rollout()
        if inputs.updates and inputs.mesh_shape.parts > 1:
            stage.save(optimizer)
        host = stage.host
        host.count_copies_from_here()
        stage.train(inputs.micro_batches)
        if inputs.updates:
            stage.update(optimizer)
    phases = {name: PhaseMemory(dict(meter.peaks[name]), host.of_phase(name)) for name in _ORDER if name in meter.peaks}
    moments = {name: meter.moments[name] for name in phases.keys() & meter.moments.keys() - {"load"}}
    copies = (host.to_host, host.to_device, host.batches_to_host, host.batches_to_device)
    return Rehearsal(phases, *copies, moments, stage.teacher_token_bytes)


_ORDER = ("load", "sync", "rollout", "reward", "score", "forward", "backward", "optimizer", "save")


class _Stage:
    """The models of a rehearsal, on the meter."""

    def __init__(self, meter: StorageMeter, inputs: RehearsalInputs, mesh: Any) -> None:
        self._meter, self._inputs, self._mesh = meter, inputs, mesh
        self._split = [partial(split_like_transformers, mesh)] if inputs.mesh_shape.parts > 1 else []
        self._core, storage = inputs.core, inputs.storage
        self.host = RehearsedHost(meter)
        self._reference: nn.Module | None = None
        self.rewards: list[Callable[[], object]] = []
        self.teacher_token_bytes = 0
        model = inputs.make_model(*self._split).train()
        if storage is not None:
            convert_trainable(model, ModelSettings(storage=storage))
        # A policy in bf16 is trained without autocast (trainers/constructor.py).
        is_bf16 = all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
        self._compute = None if is_bf16 else inputs.compute
        self._unprepared = model
        if inputs.activation_offloading:
            offload = ActivationOffload(model, cast(Any, RehearsedMover(self.host)))
            self._core = replace(inputs.core, activation_context=offload.saving)
        self.model = prepare_like_accelerate(model, None if self._split else mesh, self._compute)
        self._strategy = cast(Strategy, FakeStrategy(meter.begin, inplace=mesh is None))
        head = causal_lm(model).get_output_embeddings()
        if head is not None:
            self._tag_head(head)

    def load_frozen(self) -> None:
        with self._meter.counting_as(Kind.FROZEN):
            if self._inputs.make_reference is not None:
                self._reference = self._frozen(self._inputs.make_reference(*self._split))
            for reward in self._inputs.rewards:
                model = self._frozen(reward.make_model())
                ids_BL = torch.zeros(reward.shape, dtype=torch.int64)
                self.rewards.append(partial(self._compute_rewards, model, ids_BL))

    def _frozen(self, model: nn.Module) -> nn.Module:
        model = model.requires_grad_(False).eval()
        return model if self._mesh is None or self._split else shard_layers(model, self._mesh, False)

    @torch.no_grad()
    def _compute_rewards(self, model: nn.Module, ids_BL: Tensor) -> None:
        with self._ready(model):
            model(input_ids=ids_BL, attention_mask=torch.ones_like(ids_BL), use_cache=False)

    @contextmanager
    def _ready(self, model: nn.Module) -> Iterator[None]:
        """Gather a frozen model's head, and let it compute in the policy's dtype."""
        computes = torch.autocast("cpu", self._compute, cache_enabled=False, enabled=self._compute is not None)
        with computes, self._gathered(model, 0, gather_head=True):
            yield

    @contextmanager
    def _gathered(self, model: nn.Module, budget: int, gather_head: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            with self._meter.counting_as(Kind.GATHERED):
                if self._mesh is not None:
                    stack.enter_context(gather_on_fake_ranks(model, self._compute, budget, gather_head))
                else:
                    stack.enter_context(weight_copies(model, self._compute, budget))
            yield

    def make_optimizer(self) -> Any:
        named, storage, shape = trained_parameters(self.model), self._inputs.storage, self._inputs.mesh_shape
        if storage is None:
            optimizer: Any = self._inputs.make_optimizer(groups_by_mesh(named.values()))
        else:
            optimizer = rehearse_compact_adamw(
                named, storage, self.host, replicated=shape.shards == 1 and shape.replicas > 1
            )
        self.trained = list(named.values())
        self._meter.before_snapshot = self._tag_gradients
        if shape.shards == 1 and shape.replicas > 1:
            with self._meter.counting_as(Kind.BUCKETS):
                self._average = torch.empty(AVERAGE_BYTES, dtype=torch.uint8)
        return optimizer

    def _tag_gradients(self) -> None:
        # Hooks of the parameters would tell in time, but then the head could not add its gradient in place.
        for parameter in self.trained:
            found = find_sum(parameter)
            gradient: Any = parameter.grad if found is None else found.total()
            if gradient is not None:
                self._meter.retag(getattr(gradient, "_local_tensor", gradient), Kind.GRADIENTS)

    def _tag_head(self, head: nn.Module) -> None:
        inside = ExitStack()

        def enter(*_: Any) -> None:
            inside.enter_context(self._meter.counting_as(Kind.LOGITS))

        head.register_forward_pre_hook(enter)
        head.register_forward_hook(lambda *_: inside.close(), always_call=True)

    def run_rollout(self) -> None:
        """Generate, reward and score, as far as the run does."""
        inputs = self._inputs
        if inputs.rollout is not None:
            self.generate(inputs.rollout)
        for reward in self.rewards:
            self._meter.begin("reward")
            reward()
        if inputs.algorithm.needs:
            self._meter.begin("score")
            self.score(inputs.algorithm, inputs.micro_batches if inputs.scored is None else inputs.scored)
        self._meter.begin(None)

    def generate(self, rollout: RehearsedRollout) -> None:
        """Decode with the policy; a sharded one is gathered within the rollout's budget."""
        self._meter.begin("rollout")
        with torch.no_grad(), eval_mode(self.model), self._gathered(self.model, rollout.gather_budget):
            engine = (rollout.prompts, rollout.sampling, rollout.kv_cache_bytes)
            rehearse_decoding(self.model, *engine, self._meter, rollout.has_graphs)
        self._meter.begin(None)

    def train(self, batches: Sequence[MicroBatch]) -> None:
        algorithm = self._inputs.algorithm
        self.model.train()
        teacher = self._run_teacher(batches) if algorithm.divergence is not None else None
        run_step(self.model, batches, algorithm, self._core, self._strategy, algorithm.coefficients(), None, teacher)
        self._meter.begin(None)

    def _run_teacher(self, batches: Sequence[MicroBatch]) -> TeacherStates:
        """Run the teacher over a step's micro-batches; its states are in host memory afterwards, a CPU's device memory."""
        separate, policy, read = self._reference, cast(Any, self._unprepared), self._inputs.reference_batches
        ready = policy.disable_adapter if is_peft(policy) else nullcontext
        if separate is not None:
            ready = partial(self._ready, separate)
        self._meter.begin("score")
        found = teacher_states(self.model, Reference(separate, ready), batches if read is None else read, self._core)
        self._meter.begin(None)
        (like_TE,), is_host = found.states[0], self._inputs.device == "cpu"
        self.teacher_token_bytes = like_TE.shape[1] * like_TE.itemsize
        with nullcontext() if is_host else self._meter.paused():
            # As a run has them: of a micro-batch together, or of each sequence if the teacher has read other micro-batches.
            with unset_fake_temporarily():
                lengths = [[len(b.targets_T)] if read is None else [0, *b.tokens.counts()] for b in batches]
            states = [[like_TE.new_empty(length, like_TE.shape[1]) for length in of_batch] for of_batch in lengths]
        add_head = found.add_head
        return TeacherStates(states, add_head if is_host else lambda states_TE: add_head(states_TE.clone()))

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        max_grad_norm = self._inputs.max_grad_norm
        self._meter.begin("optimizer", Kind.OPTIMIZER)
        if self._inputs.storage is None and not self._split:  # torch's function does not mix DTensors and tensors
            nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        else:
            clip_grad_norm(self.model.parameters(), max_grad_norm, self._core.device)
        optimizer.step()
        optimizer.zero_grad()
        self._meter.begin(None)

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the training state: saving copies tensors that are sharded by columns."""
        self._meter.begin("save", Kind.BUCKETS)
        with unset_fake_temporarily():  # DTensor computes offsets with tensors, and reads them
            torch_training_state(trained_parameters(self.model), optimizer)
        self._meter.begin(None)

    def score(self, algorithm: Algorithm, batches: Sequence[MicroBatch]) -> None:
        needs, model = algorithm.needs, self.model.eval()
        if needs & {"old", "entropy", "values"}:
            requested: dict[str, Any] = {"entropy": "entropy" in needs, "values": "values" in needs}
            score(model, batches, self._core, **requested, logprobs=bool(needs & {"old", "entropy"}))
        if "reference" not in needs:
            return
        batches = batches if self._inputs.reference_batches is None else self._inputs.reference_batches
        if self._reference is not None:
            with self._ready(self._reference):
                score(self._reference, batches, self._core)
        elif is_peft(self._unprepared):
            with keep_critic_trainable(self._unprepared), cast(Any, self._unprepared).disable_adapter():
                score(model, batches, self._core)
        else:
            score(model, batches, self._core)
