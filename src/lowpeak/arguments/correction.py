"""The importance sampling correction of the drift between vLLM's and the trainer's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowpeak.arguments.declare import NOT_NEGATIVE, above_zero, if_on, one_of, require, vllm_argument
from lowpeak.arguments.vllm import USES_VLLM

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
_CORRECTED = (USES_VLLM, if_on("vllm_importance_sampling_correction"))


@dataclass(repr=False)
class CorrectionArguments:
    """Arguments of the importance sampling correction between vLLM's and the trainer's probabilities (TRL's names)."""

    vllm_importance_sampling_correction: bool = vllm_argument(
        True,
        "Weigh the policy loss by the trainer's probability of a completion over vLLM's.",
        acts_if=USES_VLLM,
    )
    vllm_importance_sampling_mode: str = vllm_argument(
        "sequence_mask",
        "That weight per token or completion; beyond its bounds it is truncated to them, or 0 (mask): token_truncate, "
        "token_mask, sequence_truncate or sequence_mask.",
        one_of(CorrectionMode),
        _CORRECTED,
    )
    vllm_importance_sampling_clip_max: float | None = vllm_argument(
        3.0, "Upper bound of that weight (None: no bound).", above_zero(), _CORRECTED
    )
    vllm_importance_sampling_cap: float | None = vllm_argument(
        None,
        "TRL's older name of vllm_importance_sampling_clip_max.",
        acts_if=_CORRECTED,
        alias_of="vllm_importance_sampling_clip_max",
    )
    vllm_importance_sampling_clip_min: float | None = vllm_argument(
        None, "Lower bound of that weight (None: no bound).", NOT_NEGATIVE, _CORRECTED
    )


@dataclass(frozen=True)
class Correction:
    """Importance weight of the policy loss that corrects the drift between the engine and the trainer.

    The weight is the old probability over the sampled one, of each token or of a whole completion (`per_sequence`). Beyond its
    bounds it is 0 (`masks`), or else the bound. A bound of None does not exist.
    """

    per_sequence: bool
    masks: bool
    minimum: float | None
    maximum: float | None


class CorrectedSettings:
    """Settings of an algorithm whose correction each step computes, or, with scored old log-probs, is fixed for the rollout."""

    score_old: bool
    correction: Correction | None

    @property
    def needs_old(self) -> bool:
        """Whether old log-probs are scored."""
        return self.score_old

    @property
    def step_correction(self) -> Correction | None:
        """The correction that each step computes with its log-probs, if old log-probs are not scored."""
        return None if self.needs_old else self.correction

    @property
    def rollout_correction(self) -> Correction | None:
        """The correction that is fixed for the rollout, if old log-probs are scored."""
        return self.correction if self.needs_old else None


def resolve_correction(args: Any) -> Correction | None:
    """Return the correction of a run, None without vLLM or if it is off; ArgumentError for invalid bounds."""
    if not args.use_vllm or not args.vllm_importance_sampling_correction:
        return None
    mode = args.vllm_importance_sampling_mode
    most, least = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    require(
        most is None or least is None or least < most,
        f"vllm_importance_sampling_clip_min={least} must be below vllm_importance_sampling_clip_max={most}.",
    )
    require(
        mode.endswith("mask") or most is not None or least is not None,
        f"vllm_importance_sampling_mode={mode!r} truncates weights to their bounds, but none is set: set "
        "vllm_importance_sampling_clip_max or vllm_importance_sampling_clip_min.",
    )
    return Correction(mode.startswith("sequence"), mode.endswith("mask"), least, most)
