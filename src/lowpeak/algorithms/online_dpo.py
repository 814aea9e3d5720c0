"""Online DPO (arXiv 2402.04792): of each group the best and the worst completion are a pair, which DPO's loss trains on.

With the log-ratio of a completion `log_ratio = sum(logprob - reference)` over its counted tokens, a pair's logit is
`h = log_ratio(chosen) - log_ratio(rejected)`, and its loss

    sigmoid   -log(sigmoid(beta * h))     DPO's, arXiv 2305.18290, equation 7
    ipo       (h - 1 / (2 * beta))^2      arXiv 2310.12036, equation 17, where beta is called tau; sums, not means, of tokens

Advantages say which is which: +1 for the tokens of the chosen row, -1 for those of the rejected one.

Different from the paper: any number of completions from which a pair is chosen, rewards of any kind beside a judge's, and
groups without a difference are left out and counted. Shapes: T counted tokens, B rows, U pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lowpeak.algorithms.advantages import reward_metrics
from lowpeak.algorithms.algorithm import Advantages, Algorithm, Selection
from lowpeak.algorithms.group_filter import all_equal, loss_mask, rows_by_group
from lowpeak.algorithms.metrics import mean_of, measure_pass
from lowpeak.algorithms.reduction import pair_mean
from lowpeak.algorithms.segment_ops import over_tokens, pair_sums, row_sums, row_values
from lowpeak.arguments import OnlineDPOSettings
from lowpeak.records import Metric, Record, TokenBatch


def make_online_dpo(settings: OnlineDPOSettings) -> Algorithm:
    """Online DPO as functions of tensors; its one number is beta, which moves with the epochs."""
    return Algorithm(
        name="online_dpo",
        unit="pair",
        needs=frozenset({"reference"}),
        select=partial(select_pairs, settings),
        advantages=partial(pair_advantages, settings),
        reduction=pair_mean,
        loss=partial(pair_loss, settings),
        measure=measure_pairs,
        idle=True,
        schedule=partial(beta_of, settings),
    )


def select_pairs(settings: OnlineDPOSettings, records: Sequence[Record]) -> Selection:
    """The best and the worst row of each group; a group without a difference has no pair, and is missing.

    Its metrics are of all that was judged: rewards, TRL's `objective/scores` (rewards after the penalty) and their margin
    within pairs, the share that ended by itself, pairs and ties.
    """
    groups, scores = len(rows_by_group(records)), scores_of(settings, records)
    pairs = list(_pairs(records, scores))
    known = [score for score in scores if not math.isnan(score)]
    margins = [scores[best] - scores[worst] for best, worst in pairs]
    ended = [record.completion.finish_reason == "stop" for record in records]
    metrics = reward_metrics(records) | {
        "objective/scores": Metric(sum(known), float(len(known))),
        "objective/scores_margin": Metric(sum(margins), float(len(margins))),
        "val/contain_eos_token": Metric(float(sum(ended)), float(len(ended))),
        "num_pairs": Metric(float(len(pairs)), 1.0, "sum"),
        "num_ties": Metric(float(groups - len(pairs)), 1.0, "sum"),
    }
    return Selection(tuple(sorted(row for pair in pairs for row in pair)), groups - len(pairs), metrics)


def scores_of(settings: OnlineDPOSettings, records: Sequence[Record]) -> list[float]:
    """Rewards, less the penalty where a completion did not end by itself; NaN for rows that can be in no pair.

    Such have no reward, or no token that counts.
    """
    return [
        record.reward - settings.missing_eos_penalty * (record.completion.finish_reason != "stop")
        if bool(loss_mask(record.completion, settings.mask_truncated).any())
        else math.nan
        for record in records
    ]


def _pairs(records: Sequence[Record], scores: Sequence[float]) -> Iterator[tuple[int, int]]:
    """(best, worst) of each group that has a difference; of several alike the first."""
    for rows in rows_by_group(records).values():
        known = [row for row in rows if not math.isnan(scores[row])]
        if not all_equal(scores[row] for row in known):
            yield max(known, key=lambda row: scores[row]), min(known, key=lambda row: scores[row])


def pair_advantages(settings: OnlineDPOSettings, records: Sequence[Record], state: Mapping[str, float]) -> Advantages:
    """+1 for a pair's chosen row and -1 for its rejected one, 0 for rows of no pair: one number for all of a row's tokens."""
    signs = [0.0] * len(records)
    for best, worst in _pairs(records, scores_of(settings, records)):
        signs[best], signs[worst] = 1.0, -1.0
    rows = zip(records, signs, strict=True)
    return Advantages(tuple(torch.full((len(record.completion),), sign) for record, sign in rows), {})


def pair_loss(settings: OnlineDPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """The loss of each pair, by its logit (see above): [U]."""
    assert tokens.reference_T is not None, "a pair's logit needs the reference's log-probs"
    beta = tokens.coefficients["beta"]
    logit_U = pair_sums(row_sums(tokens.advantages_T * (logprobs_T - tokens.reference_T), tokens), tokens)
    if settings.loss_type == "ipo":
        return (logit_U - 1.0 / (2.0 * beta)).square()
    return -logsigmoid(beta * logit_U)


def measure_pairs(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
    """TRL's metrics of pairs, over counted tokens and trained pairs alone.

    `rewards/*` are DPO's implicit ones, `beta * log_ratio`; `objective/kl` and `objective/entropy` are estimates for a whole
    completion by its own log-probs.
    """
    assert tokens.reference_T is not None, "a pair's rewards need the reference's log-probs"
    assert tokens.pairs_B is not None, "the unit is a pair"
    beta = tokens.coefficients["beta"]
    counted_U = (tokens.weights_U > 0).to(logprobs_T.dtype)
    counted_B = counted_U.index_select(0, tokens.pairs_B)
    sign_B = row_values(tokens.advantages_T, tokens)
    chosen_B, rejected_B = counted_B * (sign_B > 0), counted_B * (sign_B < 0)
    sums_B = row_sums(logprobs_T, tokens)
    ratio_B = row_sums(logprobs_T - tokens.reference_T, tokens)
    margin_U = pair_sums(sign_B * ratio_B, tokens) * beta
    return {
        **measure_pass(logprobs_T, entropy_T, tokens, over_tokens(counted_B, tokens)),
        "rewards/chosen": mean_of(beta * ratio_B, chosen_B),
        "rewards/rejected": mean_of(beta * ratio_B, rejected_B),
        "rewards/margins": mean_of(margin_U, counted_U),
        "rewards/accuracies": mean_of((margin_U > 0).to(counted_U.dtype), counted_U),
        "logps/chosen": mean_of(sums_B, chosen_B),
        "logps/rejected": mean_of(sums_B, rejected_B),
        "objective/kl": mean_of(ratio_B, counted_B),
        "objective/entropy": mean_of(-sums_B, counted_B),
        "objective/non_score_reward": mean_of(-beta * ratio_B, counted_B),
        "beta": Metric(beta),
    }


def beta_of(settings: OnlineDPOSettings, step: int, epoch: float) -> dict[str, float]:
    """The beta of the epoch that the step is in; the last one for all epochs after it."""
    return {"beta": settings.betas[min(int(epoch), len(settings.betas) - 1)]}
