"""How the drift of an engine that samples with weights of its own is corrected: TRL's arguments, and a small record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lowpeak.arguments.declare import NOT_NEGATIVE, above_zero, if_on, in_vllm, one_of, require
from lowpeak.arguments.vllm import USES_VLLM

CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

_CORRECTED = (USES_VLLM, if_on("vllm_importance_sampling_correction"))


@dataclass(repr=False)
class CorrectionArguments:
    """Whether the policy loss is weighed by how likely the trainer makes a completion over how likely vLLM did, and how."""

    vllm_importance_sampling_correction: bool = in_vllm(
        True,
        "Weigh the policy loss by how likely the trainer makes a completion, over how likely vLLM did.",
        acts=USES_VLLM,
    )
    vllm_importance_sampling_mode: str = in_vllm(
        "sequence_mask",
        "That weight per token or per completion, cut to its bounds or 0 beyond them: token_truncate, token_mask, "
        "sequence_truncate or sequence_mask.",
        one_of(CorrectionMode),
        _CORRECTED,
    )
    vllm_importance_sampling_clip_max: float | None = in_vllm(
        3.0, "The weight's upper bound (None: none).", above_zero(), _CORRECTED
    )
    vllm_importance_sampling_clip_min: float | None = in_vllm(
        None, "The weight's lower bound (None: none).", NOT_NEGATIVE, _CORRECTED
    )


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


def resolve_correction(args: Any) -> Correction | None:
    """Return the correction of a run, None without vLLM or where it is off; ArgumentError for bounds that bound nothing."""
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
        f"vllm_importance_sampling_mode={mode!r} cuts weights to their bounds, and there is none: give "
        "vllm_importance_sampling_clip_max, or vllm_importance_sampling_clip_min.",
    )
    return Correction(mode.startswith("sequence"), mode.endswith("mask"), least, most)
