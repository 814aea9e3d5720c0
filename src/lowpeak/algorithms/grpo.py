"""GRPO and its family (arXiv 2402.03300): the rewards of a group are each other's baseline.

Special cases, said as such:
1. Without std scaling and with `dr_grpo`'s weights it is Dr. GRPO (arXiv 2503.20783).
2. With an asymmetric clip, weights per token and equal groups dropped it is DAPO (arXiv 2503.14476).
3. With importance per sequence it is GSPO (arXiv 2507.18071).
4. With CISPO's loss it is MiniMax-M1's (arXiv 2506.13585).

Different from the paper: the KL is off unless `beta` says otherwise, and its estimator can be chosen.
"""

from __future__ import annotations

from functools import partial

from lowpeak.algorithms.advantages import grpo_advantages
from lowpeak.algorithms.algorithm import Algorithm, Need
from lowpeak.algorithms.entropy import entropy_schedule, next_entropy_state, start_entropy_state
from lowpeak.algorithms.group_filter import select_all, select_unequal
from lowpeak.algorithms.losses import grpo_loss
from lowpeak.algorithms.metrics import measure_grpo
from lowpeak.algorithms.reduction import grpo_reduction
from lowpeak.algorithms.rollout_correction import corrected_advantages
from lowpeak.arguments import GRPOSettings


def make_grpo(settings: GRPOSettings) -> Algorithm:
    """GRPO as functions of tensors; a row without an advantage is idle unless a KL or an entropy bonus acts on it."""
    needs: dict[Need, bool] = {
        "old": settings.score_old,
        "reference": settings.beta != 0.0,
        "entropy": settings.top_entropy_quantile < 1.0,
    }
    return Algorithm(
        name="grpo",
        unit=settings.importance_level,
        needs=frozenset(need for need, needed in needs.items() if needed),
        select=select_unequal if settings.drop_equal_groups else select_all,
        advantages=partial(corrected_advantages, settings, partial(grpo_advantages, settings)),
        reduction=grpo_reduction(settings),
        loss=partial(grpo_loss, settings),
        measure=partial(measure_grpo, settings),
        coupled=settings.step_correction is not None and settings.step_correction.per_sequence,
        idle=settings.beta == 0.0 and settings.entropy_bonus is None,
        entropy_bonus=settings.entropy_bonus is not None,
        state=start_entropy_state(settings.entropy_bonus),
        update=partial(next_entropy_state, settings.entropy_bonus),
        schedule=partial(entropy_schedule, settings.entropy_bonus),
    )
