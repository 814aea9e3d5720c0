"""The teacher's pass of a step: hidden states of the step's micro-batches, once, before the first backward.

Only the last hidden states [T, E] of its passes stay, in host memory. The policy's head forms the teacher's logits from them,
chunk by chunk (see `logprobs/divergence.py`), so no log-probs of the teacher are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor, nn

from lowpeak.batching import masked_batch, pack_for_teacher
from lowpeak.heads import OwnStates, Teaching, eval_mode, teacher_head
from lowpeak.memory import AsyncHostMover, Phase, has_device_memory
from lowpeak.models import Reference
from lowpeak.parallel import is_sharded
from lowpeak.records import MicroBatch, Record
from lowpeak.training.guarded_passes import GuardedPasses
from lowpeak.training.run import Run, RunContext
from lowpeak.training.step import LogprobSettings, TeacherStates, score

logger = logging.getLogger(__name__)

_MEASURED_TOKENS = 16
_LEAST_MASS = 1e-3


def run_teacher(
    context: RunContext, batches: Sequence[MicroBatch], guard: GuardedPasses, records: Sequence[Record] = ()
) -> TeacherStates | None:
    """Run the run's teacher, if it has one, over a step's micro-batches; all ranks raise the error of one of them.

    `records` are those of all ranks' micro-batches.
    """
    run = context.run
    if run.algorithm.divergence is None:
        return None
    assert run.reference is not None, "a divergence has a teacher"
    of_teacher = batches_of_teacher(run, batches, records)
    guard.batches = batches  # a separate teacher's passes, which run without the guard, can be the first to fail
    with run.strategy.ranks.propagate_errors(), run.tracker.phase(Phase.SCORE):
        states = teacher_states(context.model_wrapped, run.reference, of_teacher, run.logprob_settings, guard)
        if context.state.global_step == 0 and batches:
            _warn_of_other_ids(states.of_batch(0, batches[0], run.logprob_settings.device), run.logprob_settings)
    return states


def batches_of_teacher(
    run: Run, batches: Sequence[MicroBatch], records: Sequence[Record]
) -> Sequence[Sequence[MicroBatch]]:
    """Return the teacher's micro-batches for each of the policy's: the same ones, unless it reads other prompts.

    The last one's are padded with masked micro-batches, so that every rank has the same number.
    """
    if all(record.teacher_prompt_ids is None for record in records):
        return [[batch] for batch in batches]
    found = [pack_for_teacher(records, batch, run.budget) for batch in batches]
    num_passes = sum(map(len, found))
    most = int(run.strategy.ranks.max([num_passes])[0])
    return [*found, [masked_batch(run.budget)] * (most - num_passes)]


def teacher_states(
    policy: nn.Module,
    teacher: Reference,
    batches: Sequence[Sequence[MicroBatch]],
    settings: LogprobSettings,
    guard: GuardedPasses | None = None,
) -> TeacherStates:
    """Return the teacher's states at the loss tokens of its micro-batches for each of the policy's, and its head.

    The head of a teacher that is sharded, or in host memory, is copied to the device for the step.
    """
    separate, num_ids, device = teacher.model, teacher.num_ids, settings.device
    mover = AsyncHostMover(device) if has_device_memory(device) else None
    with teacher.ready(), eval_mode(policy):
        # A separate model has no collectives, or runs in lockstep: its errors need no guard.
        passes = score(
            separate or policy,
            list(chain.from_iterable(batches)),
            settings,
            None if separate else guard,
            to_host=None if mover is None else mover.to_host,
            logprobs=False,
            states=True,
        )
        own: Callable[[Tensor], Teaching] = partial(OwnStates, num_ids=num_ids, with_adapters=teacher.with_adapters)
        add_head = own if separate is None else _held_head(separate, num_ids, device)
    remaining = iter(answer["states"] for answer in passes)
    return TeacherStates([list(islice(remaining, len(each))) for each in batches], add_head, mover)


@torch.no_grad()
def _warn_of_other_ids(teacher: Teaching, settings: LogprobSettings) -> None:
    """Warn if a separate teacher often chooses ids that the policy lacks, which divergences leave out."""
    if isinstance(teacher, OwnStates) or teacher.num_ids is None or not isinstance(teacher.head, Tensor):
        return
    if len(teacher.head) == teacher.num_ids:
        return
    some_NE = teacher.hidden_TE[:_MEASURED_TOKENS].to(teacher.head.dtype)
    logits_NW = teacher.scale.apply(nn.functional.linear(some_NE, teacher.head, teacher.bias_W)).float()
    mass = float((logits_NW / settings.temperature).softmax(-1)[:, teacher.num_ids :].sum(-1).mean())
    if mass > _LEAST_MASS:
        logger.warning(
            "The teacher gives %.2g of its probability to ids from %d on, which the policy lacks: it is compared without them.",
            *(mass, teacher.num_ids),
        )


def _held_head(model: nn.Module, num_ids: int | None, device: torch.device) -> Callable[[Tensor], Teaching]:
    """Return what makes a teacher of states with a head that stays on the device after the block of `ready()`."""
    head = teacher_head(model, torch.empty(0), num_ids)
    if isinstance(head.head, Tensor):
        copies = is_sharded(model)
        bias = None if head.bias_W is None else head.bias_W.to(device, copy=copies)
        head = replace(head, head=head.head.to(device, copy=copies), bias_W=bias)
    return lambda states_TE: replace(head, hidden_TE=states_TE)
