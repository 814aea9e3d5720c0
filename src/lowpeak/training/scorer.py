"""Stations 7 and 8: old and reference log-probs, entropies and values of records, without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from lowpeak.algorithms import Need
from lowpeak.batching import assign_to_ranks, pack, scatter
from lowpeak.memory import Phase
from lowpeak.records import Metric, MicroBatch, Record, merge_metrics
from lowpeak.training.run import RunContext
from lowpeak.training.step import score
from lowpeak.training.step_batches import pad_batches_across_ranks

Scores = dict[int, dict[str, Tensor]]  # by the record's index, by name


def score_records(
    context: RunContext, records: tuple[Record, ...], needs: frozenset[Need], phase: Phase
) -> tuple[tuple[Record, ...], dict[str, Metric]]:
    """Return the records with the scores in `needs`, gathered on all ranks, and metrics of the passes.

    Each rank scores a share of the records. Without needs there is no pass.
    """
    if not needs:
        return records, {}
    run = context.run
    ranks = run.strategy.ranks
    indices = assign_to_ranks(records, range(len(records)), run.budget, ranks.world_size)[ranks.rank]
    batches = pad_batches_across_ranks(pack(records, indices, run.budget), run.budget, ranks)
    context.model_wrapped.eval()

    def run_passes() -> tuple[Scores, dict[str, Metric]]:
        with run.tracker.phase(phase):
            return _score_batches(context, records, batches, needs), {"useful_tokens/score": _useful_share(batches)}

    gathered = ranks.call_on_all(run_passes)
    scores = {i: values for rank_scores, _ in gathered for i, values in rank_scores.items()}
    scored = tuple(_with_scores(record, scores.get(i, {}), needs) for i, record in enumerate(records))
    return scored, reduce(merge_metrics, [metrics for _, metrics in gathered])


def _score_batches(
    context: RunContext, records: Sequence[Record], batches: Sequence[MicroBatch], needs: frozenset[Need]
) -> Scores:
    run, model = context.run, context.model_wrapped
    passes: dict[str, list[dict[str, Tensor]]] = {}
    if needs & {"old", "entropy", "values"}:
        wishes = {"entropy": "entropy" in needs, "values": "values" in needs}
        wishes["logprobs"] = bool(needs & {"old", "entropy"})
        passes["old"] = score(model, batches, run.logprob_settings, **wishes)
    if "reference" in needs:
        assert run.reference is not None
        with run.reference.use():
            passes["reference"] = score(run.reference.model or model, batches, run.logprob_settings)
    return _read_scores(records, batches, passes)


def _read_scores(
    records: Sequence[Record], batches: Sequence[MicroBatch], passes: Mapping[str, Sequence[Mapping[str, Tensor]]]
) -> Scores:
    """Return the passes' results per record, with one read of the device.

    Log-probs are under the name of their pass, entropies and values under their own.
    """
    scores: Scores = {}
    places: list[tuple[int, str]] = []
    lengths: list[int] = []
    columns: list[Tensor] = []
    for name, results in passes.items():
        for batch, result in zip(batches, results, strict=True):
            for key, values in result.items():
                column = name if key == "logprobs" else key
                if batch.record_indices:
                    places += [(index, column) for index in batch.record_indices]
                    lengths += torch.bincount(batch.tokens.sequences_T, minlength=batch.tokens.num_sequences).tolist()
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


def _useful_share(batches: Sequence[MicroBatch]) -> Metric:
    """Return the share of a pass's tokens that change its result: no padding, and a prompt once."""
    return Metric(float(sum(b.num_useful for b in batches)), float(sum(b.input_ids_BL.numel() for b in batches)))
