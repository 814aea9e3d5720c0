"""Every loss against its definition in float64, sequence by sequence: values, gradients in log-probs and entropies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from algorithm_cases import CISPO, GRPO, RLOO, SETTINGS, assert_same, ragged_rows, record, token_batch, trained_loss
from torch._subclasses.fake_tensor import FakeTensorMode

from lowpeak.algorithms.distillation import make_distillation
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.loss_terms import clipped_surrogate, importance_ratio, off_policy_mask, product_ratio
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.algorithms.supervised import make_supervised
from lowpeak.arguments.distillation import DistillationSettings
from lowpeak.arguments.grpo import EntropyBonus, GRPOLossType
from lowpeak.logprobs.reference import naive_divergence
from lowpeak.records import TokenBatch
from lowpeak.training.step import weighted_loss
from naive_losses import Row, plain_grpo, plain_rloo

LOSS_TYPES = get_args(GRPOLossType)
LEVELS = ["token", "sequence"]


def settings_of(loss_type, **changes):
    return replace(SETTINGS.get(loss_type, GRPO), loss_type=loss_type, **changes)


EVERY_TERM = {
    "beta": 0.1,
    "bias_corrected_kl": True,
    "entropy_bonus": EntropyBonus(9.9),
}  # the batch's coefficient counts
DEFINED = [(loss_type, changes) for loss_type in LOSS_TYPES for changes in ({}, EVERY_TERM)]
DEFINED += [
    ("dapo", {"beta": 0.5, "kl_estimator": kl, "bias_corrected_kl": corrected})
    for kl in ("k1", "k2", "k3")
    for corrected in (False, True)
]


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("loss_type", "changes"), [*DEFINED, ("dapo", {"delta": 1.35})], ids=str)
def test_the_trained_loss_is_the_definition_with_masked_advantages_too(loss_type, changes, level, on_policy):
    settings = settings_of(loss_type, importance_level=level, **changes)
    for seed in (0, 1, 2, 3):
        rows = ragged_rows(seed=seed)
        more = {"old_T": None} if on_policy else {}
        loss = trained_loss(make_grpo(settings), rows, **more)
        assert_same(loss, plain_grpo(settings, rows, on_policy=on_policy), rows)
        advantages_T = torch.cat([row.advantage * row.mask for row in rows])
        masked = trained_loss(make_grpo(settings), rows, advantages_T=advantages_T, **more)
        assert_same(masked, plain_grpo(settings, rows, on_policy=on_policy, masked=True), rows)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_sequences_that_left_the_sampler_lose_their_policy_term_if_their_advantage_is_negative(loss_type):
    settings = settings_of(loss_type, beta=0.1, off_policy_mask_threshold=0.05)
    for seed in (0, 1, 2):
        rows = ragged_rows(seed=seed)
        loss = trained_loss(make_grpo(settings), rows)
        assert_same(loss, plain_grpo(settings, rows), rows)
        assert loss != trained_loss(make_grpo(replace(settings, off_policy_mask_threshold=None)), rows)


def test_the_off_policy_mask_reads_the_samplers_logprobs_and_old_ones_if_those_are_unknown():
    rows = [replace(row, advantage=-1.0) for row in ragged_rows((2, 2))]
    tokens = token_batch(rows, make_grpo(GRPO).reduction, "token")
    logprobs_T = torch.cat([row.logprobs for row in rows]).detach()
    sampled_T = logprobs_T + torch.tensor([0.9, -0.1, 0.3, math.nan])
    on_policy = replace(tokens, sampling_T=sampled_T, old_T=None)
    assert off_policy_mask(logprobs_T, on_policy, 0.2).tolist() == [0.0, 0.0, 1.0, 1.0]
    moved = replace(on_policy, old_T=logprobs_T + 0.9)
    assert off_policy_mask(logprobs_T, moved, 0.2).tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("level", LEVELS)
def test_on_policy_every_ratio_is_exactly_one(level):
    rows = ragged_rows()
    tokens = token_batch(rows, make_grpo(GRPO).reduction, "token", old_T=None)
    logprobs_T = torch.cat([row.logprobs for row in rows])
    assert (importance_ratio(logprobs_T, tokens, level) == 1.0).all()
    assert (product_ratio(logprobs_T, tokens) == 1.0).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        (3.0, 1.0, -1.28, 0.0),  # above the ceiling with a gain: clipped
        (0.5, 1.0, -0.5, -1.0),  # below the floor with a gain: open
        (0.5, -2.0, 1.6, 0.0),  # below the floor with a loss: clipped
        (1.5, -2.0, 3.0, 2.0),  # above the ceiling with a loss: open up to delta
        (3.0, -2.0, 4.0, 0.0),  # above delta with a loss: bounded
        (1.1, 0.5, -0.55, -0.5),  # inside
    ],
)
def test_the_two_sided_surrogate_by_hand(ratio, advantage, expected, slope):
    x = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    loss = clipped_surrogate(x, torch.tensor(advantage, dtype=torch.float64), 0.2, 0.28, delta=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert x.grad.item() == pytest.approx(slope)


def test_rloo_is_its_definition_on_ragged_off_policy_rows():
    # Short sequences stay inside the clip, long ones leave it on both sides; one without tokens has no weight.
    for seed in range(3):
        rows = ragged_rows((3, 1, 6, 2, 0, 4, 1, 1), seed)
        assert_same(trained_loss(make_rloo(RLOO), rows), plain_rloo(RLOO, rows), rows)


def test_sampled_divergences_have_the_gradient_of_the_reverse_kl_in_expectation():
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 1, 12, generator=generator, dtype=torch.float64)
    logp, logq = logits.requires_grad_().log_softmax(-1)[0], teacher.log_softmax(-1)[0]
    algorithm = make_distillation(DistillationSettings(1.0, "sampled_token", 1.0, replace(GRPO, loss_type="dapo")))
    # Each id is the completion of one record, weighted by its probability: the expectation without sampling.
    records = [
        replace(record(i, 0.0, length=1), old=logp[i : i + 1].detach(), reference=logq[i : i + 1]) for i in range(12)
    ]
    rows = [Row(logp[i : i + 1], logp[:1] * 0, r.old, r.reference, r.old, 0.0) for i, r in enumerate(records)]
    advantages_T = torch.cat(algorithm.advantages(records, {}).per_token)
    tokens = token_batch(rows, algorithm.reduction, "token", advantages_T=advantages_T, weights_U=logp.exp().detach())
    (found,) = torch.autograd.grad((tokens.weights_U * algorithm.loss(logp, tokens)).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(naive_divergence(logits, teacher, 1.0).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_sequence_ratio_past_float32_has_a_zero_gradient_instead_of_nan():
    tokens = TokenBatch(
        torch.zeros(200, dtype=torch.int64), 1, torch.ones(1), torch.ones(200), old_T=torch.full((200,), -2.0)
    )
    logprobs_T = torch.full((200,), -1.0, requires_grad=True)
    loss_B = make_rloo(RLOO).loss(logprobs_T, tokens)
    loss_B.sum().backward()
    assert loss_B.item() == pytest.approx(-1.2)
    assert (logprobs_T.grad == 0.0).all()


@pytest.mark.parametrize(
    "algorithm",
    [
        make_grpo(replace(GRPO, beta=0.1, delta=2.0, entropy_bonus=EntropyBonus(0.1))),
        make_grpo(replace(GRPO, importance_level="sequence", beta=0.1, bias_corrected_kl=True)),
        make_grpo(CISPO),
        make_rloo(RLOO),
        make_supervised(),
    ],
    ids=["token", "sequence", "cispo", "rloo", "sft"],
)
def test_losses_and_metrics_run_on_fake_tensors_and_so_never_wait_for_the_device(algorithm):
    with FakeTensorMode():
        tokens = TokenBatch(
            sequences_T=torch.empty(8, dtype=torch.int64),
            num_sequences=3,
            weights_U=torch.empty(3 if algorithm.unit == "sequence" else 8),
            advantages_T=torch.empty(8),
            sampling_T=torch.empty(8),
            old_T=torch.empty(8),
            reference_T=torch.empty(8),
            coefficients={"entropy_coef": 0.1},
        )
        logprobs_T, entropy_T = torch.empty(8, requires_grad=True), torch.empty(8)
        weighted_loss(algorithm, tokens, logprobs_T, entropy_T).backward()
        metrics = algorithm.measure(logprobs_T.detach(), entropy_T, tokens)
    assert logprobs_T.grad.shape == (8,)
    assert all(metric.total.shape == () for metric in metrics.values())
