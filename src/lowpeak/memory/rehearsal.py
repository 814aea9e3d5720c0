"""A rehearsal: the phases of a step run with their own code on fake tensors, and say what each would take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.algorithms import Algorithm
from lowpeak.memory.storage_meter import StorageMeter
from lowpeak.parallel import Pretended, Strategy, layouts_apart, make_mesh, prepare, pretended_ranks
from lowpeak.records import MicroBatch
from lowpeak.training import Core, run_step, score

_FUSED_ADAMW = partial(torch.optim.AdamW, fused=True)  # transformers' default


@dataclass(frozen=True)
class Rehearsed:
    """Bytes of tensors on one rank: `loaded` before any phase, then the most alive in each; all contain the model's."""

    loaded: int
    score: int
    forward: int
    backward: int
    optimizer: int

    @property
    def train(self) -> int:
        return max(self.forward, self.backward)


def rehearse(
    make_model: Callable[[], nn.Module],
    micro_batches: Sequence[MicroBatch],
    algorithm: Algorithm,
    core: Core,
    *,
    world_size: int = 1,
    compute: torch.dtype | None = None,
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _FUSED_ADAMW,
    max_grad_norm: float = 1.0,
) -> Rehearsed:
    """Return the peak of each phase of a step on rank 0 of `world_size` (FSDP2; one rank is one device), with no weight anywhere.

    A first step makes the optimizer's states; then `score`, `run_step`, clipping and the optimizer count. They run under
    FakeTensorMode on the model that `make_model` gives, with its head installed (and made inside, where it takes no memory).
    `micro_batches` are this rank's, packed outside; `compute` is torch.bfloat16 where a run has `bf16=True`.

    Counted: every storage that an operation gives out, in blocks of 512 bytes: weights, shards and what is gathered of them,
    activations, gradients, the optimizer's states. Not counted: what an operation takes inside itself, an allocator's
    fragments, the process with its libraries and communicators (a constant of a run), and a reference model. Kernels are those
    of CPU devices. Padded rows get a mask that transformers leaves out of a real forward, once it has read that nothing is
    packed: some MB a micro-batch more than real. Differences between phases agree with two real ranks (tests/distributed).

    Raises ArgumentError in a process that is connected to other ranks, and torch's DataDependentOutputException where a
    phase reads a tensor's value.
    """
    with pretended_ranks(world_size):
        mesh = make_mesh()
        with FakeTensorMode(allow_non_fake_inputs=True), StorageMeter() as meter, layouts_apart(meter.paused):
            model = prepare(make_model().train(), mesh, compute)
            optimizer = make_optimizer(model.parameters())
            loaded = meter.live_bytes
            strategy = cast(Strategy, Pretended(meter.begin))

            def step() -> None:
                model.train()
                run_step(model, micro_batches, algorithm, core, strategy, algorithm.coefficients())
                meter.begin("optimizer")
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                meter.begin(None)

            step()  # makes the optimizer's states
            meter.peaks.clear()
            meter.begin("score")
            score(model.eval(), micro_batches, core)
            step()
    return Rehearsed(loaded, **meter.peaks)
