"""A rollout: its records as micro-batches.

Stages 7 to 9 score the records without gradients and compute their advantages, stage 10 forms the micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lowpeak.algorithms import Advantages, Algorithm, Need, StepCounts, call_advantages, indices_by_group
from lowpeak.arguments import RolloutSettings
from lowpeak.batching import TokenBudget, assign_to_ranks, masked_batch, num_loss_tokens, pack, scatter
from lowpeak.errors import ArgumentError
from lowpeak.heads import num_embeddings
from lowpeak.memory import Phase
from lowpeak.models import Reference
from lowpeak.ranks import Ranks
from lowpeak.records import Metric, MicroBatch, Record, Unit, merge_metrics
from lowpeak.training.guarded_passes import GuardedPasses
from lowpeak.training.recovery import attempts
from lowpeak.training.run import Run, RunContext
from lowpeak.training.step import score
from lowpeak.training.token_values import TokenObserver


@dataclass(frozen=True)
class Rollout:
    """The groups generated from one set of weights, scored and with advantages; `number` counts from 0.

    `metrics`, `rows` (the journal's, one per completion) and `num_tokens` cover all that was generated for it. They are
    reported once, with the rollout's first step, and are not in checkpoints. `selected` is the row of each record.
    """

    number: int
    records: tuple[Record, ...]
    metrics: dict[str, Metric] = field(default_factory=dict)
    rows: tuple[dict[str, object], ...] = ()
    num_tokens: int = 0
    selected: tuple[int, ...] = ()


Scores = dict[int, dict[str, Tensor]]  # by the record's index, by name
_Pass = tuple[
    str, Sequence[MicroBatch], Sequence[Mapping[str, Tensor]]
]  # its name, and the results of its micro-batches


def score_rollout(
    context: RunContext, records: tuple[Record, ...], coefficients: Mapping[str, float], settings: RolloutSettings
) -> tuple[tuple[Record, ...], dict[str, Metric]]:
    """Stages 7 to 9: return a rollout's records with scores and advantages, and metrics of both.

    Within the run's present sizes; the policy is the one before the rollout's first step.
    """
    algorithm = context.run.algorithm
    records, metrics = score_records(context, records, algorithm.needs, Phase.SCORE)
    advantages = call_advantages(algorithm.advantages, records, coefficients)  # stage 9
    records = with_advantages(records, advantages)
    return with_old_logprobs(records, algorithm, settings.num_steps), merge_metrics(advantages.metrics, metrics)


def with_old_logprobs(records: Sequence[Record], algorithm: Algorithm, num_steps: int) -> tuple[Record, ...]:
    """Return scored records with the old log-probs of their losses: the sampler's, or the policy's before the first step.

    None if a rollout serves one step: old is then the policy's own log-prob in the step.
    """
    if algorithm.old_policy == "sampler":
        return tuple(replace(record, old=_sampled(record)) for record in records)
    return tuple(replace(record, old=record.old if num_steps > 1 else None) for record in records)


def _sampled(record: Record) -> Tensor:
    """Return the log-probs that the tokens were sampled with; ArgumentError if one is unknown."""
    sampled = record.completion.logprobs
    if bool(sampled[record.completion.loss_mask].isnan().any()):
        raise ArgumentError(
            "old_policy='sampler' needs the log-prob of each sampled token, but rollout_func returned None for some: return all, "
            "or set old_policy='policy'."
        )
    return sampled


def score_records(
    context: RunContext, records: tuple[Record, ...], needs: frozenset[Need], phase: Phase
) -> tuple[tuple[Record, ...], dict[str, Metric]]:
    """Return the records with the scores in `needs`, gathered on all ranks, and metrics of the passes.

    Each rank scores a share of the records. Without needs there is no pass.
    """
    if not needs:
        return records, {}
    context.model_wrapped.eval()
    ranks = context.run.strategy.ranks
    for attempt in attempts(context, Phase.SCORE):
        batches = _pack_share(records, context.run.budget, ranks)  # stage 7
        with attempt:
            score_share = partial(_score_share, context, records, batches, needs, attempt.guard(), phase)
            gathered = ranks.call_on_all(score_share)  # stage 8
    scores = {index: values for share, _ in gathered for index, values in share.items()}
    scored = tuple(_with_scores(record, scores.get(i, {}), needs) for i, record in enumerate(records))
    return scored, {"useful_tokens/score": reduce(Metric.merge, [useful for _, useful in gathered])}


def _pack_share(records: Sequence[Record], budget: TokenBudget, ranks: Ranks) -> list[MicroBatch]:
    """Return the micro-batches that this rank scores; every rank has the same number."""
    indices = assign_to_ranks(records, range(len(records)), budget, ranks.world_size)[ranks.rank]
    return pad_batches_across_ranks(pack(records, indices, budget), budget, ranks)


def _score_share(
    context: RunContext,
    records: Sequence[Record],
    batches: Sequence[MicroBatch],
    needs: frozenset[Need],
    guard: GuardedPasses,
    phase: Phase,
) -> tuple[Scores, Metric]:
    """Return the scores of this rank's records, and the share of useful tokens."""
    with context.run.tracker.phase(phase):
        scores = _score_batches(context, records, batches, needs, guard)
    return scores, _useful_share(batches)


def _score_batches(
    context: RunContext,
    records: Sequence[Record],
    batches: Sequence[MicroBatch],
    needs: frozenset[Need],
    guard: GuardedPasses,
) -> Scores:
    run, model = context.run, context.model_wrapped
    guard.batches = batches  # a separate reference's passes, which run without the guard, can be the first to fail
    passes: list[_Pass] = []
    if needs & {"old", "entropy", "values"}:
        request_fields: dict[str, Any] = {"entropy": "entropy" in needs, "values": "values" in needs}
        request_fields["logprobs"] = bool(needs & {"old", "entropy"})
        passes.append(("old", batches, score(model, batches, run.logprob_settings, guard, **request_fields)))
    if "reference" in needs:
        assert run.reference is not None
        separate = run.reference.model
        batches = pack_for_teacher(run, batches, records)
        with run.reference.ready():
            # A separate one has no collectives, or runs in lockstep: its errors need no guard.
            found = score(separate or model, batches, run.logprob_settings, None if separate else guard)
        passes.append(("reference", batches, found))
    return _read_scores(records, passes)


def _read_scores(records: Sequence[Record], passes: Sequence[_Pass]) -> Scores:
    """Return the passes' results per record, with one read of the device.

    Log-probs are under the name of their pass, entropies and values under their own.
    """
    scores: Scores = {}
    places: list[tuple[int, str]] = []
    lengths: list[int] = []
    columns: list[Tensor] = []
    for name, batches, results in passes:
        for batch, result in zip(batches, results, strict=True):
            for key, values in result.items():
                column = name if key == "logprobs" else key
                if batch.record_indices:
                    places += [(index, column) for index in batch.record_indices]
                    lengths += batch.tokens.counts()
                    columns.append(values.float())
    if columns:
        for (index, column), values in zip(places, torch.cat(columns).cpu().split(lengths), strict=True):
            scores.setdefault(index, {})[column] = scatter(records[index], values)
    return scores


def _with_scores(record: Record, scores: Mapping[str, Tensor], needs: frozenset[Need]) -> Record:
    """Return the record with the scores in `needs`; zeros, which nothing reads, if no token of it counts."""
    zeros = torch.zeros(len(record.completion))
    old, reference, entropy, values = (
        scores.get(name, zeros) if name in needs else None for name in ("old", "reference", "entropy", "values")
    )
    return replace(record, old=old, reference=reference, entropy=entropy, values=values)


def with_advantages(records: Sequence[Record], advantages: Advantages) -> tuple[Record, ...]:
    """Return the records with their advantages and, under PPO, returns."""
    returns = advantages.returns or (None,) * len(records)
    columns = zip(records, advantages.per_token, returns, strict=True)
    return tuple(replace(record, advantages=each, returns=values) for record, each, values in columns)


def _useful_share(batches: Sequence[MicroBatch]) -> Metric:
    """Return the share of a pass's tokens that change its result: no padding, and a prompt once."""
    return Metric(float(sum(b.num_useful for b in batches)), float(sum(b.input_ids_BL.numel() for b in batches)))


@dataclass(frozen=True)
class StepBatches:
    """This rank's micro-batches of one optimizer step, and the number of the step's new tokens.

    `num_new` counts tokens of all ranks that no earlier step has seen: prompts, and tokens that the policy wrote. The
    first step of a rollout counts those of the whole rollout. They were packed of `records[indices]`; `observer` keeps token
    values of the `observed` ones.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_new: int
    records: Sequence[Record] = ()
    indices: Sequence[int] = ()
    observed: tuple[int, ...] = ()
    observer: TokenObserver = field(default_factory=TokenObserver)

    @classmethod
    def pack(
        cls, run: Run, records: Sequence[Record], indices: Sequence[int], num_new: int, observed: tuple[int, ...] = ()
    ) -> StepBatches:
        """Pack this rank's share of `records[indices]` into micro-batches within the run's sizes."""
        batches = make_step_batches(records, indices, run.algorithm, run.budget, run.strategy.ranks)
        return cls(batches, num_new, records, indices, observed, observe_records(batches, observed))

    @property
    def num_useful(self) -> int:
        """Tokens of the forward passes that change the result: no padding, and a prompt once."""
        return sum(batch.num_useful for batch in self.micro_batches)

    @property
    def num_computed(self) -> int:
        return sum(batch.input_ids_BL.numel() for batch in self.micro_batches)


def records_of_step(
    rollout: Rollout, settings: RolloutSettings, seed: int, step: int, unit: Unit = "token"
) -> tuple[int, ...]:
    """Return the indices of the records that step `step` of a rollout (0 <= step < num_steps) trains on.

    Groups are shuffled by (seed, rollout number), with their sequences together; every pass splits them into the same
    steps. A rollout that dynamic sampling left short is split evenly; pairs are never split.
    """
    groups = _shuffled_groups(rollout, seed)
    items = groups if unit == "pair" else [[i] for group in groups for i in group]
    slot = step % settings.steps_per_pass
    start, stop = (len(items) * s // settings.steps_per_pass for s in (slot, slot + 1))
    return tuple(i for item in items[start:stop] for i in item)


def _shuffled_groups(rollout: Rollout, seed: int) -> list[list[int]]:
    groups = list(indices_by_group(rollout.records).values())
    generator = torch.Generator().manual_seed((seed * 1_000_003 + rollout.number) % (1 << 63))
    return [groups[g] for g in torch.randperm(len(groups), generator=generator).tolist()]


def make_step_batches(
    records: Sequence[Record], rows: Sequence[int], algorithm: Algorithm, budget: TokenBudget, ranks: Ranks
) -> tuple[MicroBatch, ...]:
    """Return this rank's micro-batches of `records[rows]`, at least one.

    Sequences whose advantages are all zero count in the step's means, but the algorithm may skip their forward pass.
    """
    counts = StepCounts(len(rows), sum(num_loss_tokens(records[i]) for i in rows))
    trained = trained_records(records, rows, algorithm)
    batches = pack(
        records,
        assign_to_ranks(records, trained, budget, ranks.world_size, algorithm.unit)[ranks.rank],
        budget,
        lambda num_tokens: algorithm.unit_weight(num_tokens, counts),
        unit=algorithm.unit,
    )
    return tuple(with_step_shares(pad_batches_across_ranks(batches, budget, ranks, least=1), counts, ranks.world_size))


def trained_records(records: Sequence[Record], indices: Sequence[int], algorithm: Algorithm) -> list[int]:
    """Return the indices of the records that a step forwards."""
    return [i for i in indices if not (algorithm.skip_zero_advantage and _has_zero_advantages(records[i]))]


def with_step_shares(batches: Sequence[MicroBatch], counts: StepCounts, num_ranks: int) -> Iterator[MicroBatch]:
    """Yield a step's micro-batches with the share of a token, a sequence and a micro-batch in it."""
    for batch in batches:
        is_masked = not batch.record_indices
        tokens = replace(
            batch.tokens,
            token_share=0.0 if is_masked else 1.0 / counts.num_tokens,
            sequence_share=0.0 if is_masked else 1.0 / counts.num_sequences,
            batch_share=1.0 / (len(batches) * num_ranks),
        )
        yield replace(batch, tokens=tokens)


def pad_batches_across_ranks(
    batches: list[MicroBatch], budget: TokenBudget, ranks: Ranks, least: int = 0
) -> list[MicroBatch]:
    """Append masked micro-batches up to the number on the busiest rank (and `least`): forward passes are collective."""
    most = int(ranks.max([max(len(batches), least)])[0])
    return batches + [masked_batch(budget)] * (most - len(batches))


def pack_for_teacher(run: Run, batches: Sequence[MicroBatch], records: Sequence[Record]) -> Sequence[MicroBatch]:
    """Pack the sequences of a rank's micro-batches after their teacher's prompts; every rank has the same number.

    `records` are those of all ranks. Without prompts of a teacher the micro-batches stay as they are. ArgumentError for an id that
    a separate reference or teacher does not embed: the policy's head may have more rows, beyond the tokenizer's ids; and for a
    completion with branches after another prompt of its teacher.
    """
    _check_embedded(run.reference, records)
    if all(record.teacher_prompt_ids is None for record in records):
        return batches
    if any(
        record.completion.branches and record.teacher_prompt_ids not in (None, record.prompt_ids) for record in records
    ):
        raise ArgumentError(
            "a conversation has branches, and its teacher reads another prompt (privileged_context or "
            "use_successful_as_teacher), in which they have no place: set max_branches=1, or remove the teacher's context."
        )
    read = [replace(record, prompt_ids=record.teacher_prompt_ids or record.prompt_ids) for record in records]
    indices = [index for batch in batches for index in batch.record_indices]
    return pad_batches_across_ranks(pack(read, indices, run.budget), run.budget, run.strategy.ranks, least=1)


def _check_embedded(reference: Reference | None, records: Sequence[Record]) -> None:
    rows = None if reference is None else num_embeddings(reference.model)
    if rows is None or not records:
        return
    most = max(max(max(record.prompt_ids), *record.completion.ids.tolist()) for record in records)
    if most >= rows:
        raise ArgumentError(
            f"a sequence has the token id {most}, and the teacher or reference embeds only {rows} ids: the policy's head has more "
            "rows, beyond the tokenizer's ids, and wrote one. Load that model, call its resize_token_embeddings with the policy's "
            "number of rows, and pass it."
        )


def observe_records(batches: Sequence[MicroBatch], observed: Collection[int]) -> TokenObserver:
    """Return an observer of some records' loss tokens in this rank's micro-batches."""
    ranges = []
    for batch in batches if observed else ():
        counts = batch.tokens.counts()
        stops = zip(batch.record_indices, counts, accumulate(counts), strict=False)  # a masked batch has no records
        ranges.append({index: (stop - count, stop) for index, count, stop in stops if index in observed})
    return TokenObserver(ranges)


def _has_zero_advantages(record: Record) -> bool:
    return record.advantages is not None and not bool(record.advantages.any())
