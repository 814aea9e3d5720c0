"""DPO (Rafailov et al. 2023, arXiv 2305.18290) and other losses on pairs of a dataset, as in TRL 1.16.

With a completion's log-ratio `sum(weight * (logprob - reference))` over its tokens, c and j of the chosen and the rejected one,
c' and j' divided by the number of tokens, h = c - j, s the sigmoid, b = beta and e = label_smoothing:

    sigmoid        -log s(b h)                                               DPO, equation 7
    hinge          max(0, 1 - b h)                                           SLiC, arXiv 2305.10425
    ipo            (c' - j' - 1 / (2 b))^2                                   arXiv 2310.12036, equation 17
    sigmoid_norm   -log s(b (c' - j'))                                       arXiv 2411.15124
    robust         ((e - 1) log s(b h) + e log s(-b h)) / (1 - 2 e)          arXiv 2403.00409
    exo_pair       KL(s(b h), s(-b h) || 1 - e, e)                           arXiv 2402.00856, equation 16
    bco_pair       -log s(b c) - log s(-b j)                                 arXiv 2404.04656, without its shift
    nca_pair       -log s(b c) - log s(-b c) / 2 - log s(-b j) / 2           arXiv 2402.05369
    sppo_hard      (c - 1 / (2 b))^2 + (j + 1 / (2 b))^2                     arXiv 2405.00675
    apo_zero       1 - s(b c) + s(b j)                                       arXiv 2408.06266, equation 7
    apo_down       s(b c) + 1 - s(b h)                                       arXiv 2408.06266, equation 8
    discopop       -(1 - m) log s(b h) + m exp(-b h), m = s(b h / tau)       arXiv 2406.08414, equation 5
    sft            -mean log-prob of the step's chosen tokens

The loss of a pair is a weighted sum of these: MPO (arXiv 2411.10442) is sigmoid, bco_pair and sft.

With `f_divergence_type` f (f-DPO, arXiv 2309.16240), c and j are f'(exp(c)) and f'(exp(j)): c, 1 - exp(-c), log 2 + log s(c), or
(exp((a - 1) c) - 1) / (a - 1) with a = f_alpha_divergence_coef; up to a constant. Exponents are at most 80, as TRL's of the last
one, so that losses stay finite; beyond that the gradient is 0.

The reader of the dataset marks the pair: advantages are +weight at the chosen completion's tokens and -weight at the rejected
one's. Weights are 1, or under LD-DPO (arXiv 2409.06411) `ld_alpha` beyond the length of the shorter one. For sft, returns are
the share of a step's pair per chosen token. Online DPO's ipo is of sums, this one of means per token, as in TRL.

Shapes: T loss tokens of a micro-batch, B of its sequences, U of its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lowpeak.algorithms.algorithm import Algorithm
from lowpeak.algorithms.groups import advantages_of_dataset, select_all
from lowpeak.algorithms.loss_terms import pair_mean, sum_per_pair, sum_per_sequence
from lowpeak.algorithms.metrics import measure_pairs
from lowpeak.arguments import DPOSettings
from lowpeak.records import TokenBatch


def make_dpo(settings: DPOSettings) -> Algorithm:
    """Return DPO: pairs of equal weight, scored by the reference."""
    return Algorithm(
        name="dpo",
        unit="pair",
        needs=frozenset({"reference"} if settings.scores_in_steps else ()),
        select=select_all,
        advantages=advantages_of_dataset,
        reduction=pair_mean,
        loss=partial(dpo_loss, settings),
        measure=partial(measure_pairs, settings.beta),
        skip_zero_advantage=False,
        top1=True,
    )


@dataclass(frozen=True)
class PairTerms:
    """The log-ratios of each pair, the same per token, and the pair's share of the step's chosen log-prob: [U] each."""

    chosen_U: Tensor
    rejected_U: Tensor
    chosen_mean_U: Tensor
    rejected_mean_U: Tensor
    chosen_logprob_U: Tensor

    @property
    def difference_U(self) -> Tensor:
        return self.chosen_U - self.rejected_U

    @property
    def mean_difference_U(self) -> Tensor:
        return self.chosen_mean_U - self.rejected_mean_U


def dpo_loss(settings: DPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the weighted sum of the losses of each pair: [U]."""
    terms = pair_terms(logprobs_T, tokens, partial(_divergence_slope, settings))
    losses = [weight * _LOSSES[name](settings, terms) for name, weight in settings.losses]
    return sum(losses[1:], losses[0])


def pair_terms(logprobs_T: Tensor, tokens: TokenBatch, slope: Callable[[Tensor], Tensor]) -> PairTerms:
    """Return the terms of each pair from the advantages, which mark its two completions; `slope` maps log-ratios."""
    assert tokens.reference_T is not None, "a log-ratio needs the reference's log-probs"
    is_chosen_B = sum_per_sequence(tokens.advantages_T, tokens) > 0
    # Advantages are negative at the rejected completion's tokens: its ratio gets its own sign back before the slope, and the minus
    # of the rejected terms removes the second one.
    sign_B = torch.where(is_chosen_B, 1.0, -1.0).to(logprobs_T.dtype)
    ratio_B = sign_B * sum_per_sequence(tokens.advantages_T * (logprobs_T - tokens.reference_T), tokens)
    signed_B = sign_B * slope(ratio_B)
    mean_B = signed_B / sum_per_sequence(torch.ones_like(logprobs_T), tokens).clamp(min=1.0)
    shares_T = torch.zeros_like(logprobs_T) if tokens.returns_T is None else tokens.returns_T
    return PairTerms(
        sum_per_pair(torch.where(is_chosen_B, signed_B, 0.0), tokens),
        -sum_per_pair(torch.where(is_chosen_B, 0.0, signed_B), tokens),
        sum_per_pair(torch.where(is_chosen_B, mean_B, 0.0), tokens),
        -sum_per_pair(torch.where(is_chosen_B, 0.0, mean_B), tokens),
        sum_per_pair(sum_per_sequence(shares_T * logprobs_T, tokens), tokens),
    )


def _divergence_slope(settings: DPOSettings, ratio_B: Tensor) -> Tensor:
    """Return f' at the ratio whose logarithm is given."""
    if settings.f_divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio_B)
    alpha = {"forward_kl": 0.0, "alpha_divergence": settings.f_alpha}.get(settings.f_divergence, 1.0)
    power = alpha - 1
    return torch.expm1((power * ratio_B).clamp(max=80)) / power if power else ratio_B


def _exo_pair(settings: DPOSettings, terms: PairTerms) -> Tensor:
    smoothing = torch.tensor(settings.label_smoothing, dtype=terms.chosen_U.dtype)
    logit_U = settings.beta * terms.difference_U
    return logit_U.sigmoid() * (logsigmoid(logit_U) - torch.log1p(-smoothing)) + (-logit_U).sigmoid() * (
        logsigmoid(-logit_U) - smoothing.log()
    )


def _robust(settings: DPOSettings, terms: PairTerms) -> Tensor:
    smoothing, logit_U = settings.label_smoothing, settings.beta * terms.difference_U
    return (smoothing * logsigmoid(-logit_U) - (1 - smoothing) * logsigmoid(logit_U)) / (1 - 2 * smoothing)


def _nca_pair(settings: DPOSettings, terms: PairTerms) -> Tensor:
    chosen_U, rejected_U = settings.beta * terms.chosen_U, settings.beta * terms.rejected_U
    return -logsigmoid(chosen_U) - 0.5 * logsigmoid(-chosen_U) - 0.5 * logsigmoid(-rejected_U)


def _discopop(settings: DPOSettings, terms: PairTerms) -> Tensor:
    logit_U = settings.beta * terms.difference_U
    share_U = (logit_U / settings.discopop_tau).sigmoid()
    return share_U * (-logit_U).exp() - (1 - share_U) * logsigmoid(logit_U)


_LOSSES: Mapping[str, Callable[[DPOSettings, PairTerms], Tensor]] = {
    "sigmoid": lambda s, terms: -logsigmoid(s.beta * terms.difference_U),
    "hinge": lambda s, terms: torch.relu(1 - s.beta * terms.difference_U),
    "ipo": lambda s, terms: (terms.mean_difference_U - 0.5 / s.beta).square(),
    "sigmoid_norm": lambda s, terms: -logsigmoid(s.beta * terms.mean_difference_U),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "bco_pair": lambda s, terms: -logsigmoid(s.beta * terms.chosen_U) - logsigmoid(-s.beta * terms.rejected_U),
    "nca_pair": _nca_pair,
    "sppo_hard": lambda s, terms: (terms.chosen_U - 0.5 / s.beta).square() + (terms.rejected_U + 0.5 / s.beta).square(),
    "apo_zero": lambda s, terms: 1 - (s.beta * terms.chosen_U).sigmoid() + (s.beta * terms.rejected_U).sigmoid(),
    "apo_down": lambda s, terms: (s.beta * terms.chosen_U).sigmoid() + 1 - (s.beta * terms.difference_U).sigmoid(),
    "discopop": _discopop,
    "sft": lambda s, terms: -terms.chosen_logprob_U,
}
