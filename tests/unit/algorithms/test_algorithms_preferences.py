"""DPO and KTO: losses and metrics against the formulas written out, pair by pair and in Python's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from algorithm_cases import gradients, ragged_rows

from lowpeak.algorithms.dpo import dpo_loss, make_dpo
from lowpeak.algorithms.kto import kto_loss, make_kto
from lowpeak.algorithms.metrics import measure_top1
from lowpeak.arguments.preferences import DPOLossType, DPOSettings, KTOSettings
from lowpeak.records import TokenBatch

PAIRS = [(0, 3), (1, 2), (4, 5)]  # the chosen sequence and the rejected one
LENGTHS = (3, 1, 6, 2, 5, 4)
TAIL = 0.25
SETTINGS = DPOSettings(beta=0.3, ld_alpha=TAIL, label_smoothing=0.2, discopop_tau=0.5)


def weights_of(i):
    """Weights of a sequence's tokens: less beyond the length of its pair's shorter one."""
    shortest = next(min(LENGTHS[k] for k in pair) for pair in PAIRS if i in pair)
    return [1.0 if t < shortest else TAIL for t in range(LENGTHS[i])]


def token_batch(rows, **changes):
    lengths = torch.tensor(LENGTHS)
    signs = [1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
    chosen_tokens = sum(LENGTHS[chosen] for chosen, _ in PAIRS)
    weights = [sign * weight for i, sign in enumerate(signs) for weight in weights_of(i)]
    shares = [len(PAIRS) / chosen_tokens if sign > 0 else 0.0 for sign in signs]
    batch = TokenBatch(
        sequences_T=torch.repeat_interleave(torch.arange(6), lengths),
        num_sequences=6,
        weights_U=torch.full((3,), 1 / 3, dtype=torch.float64),
        advantages_T=torch.tensor(weights, dtype=torch.float64),
        reference_T=torch.cat([row.reference for row in rows]),
        returns_T=torch.repeat_interleave(torch.tensor(shares, dtype=torch.float64), lengths),
        pairs_B=torch.tensor([0, 1, 1, 0, 2, 2]),
    )
    return replace(batch, **changes)


def s(x):
    return 1 / (1 + torch.exp(-x))


def plain_pair(name, rows, chosen, rejected):
    """The loss of a pair as its paper has it."""
    b, e = SETTINGS.beta, SETTINGS.label_smoothing
    ratios = [
        sum(w * (p - q) for w, p, q in zip(weights_of(i), rows[i].logprobs, rows[i].reference, strict=True))
        for i in (chosen, rejected)
    ]
    (c, j), h = ratios, ratios[0] - ratios[1]
    mean = c / LENGTHS[chosen] - j / LENGTHS[rejected]
    share = s(b * h / SETTINGS.discopop_tau)
    p, q = s(b * h), s(-b * h)
    return {
        "sigmoid": lambda: -torch.log(p),
        "hinge": lambda: max(1 - b * h, 0 * h),
        "ipo": lambda: (mean - 1 / (2 * b)) ** 2,
        "sigmoid_norm": lambda: -torch.log(s(b * mean)),
        "robust": lambda: (-(1 - e) * torch.log(p) + e * torch.log(q)) / (1 - 2 * e),
        "exo_pair": lambda: p * torch.log(p / (1 - e)) + q * torch.log(q / e),
        "bco_pair": lambda: -torch.log(s(b * c)) - torch.log(s(-b * j)),
        "nca_pair": lambda: -torch.log(s(b * c)) - 0.5 * torch.log(s(-b * c)) - 0.5 * torch.log(s(-b * j)),
        "sppo_hard": lambda: (c - 0.5 / b) ** 2 + (j + 0.5 / b) ** 2,
        "apo_zero": lambda: 1 - s(b * c) + s(b * j),
        "apo_down": lambda: s(b * c) + 1 - s(b * h),
        "discopop": lambda: -(1 - share) * torch.log(p) + share * torch.exp(-b * h),
        # The mean over all chosen tokens, of which this pair has a part.
        "sft": lambda: -rows[chosen].logprobs.sum() * len(PAIRS) / sum(LENGTHS[i] for i, _ in PAIRS),
    }[name]()


@pytest.mark.parametrize("name", get_args(DPOLossType))
def test_a_loss_of_pairs_is_the_papers_in_value_and_every_gradient(name):
    rows = ragged_rows(LENGTHS)
    tokens, logprobs_T = token_batch(rows), torch.cat([row.logprobs for row in rows])
    loss_U = dpo_loss(replace(SETTINGS, losses=((name, 1.0),)), logprobs_T, tokens)
    plain = sum(plain_pair(name, rows, *pair) for pair in PAIRS) / 3
    ours = (tokens.weights_U * loss_U).sum()
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(ours, rows), gradients(plain, rows), rtol=1e-10, atol=1e-12)
    both = dpo_loss(replace(SETTINGS, losses=((name, 0.5), ("sigmoid", 2.0))), logprobs_T, tokens)
    alone = dpo_loss(replace(SETTINGS, losses=(("sigmoid", 1.0),)), logprobs_T, tokens)
    torch.testing.assert_close(both, 0.5 * loss_U + 2.0 * alone)


def f_of(kind, ratio):
    """The f of an f-divergence at a ratio of probabilities (f-DPO, table 1); of alpha by its integral from 1."""
    return {
        "forward_kl": lambda: ratio - torch.log(ratio),  # its slope is 1 - 1 / ratio
        "js_divergence": lambda: ratio * torch.log(ratio) - (ratio + 1) * torch.log((ratio + 1) / 2),
        "alpha_divergence": lambda: (ratio**0.7 / 0.7 - ratio) / (0.7 - 1),
    }[kind]()


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "sft"])
@pytest.mark.parametrize("kind", ["forward_kl", "js_divergence", "alpha_divergence"])
def test_an_f_divergence_replaces_log_ratios_by_the_slope_of_f(kind, loss_type):
    rows = ragged_rows(LENGTHS)
    logprobs_T = torch.cat([row.logprobs for row in rows])
    settings = replace(SETTINGS, losses=((loss_type, 1.0),), ld_alpha=1.0, f_divergence=kind, f_alpha=0.7)
    signs = torch.repeat_interleave(torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0]).double(), torch.tensor(LENGTHS))
    loss_U = dpo_loss(settings, logprobs_T, token_batch(rows, advantages_T=signs))
    for loss, (chosen, rejected) in zip(loss_U, PAIRS, strict=True):
        slopes = []
        for i in (chosen, rejected):
            ratio = (rows[i].logprobs.detach() - rows[i].reference).sum().exp().requires_grad_()
            slopes.append(torch.autograd.grad(f_of(kind, ratio), ratio)[0])
        difference, means = slopes[0] - slopes[1], slopes[0] / LENGTHS[chosen] - slopes[1] / LENGTHS[rejected]
        expected = {
            "sigmoid": -torch.log(s(0.3 * difference)),
            "ipo": (means - 1 / 0.6) ** 2,
            "sft": plain_pair("sft", rows, chosen, rejected),
        }[loss_type]
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)


def test_metrics_of_pairs_are_over_weighted_pairs_with_weighted_log_ratios():
    rows = ragged_rows(LENGTHS)
    tokens = token_batch(rows, weights_U=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    logprobs_T = torch.cat([row.logprobs for row in rows]).detach()
    found = {k: metric.value() for k, metric in make_dpo(SETTINGS).measure(logprobs_T, None, tokens).items()}
    sums = [sum(w * p for w, p in zip(weights_of(i), rows[i].logprobs.tolist(), strict=True)) for i in range(6)]
    bases = [sum(w * p for w, p in zip(weights_of(i), rows[i].reference.tolist(), strict=True)) for i in range(6)]
    rewards = [0.3 * (p - q) for p, q in zip(sums, bases, strict=True)]
    margins = [rewards[0] - rewards[3], rewards[1] - rewards[2]]
    expected = {
        "rewards/chosen": (rewards[0] + rewards[1]) / 2,
        "rewards/rejected": (rewards[3] + rewards[2]) / 2,
        "rewards/margins": sum(margins) / 2,
        "rewards/accuracies": sum(margin > 0 for margin in margins) / 2,
        "logps/chosen": (sums[0] + sums[1]) / 2,
        "logps/rejected": (sums[3] + sums[2]) / 2,
    }
    assert found == pytest.approx(expected)
    likeliest_T = torch.arange(len(logprobs_T)) % 3 == 0  # tokens 0 to 3 are those of sequences 0 and 1
    assert measure_top1(likeliest_T, tokens)["mean_token_accuracy"].value() == pytest.approx(2 / 4)


KTO = KTOSettings(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
LABELS = [True, False, True, True, False, True]


def labelled_batch(rows, kl, labels=LABELS):
    lengths = torch.tensor(LENGTHS)
    shares = torch.tensor([(1 if x else -1) / labels.count(x) for x in labels], dtype=torch.float64)
    return TokenBatch(
        sequences_T=torch.repeat_interleave(torch.arange(6), lengths),
        num_sequences=6,
        weights_U=torch.full((6,), 1 / 6, dtype=torch.float64),
        advantages_T=torch.repeat_interleave(shares, lengths),
        reference_T=torch.cat([row.reference for row in rows]),
        returns_T=torch.full((sum(LENGTHS),), kl, dtype=torch.float64),
        sequence_share=1 / 6,
    )


@pytest.mark.parametrize("kl", [0.0, 0.8])
def test_ktos_loss_and_metrics_are_the_papers(kl):
    rows = ragged_rows(LENGTHS)
    tokens, logprobs_T = labelled_batch(rows, kl), torch.cat([row.logprobs for row in rows])
    plain, rewards = 0.0, []
    for row, label in zip(rows, LABELS, strict=True):
        ratio = sum(row.logprobs - row.reference)
        rewards.append(0.3 * float(ratio.detach()))
        plain = plain + (1.5 * (1 - s(0.3 * (ratio - kl))) if label else 0.5 * (1 - s(0.3 * (kl - ratio))))
    ours = (tokens.weights_U * kto_loss(KTO, logprobs_T, tokens)).sum()
    torch.testing.assert_close(ours, plain / 6, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(ours, rows), gradients(plain / 6, rows), rtol=1e-10, atol=1e-12)
    measured = make_kto(KTO).measure(logprobs_T.detach(), None, tokens)
    found = {name: metric.value() for name, metric in measured.items()}
    chosen, rejected = ([r for r, x in zip(rewards, LABELS, strict=True) if x is label] for label in (True, False))
    means = sum(chosen) / 4, sum(rejected) / 2
    names = "rewards/chosen", "rewards/rejected", "rewards/margins", "kl"
    assert [found[name] for name in names] == pytest.approx([*means, means[0] - means[1], kl])


def test_a_step_with_one_label_has_no_margin():
    rows = ragged_rows(LENGTHS)
    tokens = labelled_batch(rows, 0.0, [True] * 6)
    measured = make_kto(KTO).measure(torch.cat([row.logprobs for row in rows]).detach(), None, tokens)
    assert (float(measured["rewards/margins"].count), float(measured["rewards/rejected"].count)) == (0.0, 0.0)
