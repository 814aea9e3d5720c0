"""Online DPO (arXiv 2402.04792): DPO's loss on the best and the worst completion of each group.

With the log-ratio of a completion `log_ratio = sum(logprob - reference)` over its loss tokens, a pair's logit is
`h = log_ratio(chosen) - log_ratio(rejected)`, and its loss

    sigmoid   -log(sigmoid(beta * h))     DPO's, arXiv 2305.18290, equation 7
    ipo       (h - 1 / (2 * beta))^2      arXiv 2310.12036, equation 17, where beta is called tau; sums, not means, of tokens

Advantages mark the pair: +1 at the tokens of the chosen completion, -1 at those of the rejected one.

Different from the paper:
1. A group may have any number of completions; the pair is the best and the worst of them.
2. Rewards may come from any function, not only from a judge.
3. Groups without a difference are left out and counted.

Shapes: T loss tokens of a micro-batch, B of its sequences, U of its pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lowpeak.algorithms.algorithm import Advantages, Algorithm, Selection
from lowpeak.algorithms.groups import all_equal, constant_per_token, indices_by_group, loss_mask, reward_metrics
from lowpeak.algorithms.loss_terms import pair_mean, repeat_per_token, sum_per_pair, sum_per_sequence
from lowpeak.algorithms.metrics import masked_mean, measure_pairs, measure_pass
from lowpeak.arguments import OnlineDPOSettings
from lowpeak.errors import DataError
from lowpeak.records import Metric, Record, TokenBatch


def make_online_dpo(settings: OnlineDPOSettings) -> Algorithm:
    """Return Online DPO; its only coefficient is beta, which follows the epochs."""
    return Algorithm(
        name="online_dpo",
        unit="pair",
        needs=frozenset({"reference"}),
        select=partial(select_pairs, settings),
        advantages=partial(pair_advantages, settings),
        reduction=pair_mean,
        loss=partial(pair_loss, settings),
        measure=measure_online_pairs,
        skip_zero_advantage=True,
        schedule=partial(beta_of_epoch, settings),
    )


def select_pairs(settings: OnlineDPOSettings, records: Sequence[Record]) -> Selection:
    """Select the best and the worst record of each group; a group without a difference counts as missing.

    The metrics are over all records: rewards, TRL's `objective/scores` (rewards after the penalty) and their margin within
    pairs, the share of completions with an end-of-sequence token, the numbers of pairs and ties.
    """
    num_groups, scores = len(indices_by_group(records)), pair_scores(settings, records)
    pairs = list(_pairs(records, scores))
    known = [score for score in scores if not math.isnan(score)]
    margins = [scores[best] - scores[worst] for best, worst in pairs]
    stopped = [record.completion.finish_reason == "stop" for record in records]
    metrics = reward_metrics(records) | {
        "objective/scores": Metric(sum(known), float(len(known))),
        "objective/scores_margin": Metric(sum(margins), float(len(margins))),
        "val/contain_eos_token": Metric(float(sum(stopped)), float(len(stopped))),
        "num_pairs": Metric(float(len(pairs)), 1.0, "sum"),
        "num_ties": Metric(float(num_groups - len(pairs)), 1.0, "sum"),
    }
    return Selection(tuple(sorted(i for pair in pairs for i in pair)), num_groups - len(pairs), metrics)


def pair_scores(settings: OnlineDPOSettings, records: Sequence[Record]) -> list[float]:
    """Return each record's reward, less the penalty if its completion was truncated.

    NaN for a record that can be in no pair: without a reward, or without a loss token.
    """
    return [
        record.reward - settings.missing_eos_penalty * (record.completion.finish_reason != "stop")
        if bool(loss_mask(record.completion, settings.mask_truncated).any())
        else math.nan
        for record in records
    ]


def _pairs(records: Sequence[Record], scores: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield (best, worst) of each group that has a difference, of equal scores the first; DataError for different prompts."""
    for group in indices_by_group(records).values():
        known = [i for i in group if not math.isnan(scores[i])]
        num_prompts = len({records[i].prompt_ids for i in known})
        if num_prompts > 1:
            # DPO's partition function, which depends on the prompt, would not cancel in the logit.
            raise DataError(
                f"the {len(known)} completions of a group have {num_prompts} prompts, but Online DPO compares completions of one "
                "prompt: let reset (or rollout_func) add the same to all, by reset's argument seed, or use GRPO or RLOO."
            )
        if not all_equal(scores[i] for i in known):
            yield max(known, key=lambda i: scores[i]), min(known, key=lambda i: scores[i])


def pair_advantages(
    settings: OnlineDPOSettings, records: Sequence[Record], coefficients: Mapping[str, float]
) -> Advantages:
    """Return +1 for the tokens of a chosen completion, -1 for those of a rejected one, 0 outside of pairs."""
    signs_N = torch.zeros(len(records))
    for best, worst in _pairs(records, pair_scores(settings, records)):
        signs_N[best], signs_N[worst] = 1.0, -1.0
    return Advantages(constant_per_token(signs_N, records), {})


def pair_loss(settings: OnlineDPOSettings, logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return the loss of each pair by its logit: [U]."""
    assert tokens.reference_T is not None, "a pair's logit needs the reference's log-probs"
    beta = tokens.coefficients["beta"]
    log_ratio_B = sum_per_sequence(tokens.advantages_T * (logprobs_T - tokens.reference_T), tokens)
    logit_U = sum_per_pair(log_ratio_B, tokens)
    if settings.loss_type == "ipo":
        return (logit_U - 1.0 / (2.0 * beta)).square()
    return -logsigmoid(beta * logit_U)


def measure_online_pairs(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
    """Return TRL's metrics of pairs, over trained pairs.

    `rewards/*` are DPO's implicit rewards, `beta * log_ratio`. `objective/kl` and `objective/entropy` are estimates for a
    whole completion from its log-probs.
    """
    assert tokens.reference_T is not None, "a log-ratio needs the reference's log-probs"
    assert tokens.pairs_B is not None, "the unit must be a pair"
    beta = tokens.coefficients["beta"]
    mask_B = (tokens.weights_U > 0).to(logprobs_T.dtype).index_select(0, tokens.pairs_B)
    logprob_B = sum_per_sequence(logprobs_T, tokens)
    log_ratio_B = sum_per_sequence(logprobs_T - tokens.reference_T, tokens)
    return {
        **measure_pairs(beta, logprobs_T, entropy_T, tokens),
        **measure_pass(logprobs_T, None, tokens, repeat_per_token(mask_B, tokens)),
        "objective/kl": masked_mean(log_ratio_B, mask_B),
        "objective/entropy": masked_mean(-logprob_B, mask_B),
        "objective/non_score_reward": masked_mean(-beta * log_ratio_B, mask_B),
        "beta": Metric(beta),
    }


def beta_of_epoch(settings: OnlineDPOSettings, step: int, epoch: float) -> dict[str, float]:
    """Return the beta of the current epoch; the last one for all later epochs."""
    return {"beta": settings.betas[min(int(epoch), len(settings.betas) - 1)]}
