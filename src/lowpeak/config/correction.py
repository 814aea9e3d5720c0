"""How the drift of an engine that samples with weights of its own is corrected: TRL's arguments to a small record."""

from __future__ import annotations

from typing import Any

from lowpeak.config.algorithm import Correction
from lowpeak.config.inapplicable import refuse_idle, require

_BOUNDS = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min")


def resolve_correction(args: Any) -> Correction | None:
    """The correction of a run, None without vLLM or where it is off; ArgumentError for bounds that bound nothing."""
    if not args.use_vllm:
        return None
    off = "vllm_importance_sampling_correction is off; turn it on or remove it"
    refuse_idle(args, ("vllm_importance_sampling_mode", *_BOUNDS), args.vllm_importance_sampling_correction, off)
    if not args.vllm_importance_sampling_correction:
        return None
    mode, most, least = (getattr(args, name) for name in ("vllm_importance_sampling_mode", *_BOUNDS))
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
