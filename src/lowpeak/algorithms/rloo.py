"""RLOO (arXiv 2402.14740): REINFORCE on whole completions, the other rows of the group as the baseline.

The KL is part of the reward, so it is fixed for the rollout and needs old and reference log-probs before advantages.
Different from the paper: a clipped ratio of sequences, which is 1 on-policy, so that a rollout can serve several steps.
"""

from __future__ import annotations

from functools import partial

from lowpeak.algorithms.advantages import rloo_advantages
from lowpeak.algorithms.algorithm import Algorithm, Need
from lowpeak.algorithms.group_filter import select_all, select_unequal
from lowpeak.algorithms.losses import rloo_loss
from lowpeak.algorithms.metrics import measure_rloo
from lowpeak.algorithms.reduction import sequence_mean
from lowpeak.algorithms.rollout_correction import corrected_advantages
from lowpeak.arguments import RLOOSettings


def make_rloo(settings: RLOOSettings) -> Algorithm:
    """RLOO as functions of tensors; a row without an advantage is always idle, since the KL is in the advantage."""
    needs: dict[Need, bool] = {
        "old": settings.needs_old,
        "reference": settings.beta != 0.0,
    }
    return Algorithm(
        name="rloo",
        unit="sequence",
        needs=frozenset(need for need, needed in needs.items() if needed),
        select=select_unequal if settings.drop_equal_groups else select_all,
        advantages=partial(corrected_advantages, settings, partial(rloo_advantages, settings)),
        reduction=sequence_mean,
        loss=partial(rloo_loss, settings),
        measure=partial(measure_rloo, settings),
        idle=True,
    )
