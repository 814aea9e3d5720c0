"""The teacher's pass of a step: hidden states of the step's micro-batches, once, before the first backward.

Only the last hidden states [T, E] of its passes stay, in host memory. The policy's head forms the teacher's logits from them,
chunk by chunk (see `logprobs/divergence.py`), so no log-probs of the teacher are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from lowpeak.heads import SameHeadStates, Teaching, eval_mode, teacher_head
from lowpeak.memory import AsyncHostMover, Phase, has_device_memory
from lowpeak.models import Reference
from lowpeak.parallel import is_sharded
from lowpeak.records import Group, MicroBatch, Prompt, Record
from lowpeak.training.guarded_passes import GuardedPasses
from lowpeak.training.rollout import pack_for_teacher
from lowpeak.training.run import RunContext
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
    read = pack_for_teacher(run, batches, records)
    guard.batches = read  # a separate teacher's passes, which run without the guard, can be the first to fail
    with run.strategy.ranks.propagate_errors(), run.tracker.phase(Phase.SCORE):
        states = teacher_states(context.model_wrapped, run.reference, read, run.logprob_settings, guard)
        if read is not batches:
            states = _group_states(states, read, batches)
        if context.state.global_step == 0 and batches:
            _warn_of_other_ids(states.of_batch(0, batches[0], run.logprob_settings.device), run.logprob_settings)
    return states


def _group_states(states: TeacherStates, read: Sequence[MicroBatch], batches: Sequence[MicroBatch]) -> TeacherStates:
    """Return the states of the micro-batches `read` by sequence, in the order of `batches`."""
    by_record: dict[int, Tensor] = {}
    for (states_TE,), batch in zip(states.states, read, strict=True):
        by_record |= zip(
            batch.record_indices, states_TE.split(batch.tokens.counts()), strict=False
        )  # none of a masked one
    nothing = states.states[0][0][:0]
    return replace(states, states=[[nothing, *(by_record[i] for i in batch.record_indices)] for batch in batches])


def teacher_states(
    policy: nn.Module,
    teacher: Reference,
    batches: Sequence[MicroBatch],
    settings: LogprobSettings,
    guard: GuardedPasses | None = None,
) -> TeacherStates:
    """Return the teacher's head, and its states at each micro-batch's loss tokens.

    The head of a teacher that is sharded, or in host memory, is copied to the device for the step.
    """
    separate, num_ids, device = teacher.model, teacher.num_ids, settings.device
    mover = AsyncHostMover(device) if has_device_memory(device) else None
    with teacher.ready(), eval_mode(policy):
        # A separate model has no collectives, or runs in lockstep: its errors need no guard.
        passes = score(
            separate or policy,
            batches,
            settings,
            None if separate else guard,
            to_host=None if mover is None else mover.to_host,
            logprobs=False,
            states=True,
        )
        own: Callable[[Tensor], Teaching] = partial(
            SameHeadStates, num_ids=num_ids, with_adapters=teacher.with_adapters
        )
        add_head = own if separate is None else _held_head(separate, num_ids, device)
    return TeacherStates([[answer["states"]] for answer in passes], add_head, mover)


@torch.no_grad()
def _warn_of_other_ids(teacher: Teaching, settings: LogprobSettings) -> None:
    """Warn if a separate teacher often chooses ids that the policy lacks, which divergences leave out."""
    if isinstance(teacher, SameHeadStates) or teacher.num_ids is None or not isinstance(teacher.head, Tensor):
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
    """Return a maker of teachers from states, whose head stays on the device after the block of `ready()`."""
    head, leaves = teacher_head(model, torch.empty(0), num_ids), is_sharded(model)
    if isinstance(head.head, Tensor) and (leaves or head.head.device.type != device.type):
        bias = None if head.bias_W is None else head.bias_W.to(device, copy=True)
        head = replace(head, head=head.head.to(device, copy=True), bias_W=bias)
    return lambda states_TE: replace(head, hidden_TE=states_TE)


@dataclass
class SuccessfulSiblings:
    """Completions that succeed are the privileged context of their prompt's others (SDPO, arXiv 2601.20802).

    `make_encoder()(prompt, text)` returns the ids of a prompt with a completion's text as context, or None if they do not fit.
    """

    is_success: Callable[[Record], bool]
    make_encoder: Callable[[], Callable[[Prompt, str], tuple[int, ...] | None]]
    has_warned: bool = False

    def add_contexts(
        self, groups: Sequence[Group], records: Sequence[Record], texts: Sequence[str]
    ) -> tuple[Record, ...]:
        """Return the records; one without a context reads the next success of its group, beginning again at its end."""
        encode: Callable[[Prompt, str], tuple[int, ...] | None] = self.make_encoder()
        changed: list[Record] = []
        for group in groups:
            start, size = len(changed), len(group.completions)
            for i, record in enumerate(records[start : start + size]):
                others = (start + (i + step) % size for step in range(1, size))
                success = next((k for k in others if self.is_success(records[k])), None)
                if success is not None and record.teacher_prompt_ids is None and record.prompt_ids == group.prompt.ids:
                    record = replace(record, teacher_prompt_ids=encode(group.prompt, texts[success]))
                changed.append(record)
        self._warn_of_no_context(changed)
        return tuple(changed)

    def _warn_of_no_context(self, records: Sequence[Record]) -> None:
        if self.has_warned or not records or any(record.teacher_prompt_ids is not None for record in records):
            return
        self.has_warned = True
        logger.warning(
            "use_successful_as_teacher: none of %d completions has a context: no other one of its prompt reached "
            "success_threshold, or the prompt is one of token ids, was changed, or would be too long. Logged once.",
            len(records),
        )
