"""The preference loss against its formula in float64, and the metrics of pairs."""

from __future__ import annotations

import math

import pytest
import torch

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.loss_terms import pair_mean
from lowpeak.algorithms.reward_model import make_reward_model, measure_preferences, preference_loss
from lowpeak.batching.packing import TokenBudget, masked_batch, pack
from preference_data import PAIRS, records_of

MARGINS = [margin for _, _, margin in PAIRS]


def tokens_of(records=None):
    """Return all pairs as one micro-batch, and the record index of each of its sequences."""
    records = records or records_of()
    (batch,) = pack(records, range(len(records)), TokenBudget(1000), lambda n: 1 / len(PAIRS), unit="pair")
    return batch.tokens, batch.record_indices


def in_order(scores, indices):
    """Reorder values from (chosen, rejected, chosen, ...) to the micro-batch's sequences."""
    return torch.stack([scores[i] for i in indices])


@pytest.mark.parametrize("center", [0.0, 0.3])
def test_a_pairs_loss_and_gradient_are_those_of_the_formula(center):
    tokens, indices = tokens_of()
    scores = torch.randn(
        2 * len(PAIRS), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    losses = preference_loss(center, in_order(scores, indices), tokens)
    total = (tokens.weights_U * losses).sum()
    (gradient,) = torch.autograd.grad(total, scores)
    plain, slope = 0.0, []
    for pair, margin in enumerate(MARGINS):
        chosen, rejected = scores[2 * pair].item(), scores[2 * pair + 1].item()
        p = 1 / (1 + math.exp(-(chosen - rejected - margin)))
        plain += (-math.log(p) + center * (chosen + rejected) ** 2) / len(PAIRS)
        pull = 2 * center * (chosen + rejected)
        slope += [(pull - (1 - p)) / len(PAIRS), (pull + (1 - p)) / len(PAIRS)]
    assert total.item() == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(slope, dtype=torch.float64), rtol=1e-6, atol=1e-7)


def test_preference_metrics_are_over_all_pairs_and_sequences():
    tokens, indices = tokens_of()
    scores = torch.tensor([1.0, 0.0, 0.5, 2.0, 3.0, -1.0, 0.0, 0.0, 4.0, 3.5])
    found = {name: metric.value() for name, metric in measure_preferences(in_order(scores, indices), tokens).items()}
    assert found == {
        "accuracy": pytest.approx(3 / 5),  # a tie is not in the right order
        "margin": pytest.approx((1.0 - 1.5 + 4.0 + 0.0 + 0.5) / 5),
        "mean_reward": pytest.approx(13 / 10),
        "min_reward": -1.0,
        "max_reward": 4.0,
    }


def test_a_zero_weight_batch_adds_nothing_and_is_in_no_metric():
    tokens = masked_batch(TokenBudget(8)).tokens
    score = torch.tensor([3.0], requires_grad=True)
    loss = (tokens.weights_U * preference_loss(0.5, score, tokens)).sum()
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, score)[0].item() == 0.0
    found = measure_preferences(score.detach(), tokens)
    assert found["accuracy"].count == found["margin"].count == found["mean_reward"].count == 0
    assert (found["min_reward"].value(), found["max_reward"].value()) == (math.inf, -math.inf)


def test_each_pair_has_the_same_weight():
    assert pair_mean(2, StepCounts(num_sequences=10, num_tokens=10)) == 1 / 5
    assert pair_mean(0, StepCounts(num_sequences=10, num_tokens=10)) == 0.0


def test_the_algorithm_trains_only_values_on_the_data_sets_pairs():
    algorithm, records = make_reward_model(), records_of()
    assert (algorithm.unit, algorithm.loss, algorithm.needs, algorithm.skip_zero_advantage) == (
        "pair",
        None,
        frozenset(),
        False,
    )
    assert algorithm.select(records).indices == tuple(range(len(records)))
    read = algorithm.advantages(records, {})
    assert [each.sum().item() for each in read.per_token] == [1.0, -1.0] * len(PAIRS)
    assert [each.sum().item() for each in read.returns or ()] == pytest.approx([x for m in MARGINS for x in (m, 0.0)])
