"""Online DPO: selected pairs, their loss and metrics against the formulas written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import gradients, ragged_rows, record

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.online_dpo import make_online_dpo, pair_loss
from lowpeak.arguments.online_dpo import OnlineDPOSettings
from lowpeak.records import TokenBatch

DPO = OnlineDPOSettings("sigmoid", (0.1,), 0.0, False)
NAN = math.nan


def chosen(settings, records):
    selection = make_online_dpo(settings).select(records)
    return selection.indices, selection.num_dropped_groups


def signs(settings, records):
    given = make_online_dpo(settings).advantages(records, {})
    assert [len(values) for values in given.per_token] == [len(r.completion) for r in records]
    return [float(values[0]) for values in given.per_token]


def test_the_best_and_the_worst_of_each_group_are_a_pair():
    records = [record(g, r) for g, r in [(0, 0.2), (1, 3.0), (0, 0.9), (0, -1.0), (1, 2.0), (0, 0.9)]]
    assert chosen(DPO, records) == ((1, 2, 3, 4), 0)
    assert signs(DPO, records) == [0.0, 1.0, 1.0, -1.0, -1.0, 0.0]
    kept = [records[i] for i in (1, 2, 3, 4)]
    assert signs(DPO, kept) == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize("rewards", [(0.5, 0.5, 0.5), (0.3, 0.1 + 0.2, 0.3), (1.0, NAN, NAN), (NAN, NAN, NAN)])
def test_a_group_without_a_difference_has_no_pair_and_counts_as_missing(rewards):
    records = [record(0, r) for r in rewards] + [record(1, 0.0), record(1, 1.0)]
    assert chosen(DPO, records) == ((3, 4), 1)
    assert signs(DPO, records) == [0.0, 0.0, 0.0, -1.0, 1.0]
    metrics = make_online_dpo(DPO).select(records).metrics
    assert (metrics["num_pairs"].value(), metrics["num_ties"].value()) == (1.0, 1.0)


CUT = record(0, 1.0, finish_reason="length")
SILENT = replace(CUT, completion=replace(CUT.completion, loss_mask=torch.zeros(2, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("changes", "records", "expected"),
    [
        ({}, [record(0, NAN), record(0, 1.0), record(0, 2.0)], [0.0, -1.0, 1.0]),
        ({}, [SILENT, record(0, 0.0), record(0, 0.5)], [0.0, -1.0, 1.0]),  # no token of it counts
        ({}, [CUT, record(0, 0.5), record(0, 0.25)], [1.0, 0.0, -1.0]),
        ({"mask_truncated": True}, [CUT, record(0, 0.5), record(0, 0.25)], [0.0, 1.0, -1.0]),
        ({"missing_eos_penalty": 0.75}, [CUT, record(0, 0.5)], [-1.0, 1.0]),
        ({}, [CUT, record(0, 1.0)], [0.0, 0.0]),
        ({"missing_eos_penalty": 0.1}, [CUT, record(0, 1.0)], [-1.0, 1.0]),
    ],
)
def test_records_are_compared_by_reward_less_penalty(changes, records, expected):
    settings = replace(DPO, **changes)
    assert signs(settings, records) == expected
    pair = tuple(i for i, sign in enumerate(expected) if sign)
    assert chosen(settings, records) == (pair, 0 if pair else 1)


def test_selection_metrics_are_over_all_records():
    records = [record(0, 1.0, finish_reason="length"), record(0, 0.0), record(0, 0.5), record(1, 0.5), record(1, NAN)]
    metrics = make_online_dpo(replace(DPO, missing_eos_penalty=0.25)).select(records).metrics
    values = {name: metric.value() for name, metric in metrics.items()}
    assert values["objective/scores"] == pytest.approx((0.75 + 0.0 + 0.5 + 0.5) / 4)
    assert values["objective/scores_margin"] == pytest.approx(0.75)
    assert values["val/contain_eos_token"] == pytest.approx(0.8)
    assert values["reward"] == pytest.approx(0.5)
    assert values["frac_reward_zero_std"] == pytest.approx(0.4)


def pair_batch(rows, **changes):
    """Return three pairs: sequences (0, 3), (1, 2) and (4, 5), the chosen one first."""
    lengths = [len(row.logprobs) for row in rows]
    signs_B = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    counts = StepCounts(len(rows), sum(lengths))
    weight = make_online_dpo(DPO).reduction(1, counts)
    batch = TokenBatch(
        sequences_T=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
        num_sequences=len(rows),
        weights_U=torch.full((3,), weight, dtype=torch.float64),
        advantages_T=torch.repeat_interleave(signs_B, torch.tensor(lengths)),
        reference_T=torch.cat([row.reference for row in rows]),
        pairs_B=torch.tensor([0, 1, 1, 0, 2, 2]),
        coefficients={"beta": 0.3},
    )
    return replace(batch, **changes)


PAIRS = [(0, 3), (1, 2), (4, 5)]
LENGTHS = (3, 1, 6, 2, 5, 4)


def plain_loss(loss_type, rows, beta):
    total = 0.0
    for best, worst in PAIRS:
        logit = sum(rows[best].logprobs - rows[best].reference) - sum(rows[worst].logprobs - rows[worst].reference)
        if loss_type == "sigmoid":
            total = total - torch.log(1 / (1 + torch.exp(-beta * logit)))
        else:
            total = total + (logit - 1 / (2 * beta)) ** 2
    return total / len(PAIRS)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("beta", [0.05, 0.3, 2.0])
def test_the_loss_is_the_papers_in_value_and_every_gradient(loss_type, beta):
    rows = ragged_rows(LENGTHS)
    tokens = pair_batch(rows, coefficients={"beta": beta})
    loss_U = pair_loss(replace(DPO, loss_type=loss_type), torch.cat([row.logprobs for row in rows]), tokens)
    assert loss_U.shape == (3,)
    ours, plain = (tokens.weights_U * loss_U).sum(), plain_loss(loss_type, rows, beta)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(ours, rows), gradients(plain, rows), rtol=1e-10, atol=1e-12)


def test_beta_follows_the_epochs_and_the_last_one_stays():
    algorithm = make_online_dpo(replace(DPO, betas=(0.1, 0.2, 0.4)))
    found = [algorithm.coefficients(epoch=epoch)["beta"] for epoch in (0.0, 0.5, 1.0, 1.9, 2.0, 7.5)]
    assert found == [0.1, 0.1, 0.2, 0.2, 0.4, 0.4]


def test_metrics_are_over_weighted_pairs_only():
    rows = ragged_rows(LENGTHS)
    logprobs_T = torch.cat([row.logprobs for row in rows]).detach()
    tokens = pair_batch(rows, weights_U=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    measured = make_online_dpo(DPO).measure(logprobs_T, None, tokens)
    values = {name: metric.value() for name, metric in measured.items()}
    ratios = [float((row.logprobs - row.reference).detach().sum()) for row in rows]
    sums = [float(row.logprobs.detach().sum()) for row in rows]
    margins = [0.3 * (ratios[0] - ratios[3]), 0.3 * (ratios[1] - ratios[2])]
    expected = {
        "rewards/chosen": 0.3 * (ratios[0] + ratios[1]) / 2,
        "rewards/rejected": 0.3 * (ratios[3] + ratios[2]) / 2,
        "rewards/margins": sum(margins) / 2,
        "rewards/accuracies": sum(margin > 0 for margin in margins) / 2,
        "logps/chosen": (sums[0] + sums[1]) / 2,
        "logps/rejected": (sums[3] + sums[2]) / 2,
        "objective/kl": sum(ratios[:4]) / 4,
        "objective/entropy": -sum(sums[:4]) / 4,
        "objective/non_score_reward": -0.3 * sum(ratios[:4]) / 4,
        "beta": 0.3,
    }
    assert values == pytest.approx(expected)
