"""Metrics by hand, and over micro-batches: masked tokens are in none of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import CISPO, GRPO, RLOO, ragged_rows, token_batch

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.records import TokenBatch, merge_metrics

# Row 0 has a gain and ratios 1.5, 1, 0.5; row 1 a loss and ratios 1.5, 0.5; row 2 a loss and ratio 1.
RATIOS = torch.tensor([1.5, 1.0, 0.5, 1.5, 0.5, 1.0])
TOKENS = TokenBatch(
    rows_T=torch.tensor([0, 0, 0, 1, 1, 2]),
    num_rows=3,
    weights_U=torch.full((6,), 1 / 6),
    advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
    old_T=torch.full((6,), -3.0),
    reference_T=torch.full((6,), -3.0),
    token_share=1 / 6,
    row_share=1 / 3,
    batch_share=1.0,
)
LOGPROBS = RATIOS.log() - 3.0
ENTROPY = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
MASKED = TokenBatch(torch.tensor([0]), 1, torch.zeros(1), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(1))


def values(metrics):
    return {name: metric.value() for name, metric in metrics.items()}


def test_clip_ratios_of_tokens_are_shares_of_tokens_and_extremes_of_rows():
    measured = values(make_grpo(GRPO).measure(LOGPROBS, ENTROPY, TOKENS))
    assert measured == pytest.approx(
        {
            "clip_ratio/low_mean": 1 / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 6,
            "clip_ratio/high_max": 1 / 3,
            "clip_ratio/region_mean": 2 / 6,
            "entropy": 4.0,
        }
    )


def test_clip_ratios_of_sequences_are_shares_of_rows():
    settings = replace(GRPO, importance_level="sequence", clip_high=0.05, clip_low=0.05)
    tokens = replace(TOKENS, weights_U=torch.full((3,), 1 / 3), advantages_T=-TOKENS.advantages_T)
    measured = values(make_grpo(settings).measure(LOGPROBS, None, tokens))
    # The rows' ratios are 0.75^(1/3), 0.75^(1/2) and 1; the first row now has the loss.
    assert measured["clip_ratio/low_mean"] == pytest.approx(1 / 3)
    assert measured["clip_ratio/high_mean"] == 0.0
    assert (measured["clip_ratio/low_min"], measured["clip_ratio/high_max"]) == (0.0, 0.0)


def test_a_token_that_a_correction_masks_does_not_hide_that_its_sequence_is_clipped():
    settings = replace(GRPO, importance_level="sequence", clip_high=0.05, clip_low=0.05)
    advantages_T = torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, 1.0])  # the last token of the first row is masked
    tokens = replace(TOKENS, weights_U=torch.full((3,), 1 / 3), advantages_T=advantages_T)
    measured = values(make_grpo(settings).measure(LOGPROBS, None, tokens))
    assert measured["clip_ratio/low_mean"] == measured["clip_ratio/region_mean"] == pytest.approx(1 / 3)
    assert measured["clip_ratio/low_min"] == 0.0


@pytest.mark.parametrize(
    ("algorithm", "name", "expected"),
    [
        (make_grpo(GRPO), "clip_ratio/region_mean", 2 / 12),
        (make_grpo(CISPO), "cispo_clip_ratio", 1 / 12),
        (make_rloo(RLOO), "clip_ratio/low_mean", 1 / 6),
    ],
)
def test_clip_ratios_are_shares_of_the_whole_step_also_of_rows_that_are_not_trained_on(algorithm, name, expected):
    weights = torch.ones(6 if algorithm.unit == "token" else 3)
    tokens = replace(TOKENS, weights_U=weights, token_share=1 / 12, row_share=1 / 6)  # as many rows have no advantage
    assert values(algorithm.measure(LOGPROBS, None, tokens))[name] == pytest.approx(expected)


def test_rloo_measures_the_products_of_rows():
    tokens = replace(TOKENS, weights_U=torch.full((3,), 1 / 3))
    measured = values(make_rloo(RLOO).measure(LOGPROBS, ENTROPY, tokens))
    # 0.75 with a gain, 0.75 and 1 with a loss: the second row alone is clipped.
    assert measured["clip_ratio/low_mean"] == measured["clip_ratio/region_mean"] == pytest.approx(1 / 3)
    assert measured["clip_ratio/high_mean"] == 0.0
    assert measured["entropy"] == 4.0


def test_cispo_measures_its_own_ratio_at_one_plus_clip_high():
    measured = values(make_grpo(CISPO).measure(LOGPROBS, None, TOKENS))
    assert measured == pytest.approx({"cispo_clip_ratio": 1 / 6})


def test_kl_is_the_one_in_the_loss_and_only_with_a_beta():
    ratios = RATIOS.double()
    k3 = 1 / ratios + ratios.log() - 1
    plain, corrected = (
        values(make_grpo(replace(GRPO, beta=0.1, bias_corrected_kl=c)).measure(LOGPROBS, None, TOKENS))
        for c in (False, True)
    )
    assert plain["kl"] == pytest.approx(k3.mean().item(), rel=1e-5)
    assert corrected["kl"] == pytest.approx((ratios * k3).mean().item(), rel=1e-5)
    assert "kl" not in make_grpo(GRPO).measure(LOGPROBS, None, TOKENS)


@pytest.mark.parametrize("algorithm", [make_grpo(GRPO), make_rloo(RLOO)])
def test_drift_of_the_sampler_is_between_old_and_sampling_where_the_sampler_said_something(algorithm):
    sampling = torch.tensor([-3.0, -3.5, -2.0, math.nan, -3.0, -3.0])
    weights = torch.ones(6 if algorithm.unit == "token" else 3)
    measured = values(algorithm.measure(LOGPROBS, None, replace(TOKENS, sampling_T=sampling, weights_U=weights)))
    assert measured["sampling/sampling_logp_difference/mean"] == pytest.approx(1.5 / 5)
    assert measured["sampling/sampling_logp_difference/max"] == 1.0


def test_on_policy_the_drift_is_of_the_policy_itself():
    tokens = replace(TOKENS, old_T=None, sampling_T=LOGPROBS - 0.25)
    measured = values(make_grpo(GRPO).measure(LOGPROBS, None, tokens))
    assert measured["sampling/sampling_logp_difference/max"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "algorithm",
    [
        make_grpo(replace(GRPO, beta=0.1)),
        make_grpo(CISPO),
        make_grpo(replace(GRPO, importance_level="sequence")),
        make_rloo(RLOO),
        make_supervised(),
    ],
)
def test_a_masked_micro_batch_changes_no_metric(algorithm):
    weights = torch.ones(6 if algorithm.unit == "token" else 3)
    tokens = replace(TOKENS, weights_U=weights, sampling_T=LOGPROBS)
    alone = algorithm.measure(LOGPROBS, ENTROPY, tokens)
    half = algorithm.measure(LOGPROBS, ENTROPY, replace(tokens, batch_share=0.5))
    masked = algorithm.measure(torch.tensor([9.0]), torch.tensor([99.0]), replace(MASKED, batch_share=0.5))
    assert masked.keys() == alone.keys()
    assert values(merge_metrics(half, masked)) == values(alone)


def test_metrics_merged_over_micro_batches_are_those_of_the_whole_step():
    algorithm = make_grpo(replace(GRPO, beta=0.1))
    rows = ragged_rows()
    counts = StepCounts(len(rows), sum(len(row.logprobs) for row in rows))
    merged = {}
    for part in (rows, rows[:2], rows[2:]):
        shares = {"token_share": 1 / counts.num_tokens, "batch_share": 1.0 if part is rows else 0.5}
        tokens = token_batch(part, lambda n, _: algorithm.reduction(n, counts), "token", **shares)
        measured = algorithm.measure(
            torch.cat([row.logprobs for row in part]).detach(),
            torch.cat([row.entropy for row in part]).detach(),
            tokens,
        )
        if part is rows:
            whole = values(measured)
        else:
            merged = merge_metrics(merged, measured)
    assert values(merged) == pytest.approx(whole)


def test_supervised_training_measures_entropy_when_it_is_given():
    assert values(make_supervised().measure(LOGPROBS, ENTROPY, TOKENS)) == {"entropy": 4.0}
    assert make_supervised().measure(LOGPROBS, None, TOKENS) == {}
