"""What the algorithms can be told: a frozen record each, in which a value that cannot matter cannot be expressed.

What GRPO, RLOO and their corrections share is here; PPO and Online DPO have files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KLEstimator = Literal["k1", "k2", "k3"]
GRPOLossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
SupervisedLossType = Literal["nll", "dft"]
ImportanceLevel = Literal["token", "sequence"]
RewardScale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@dataclass(frozen=True)
class Correction:
    """How far an engine that samples with weights of its own is from the trainer, as a weight of the policy loss.

    The weight is old over sampled probability, of each token or of a whole completion (`per_sequence`); beyond the bounds it
    is 0 (`masks`), or else the bound itself. A bound of None is none.
    """

    per_sequence: bool
    masks: bool
    minimum: float | None
    maximum: float | None


@dataclass(frozen=True)
class EntropyBonus:
    """Entropy bonus with an optionally adaptive coefficient.

    With a `target`, the coefficient moves by `delta` a step, within [minimum, maximum]: up while the policy's entropy
    is below the target, down while above.
    """

    coef: float
    target: float | None = None
    delta: float = 0.0
    minimum: float = 0.0
    maximum: float = 1.0


@dataclass(frozen=True)
class GRPOSettings:
    """GRPO and its family. `clip_high` is an offset for every loss type: the ratio's ceiling is 1 + clip_high.

    `clip_low` and `delta` (a two-sided bound for negative advantages) do not exist for CISPO: None there.
    """

    loss_type: GRPOLossType
    importance_level: ImportanceLevel
    clip_low: float | None
    clip_high: float
    delta: float | None
    scale_rewards: RewardScale
    aggregation: Aggregation
    reward_weights: tuple[float, ...]
    beta: float
    kl_estimator: KLEstimator
    bias_corrected_kl: bool
    entropy_bonus: EntropyBonus | None
    top_entropy_quantile: float
    mask_truncated: bool
    max_completion_length: int
    drop_equal_groups: bool
    score_old: bool
    correction: Correction | None = None

    @property
    def step_correction(self) -> Correction | None:
        """The correction that each step forms with its own log-probs: old is not scored."""
        return None if self.score_old else self.correction

    @property
    def rollout_correction(self) -> Correction | None:
        """The correction that is fixed for the rollout: old is scored."""
        return self.correction if self.score_old else None


@dataclass(frozen=True)
class RLOOSettings:
    """RLOO (Ahmadian et al. 2024): KL in the reward, leave-one-out baseline, one ratio per sequence."""

    clip_low: float
    clip_high: float
    beta: float
    kl_estimator: KLEstimator
    normalize_advantages: bool
    reward_clip: tuple[float, float] | None
    mask_truncated: bool
    drop_equal_groups: bool
    score_old: bool
    correction: Correction | None = None

    @property
    def needs_old(self) -> bool:
        """Whether old log-probs are scored: for reuse, or for the KL in the reward."""
        return self.score_old or self.beta != 0.0

    @property
    def step_correction(self) -> Correction | None:
        """The correction that each step forms with its own log-probs: old is not scored."""
        return None if self.needs_old else self.correction

    @property
    def rollout_correction(self) -> Correction | None:
        """The correction that is fixed for the rollout: old is scored."""
        return self.correction if self.needs_old else None
