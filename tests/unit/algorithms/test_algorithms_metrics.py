"""Metrics by hand, and merged over micro-batches; tokens of weight 0 are in none of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algorithm_cases import CISPO, GRPO, RLOO

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.records import TokenBatch, merge_metrics

# Row 0 has a gain and ratios 1.5, 1, 0.5; row 1 a loss and ratios 1.5, 0.5; row 2 a loss and ratio 1.
RATIOS = torch.tensor([1.5, 1.0, 0.5, 1.5, 0.5, 1.0])
TOKENS = TokenBatch(
    sequences_T=torch.tensor([0, 0, 0, 1, 1, 2]),
    num_sequences=3,
    weights_U=torch.full((6,), 1 / 6),
    advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
    old_T=torch.full((6,), -3.0),
    reference_T=torch.full((6,), -3.0),
    token_share=1 / 6,
    sequence_share=1 / 3,
    batch_share=1.0,
)
LOGPROBS = RATIOS.log() - 3.0
ENTROPY = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
MASKED = TokenBatch(torch.tensor([0]), 1, torch.zeros(1), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(1))


def values(metrics):
    return {name: metric.value() for name, metric in metrics.items()}


THIRDS = {"weights_U": torch.full((3,), 1 / 3)}
NARROW = replace(GRPO, importance_level="sequence", clip_high=0.05, clip_low=0.05)
MEASURED = {
    "tokens: shares of tokens, extremes of rows": (
        make_grpo(GRPO),
        {},
        {
            "clip_ratio/low_mean": 1 / 6,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 1 / 6,
            "clip_ratio/high_max": 1 / 3,
            "clip_ratio/region_mean": 2 / 6,
        },
    ),
    # The rows' ratios are 0.75^(1/3), 0.75^(1/2) and 1; the first row now has the loss.
    "sequences: shares of rows": (
        make_grpo(NARROW),
        {**THIRDS, "advantages_T": -TOKENS.advantages_T},
        {
            "clip_ratio/low_mean": 1 / 3,
            "clip_ratio/low_min": 0.0,
            "clip_ratio/high_mean": 0.0,
            "clip_ratio/high_max": 0.0,
            "clip_ratio/region_mean": 1 / 3,
        },
    ),
    "sequences: the last token of the first row is masked by a correction": (
        make_grpo(NARROW),
        {**THIRDS, "advantages_T": torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0, 1.0])},
        {"clip_ratio/low_mean": 1 / 3, "clip_ratio/low_min": 0.0, "clip_ratio/region_mean": 1 / 3},
    ),
    # 0.75 with a gain, 0.75 and 1 with a loss: the second row alone is clipped.
    "rloo: products of rows": (
        make_rloo(RLOO),
        THIRDS,
        {"clip_ratio/low_mean": 1 / 3, "clip_ratio/high_mean": 0.0, "clip_ratio/region_mean": 1 / 3},
    ),
    "cispo: its own ratio at 1 + clip_high": (make_grpo(CISPO), {}, {"cispo_clip_ratio": 1 / 6}),
}


@pytest.mark.parametrize("case", MEASURED)
def test_clip_ratios_count_the_clipped_units(case):
    algorithm, changes, expected = MEASURED[case]
    measured = values(algorithm.measure(LOGPROBS, ENTROPY, replace(TOKENS, **changes)))
    assert measured["entropy"] == 4.0
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    assert ("cispo_clip_ratio" in measured) != ("clip_ratio/region_mean" in measured)
    assert values(algorithm.measure(LOGPROBS, None, replace(TOKENS, **changes))).keys() == measured.keys() - {"entropy"}


@pytest.mark.parametrize(
    ("algorithm", "name", "expected"),
    [
        (make_grpo(GRPO), "clip_ratio/region_mean", 2 / 12),
        (make_grpo(CISPO), "cispo_clip_ratio", 1 / 12),
        (make_rloo(RLOO), "clip_ratio/low_mean", 1 / 6),
    ],
)
def test_clip_ratios_are_shares_of_the_whole_step_with_skipped_sequences(algorithm, name, expected):
    weights = torch.ones(6 if algorithm.unit == "token" else 3)
    tokens = replace(
        TOKENS, weights_U=weights, token_share=1 / 12, sequence_share=1 / 6
    )  # as many rows have no advantage
    assert values(algorithm.measure(LOGPROBS, None, tokens))[name] == pytest.approx(expected)


def test_the_kl_metric_is_the_losss_kl_and_needs_a_beta():
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
def test_sampling_drift_is_between_old_and_known_sampling_logprobs(algorithm):
    sampling = torch.tensor([-3.0, -3.5, -2.0, math.nan, -3.0, -3.0])
    weights = torch.ones(6 if algorithm.unit == "token" else 3)
    measured = values(algorithm.measure(LOGPROBS, None, replace(TOKENS, sampling_T=sampling, weights_U=weights)))
    assert measured["sampling/sampling_logp_difference/mean"] == pytest.approx(1.5 / 5)
    assert measured["sampling/sampling_logp_difference/max"] == 1.0


def test_on_policy_the_drift_is_that_of_the_policys_logprobs():
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
def test_a_zero_weight_batch_changes_no_metric(algorithm):
    weights = torch.ones(6 if algorithm.unit == "token" else 3)
    tokens = replace(TOKENS, weights_U=weights, sampling_T=LOGPROBS)
    alone = algorithm.measure(LOGPROBS, ENTROPY, tokens)
    half = algorithm.measure(LOGPROBS, ENTROPY, replace(tokens, batch_share=0.5))
    masked = algorithm.measure(torch.tensor([9.0]), torch.tensor([99.0]), replace(MASKED, batch_share=0.5))
    assert masked.keys() == alone.keys()
    assert values(merge_metrics(half, masked)) == values(alone)


def test_supervised_training_measures_entropy_when_it_is_given():
    assert values(make_supervised().measure(LOGPROBS, ENTROPY, TOKENS)) == {"entropy": 4.0}
    assert make_supervised().measure(LOGPROBS, None, TOKENS) == {}
