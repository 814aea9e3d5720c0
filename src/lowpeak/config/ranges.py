"""What values an argument may have, whatever the others say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, get_args

from lowpeak.config.algorithm import (
    Aggregation,
    CorrectionMode,
    GRPOLossType,
    ImportanceLevel,
    KLEstimator,
    RewardScale,
)
from lowpeak.config.inapplicable import said_as
from lowpeak.config.vllm import ModelImpl, Transport, VllmMode
from lowpeak.errors import ArgumentError

Range = tuple[Callable[[Any], bool], str]  # whether a value fits, and the end of the sentence that says so


def one_of(literal: Any, *unsaid: Any) -> Range:
    """The values of a Literal; `unsaid` ones are taken too, for scripts that were written for TRL."""
    values = get_args(literal)
    return lambda x: x in (*values, *unsaid), f"must be one of {', '.join(map(repr, values))}"


def padding_multiple(value: Any) -> int | None:
    """Return the multiple that rows are padded to; 1 for "auto" and None, as in TRL on CPUs and GPUs; None for anything else."""
    text = str(value).lower()
    if text in ("auto", "none", "null"):
        return 1
    return int(text) if text.isdigit() and int(text) >= 1 else None


def _is_port(number: int) -> bool:
    return 0 < number < 1 << 16


RANGES: dict[str, Range] = {
    "output_dir": (lambda x: str(x).strip() != "", "must name a folder"),
    "temperature": (lambda x: not x < 1e-6, "must be at least 1e-6 in training (evaluation is greedy as well)"),
    "top_p": (lambda x: 0 < x <= 1, "must be in (0, 1]"),
    "top_k": (lambda x: x >= 0, "must be 0 (all tokens) or more"),
    "min_p": (lambda x: x is None or 0 <= x <= 1, "must be in [0, 1]"),
    "repetition_penalty": (lambda x: x > 0, "must be above 0"),
    "epsilon": (lambda x: 0 <= x < 1, "must be in [0, 1): the ratio is clipped to 1 - epsilon from below"),
    "epsilon_high": (lambda x: x is None or x >= 0, "must be 0 or more: the ratio is clipped to 1 + epsilon_high"),
    "beta": (lambda x: x >= 0, "must be 0 or more"),
    "num_generations": (lambda x: x >= 1, "must be at least 1"),
    "num_generations_eval": (lambda x: x is None or x >= 1, "must be at least 1"),
    "max_completion_length": (lambda x: x >= 1, "must be at least 1 token"),
    "per_device_train_batch_size": (lambda x: x >= 1, "must be at least 1"),
    "gradient_accumulation_steps": (lambda x: x >= 1, "must be at least 1"),
    "steps_per_generation": (lambda x: x is None or x >= 1, "must be at least 1"),
    "learning_rate": (lambda x: 0 <= x < math.inf, "must be a finite number of 0 or more"),
    "weight_decay": (lambda x: x >= 0, "must be 0 or more"),
    "adam_beta1": (lambda x: 0 <= x < 1, "must be in [0, 1)"),
    "adam_beta2": (lambda x: 0 <= x < 1, "must be in [0, 1)"),
    "adam_epsilon": (lambda x: x >= 0, "must be 0 or more"),
    "max_grad_norm": (lambda x: x >= 0, "must be 0 (gradients are not clipped) or more"),
    "warmup_steps": (lambda x: x >= 0, "must be 0 or more"),
    "num_train_epochs": (lambda x: x > 0, "must be above 0"),
    "max_steps": (lambda x: x == -1 or x >= 1, "must be at least 1 (or -1, to go by num_train_epochs)"),
    "eval_delay": (lambda x: x >= 0, "must be 0 or more"),
    "save_total_limit": (lambda x: x is None or x >= 0, "must be 0 (all are kept) or more, or None"),
    "ddp_timeout": (lambda x: x > 0, "must be a number of seconds above 0"),
    "ddp_bucket_cap_mb": (lambda x: x is None or x > 0, "must be a number of MB above 0, or None"),
    "seed": (lambda x: 0 <= x < 2**32, "must be from 0 to 2**32 - 1"),
    "data_seed": (lambda x: x is None or 0 <= x < 2**32, "must be from 0 to 2**32 - 1, or None"),
    "num_iterations": (lambda x: x >= 1, "must be at least 1"),
    "top_entropy_quantile": (lambda x: 0 < x <= 1, "must be in (0, 1]"),
    "entropy_coef": (lambda x: x >= 0, "must be 0 or more"),
    "entropy_coef_min": (lambda x: x >= 0, "must be 0 or more"),
    "entropy_coef_delta": (lambda x: x >= 0, "must be 0 or more"),
    "entropy_target": (lambda x: x >= 0, "must be 0 or more"),
    "router_aux_loss_coef": (lambda x: x is None or x >= 0, "must be 0 or more, or None"),
    "reward_timeout": (lambda x: x is None or x > 0, "must be a number of seconds above 0"),
    "reward_failures": one_of(Literal["raise", "none"]),
    "overlong_prompts": one_of(Literal["error", "drop"]),
    "kl_estimator": one_of(KLEstimator),
    "loss_type": one_of(GRPOLossType),
    "importance_sampling_level": one_of(ImportanceLevel),
    "scale_rewards": one_of(RewardScale, True, False),
    "multi_objective_aggregation": one_of(Aggregation),
    "dynamic_sampling_rounds": (lambda x: x >= 0, "must be 0 (off) or more"),
    "ref_model_mixup_alpha": (lambda x: 0 <= x <= 1, "must be in [0, 1]"),
    "ref_model_sync_steps": (lambda x: x >= 1, "must be at least 1"),
    "micro_batch_tokens": (lambda x: x is None or x >= 2, "must be at least 2 tokens"),
    "logprob_chunk_size": (lambda x: x is None or x >= 1, "must be at least 1 token"),
    "kv_cache_bytes": (lambda x: x is None or x > 0, "must be a number of bytes above 0"),
    "pad_to_multiple_of": (
        lambda x: padding_multiple(x) is not None,
        "must be a whole number of 1 or more, 'auto', or None",
    ),
    "num_completions_to_print": (lambda x: x is None or x >= 1, "must be at least 1"),
    "per_device_eval_batch_size": (lambda x: x is None or x >= 1, "must be at least 1"),
    "max_length": (lambda x: x is None or x >= 2, "must be at least 2 tokens"),
    "vllm_mode": one_of(VllmMode),
    "vllm_model_impl": one_of(ModelImpl),
    "vllm_transport": one_of(Transport),
    "vllm_importance_sampling_mode": one_of(CorrectionMode),
    "vllm_importance_sampling_clip_max": (lambda x: x is None or x > 0, "must be above 0, or None"),
    "vllm_importance_sampling_clip_min": (lambda x: x is None or x >= 0, "must be 0 or more, or None"),
    "vllm_gpu_memory_utilization": (lambda x: 0 < x <= 1, "must be in (0, 1]"),
    "vllm_max_model_length": (lambda x: x is None or x >= 2, "must be at least 2 tokens"),
    "vllm_tensor_parallel_size": (lambda x: x >= 1, "must be at least 1"),
    "vllm_batch_size": (lambda x: x is None or x >= 1, "must be at least 1 row"),
    "vllm_structured_outputs_regex": (lambda x: x is None or x, "must be a pattern, or None"),
    "vllm_server_port": (_is_port, "must be a port, from 1 to 65535"),
    "vllm_group_port": (lambda x: x is None or _is_port(x), "must be a port, from 1 to 65535"),
    "vllm_server_timeout": (lambda x: x > 0, "must be a number of seconds above 0"),
    "vllm_wave_timeout": (lambda x: x is None or x > 0, "must be a number of seconds above 0, or None"),
    "center_rewards_coefficient": (lambda x: x is None or x >= 0, "must be 0 or more"),
}


def check_ranges(args: Any) -> None:
    """ArgumentError for the first argument that is out of its range; a configuration's own `ranges` go before ours."""
    names = [field.name for field in fields(args)]
    for name, range_ in (RANGES | getattr(args, "ranges", {})).items():
        if name in names:
            check_range(args, name, range_)
    check_finite(args, names)
    for cadence in ("logging", "eval", "save"):
        steps = getattr(args, f"{cadence}_steps")
        if getattr(args, f"{cadence}_strategy") == "steps" and not steps > 0:
            raise ArgumentError(f"{cadence}_steps={steps!r} must be above 0; {cadence}_strategy='no' turns it off.")


def check_range(args: Any, name: str, range_: Range | None = None) -> None:
    """Raise ArgumentError for an argument that is out of `range_`, by default the one in RANGES."""
    fits, text = range_ or RANGES[name]
    if not fits(getattr(args, name)):
        raise ArgumentError(f"{said_as(args, name)}={getattr(args, name)!r} {text}.")


def check_finite(args: Any, names: Iterable[str]) -> None:
    """Raise ArgumentError for the first of these arguments that is NaN or infinite."""
    for name in names:
        value = getattr(args, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ArgumentError(f"{said_as(args, name)}={value} must be a finite number.")
