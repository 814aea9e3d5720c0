"""Arguments that cannot act: those of transformers that have no place in a step of ours, and those a run leaves idle.

Each entry is a sentence with the remedy. What is listed here raises; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from lowpeak.errors import ArgumentError

_BATCHES = "micro-batches are cut from the rollout under a token budget (micro_batch_tokens); remove it"
_NO_LOADER = "prompts are drawn by a cursor, there is no data loader; remove it"
_NO_LABELS = "there are no labels, rewards judge completions; remove it"
_EVALUATION = "evaluation generates completions and rewards them; remove it"

REFUSED_INHERITED: dict[str, str] = {
    "fp16": "log-ratios need bf16's range or fp32; set bf16=True or leave both out",
    "fp16_full_eval": _EVALUATION,
    "bf16_full_eval": _EVALUATION,
    "auto_find_batch_size": "it would change the rollout's size; set micro_batch_tokens, which changes memory alone",
    "label_smoothing_factor": _NO_LABELS,
    "label_names": _NO_LABELS,
    "prediction_loss_only": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "neftune_noise_alpha": "noise in the embeddings makes training log-probs differ from sampling ones; remove it",
    "use_liger_kernel": "it replaces the head that the log-prob core runs in; remove it, the core never forms the logits",
    "liger_kernel_config": "it replaces the head that the log-prob core runs in; remove it",
    "torch_compile": "the engine's growing caches would recompile at each token; remove it",
    "torch_compile_backend": "torch_compile is not taken; remove it",
    "torch_compile_mode": "torch_compile is not taken; remove it",
    "average_tokens_across_devices": "losses are always normalised by the whole step's counts; remove it",
    "remove_unused_columns": "columns go to the rewards; remove it",
    "ignore_data_skip": "a resumed run takes up the prompts where it left them; remove it",
    "train_sampling_strategy": "use shuffle_dataset; remove it",
    "length_column_name": _BATCHES,
    "dataloader_drop_last": _NO_LOADER,
    "dataloader_num_workers": _NO_LOADER,
    "dataloader_pin_memory": _NO_LOADER,
    "dataloader_persistent_workers": _NO_LOADER,
    "dataloader_prefetch_factor": _NO_LOADER,
    "dataloader_multiprocessing_context": _NO_LOADER,
    "dataloader_in_order": _NO_LOADER,
    "use_cache": "generation always uses a cache and training never does; remove it",
    "include_num_input_tokens_seen": "num_tokens is always logged; remove it",
    "enable_jit_checkpoint": "send SIGINT: the step is finished and saved; remove it",
}


def default_of(args: Any, name: str) -> Any:
    """The default that an argument's own class declares."""
    for f in fields(args):
        if f.name == name:
            return f.default if f.default_factory is MISSING else f.default_factory()
    raise KeyError(name)


def is_set(args: Any, name: str) -> bool:
    """Whether an argument differs from its class's default."""
    return bool(getattr(args, name) != default_of(args, name))


def refuse_inherited(args: Any) -> None:
    """ArgumentError for the first argument of transformers that is set and has no place in a step of ours."""
    given: frozenset[str] = getattr(args, "given", frozenset(f.name for f in fields(args)))
    for name, why in REFUSED_INHERITED.items():
        if name == "dataloader_pin_memory" and args.use_cpu:
            continue  # transformers turns it off itself there, and a copy by dataclasses.replace() gives it on
        if name in given and is_set(args, name):
            raise ArgumentError(f"{name}={getattr(args, name)!r} cannot act: {why}.")


def require(condition: bool, message: str) -> None:
    """ArgumentError with `message` unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


def refuse_idle(args: Any, names: tuple[str, ...], acts: bool, because: str) -> None:
    """ArgumentError when one of `names` is set although, in this run, it changes nothing."""
    if acts:
        return
    for name in names:
        if is_set(args, name):
            raise ArgumentError(f"{name}={getattr(args, name)!r} has no effect: {because}.")


RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: x > 0, "must be above 0 in training (evaluation is greedy as well)"),
    "top_p": (lambda x: 0 < x <= 1, "must be in (0, 1]"),
    "top_k": (lambda x: x >= 0, "must be 0 (all tokens) or more"),
    "min_p": (lambda x: x is None or 0 <= x <= 1, "must be in [0, 1]"),
    "repetition_penalty": (lambda x: x > 0, "must be above 0"),
    "epsilon": (lambda x: 0 <= x < 1, "must be in [0, 1): the ratio is clipped to 1 - epsilon from below"),
    "epsilon_high": (lambda x: x is None or x >= 0, "must be 0 or more: the ratio is clipped to 1 + epsilon_high"),
    "beta": (lambda x: x >= 0, "must be 0 or more"),
    "num_generations": (lambda x: x >= 2, "must be at least 2: a completion is compared with the others of its group"),
    "num_generations_eval": (lambda x: x is None or x >= 1, "must be at least 1"),
    "max_completion_length": (lambda x: x >= 1, "must be at least 1 token"),
    "per_device_train_batch_size": (lambda x: x >= 1, "must be at least 1"),
    "gradient_accumulation_steps": (lambda x: x >= 1, "must be at least 1"),
    "steps_per_generation": (lambda x: x is None or x >= 1, "must be at least 1"),
    "learning_rate": (lambda x: 0 <= x < float("inf"), "must be a finite number of 0 or more"),
    "seed": (lambda x: 0 <= x < 2**32, "must be from 0 to 2**32 - 1"),
    "num_iterations": (lambda x: x >= 1, "must be at least 1"),
    "top_entropy_quantile": (lambda x: 0 < x <= 1, "must be in (0, 1]"),
    "entropy_coef": (lambda x: x >= 0, "must be 0 or more"),
    "reward_timeout": (lambda x: x is None or x > 0, "must be a number of seconds above 0"),
    "reward_failures": (lambda x: x in ("raise", "none"), "must be 'raise' or 'none'"),
    "overlong_prompts": (lambda x: x in ("error", "drop"), "must be 'error' or 'drop'"),
    "kl_estimator": (lambda x: x in ("k1", "k2", "k3"), "must be k1, k2 or k3"),
    "loss_type": (
        lambda x: x in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo"),
        "must be grpo, bnpo, dr_grpo, dapo or cispo",
    ),
    "importance_sampling_level": (lambda x: x in ("token", "sequence"), "must be 'token' or 'sequence'"),
    "scale_rewards": (
        lambda x: x in ("group", "batch", "none", True, False),
        "must be 'group', 'batch' or 'none'",
    ),
    "multi_objective_aggregation": (
        lambda x: x in ("sum_then_normalize", "normalize_then_sum"),
        "must be 'sum_then_normalize' or 'normalize_then_sum'",
    ),
    "dynamic_sampling_rounds": (lambda x: x >= 0, "must be 0 (off) or more"),
    "ref_model_mixup_alpha": (lambda x: 0 <= x <= 1, "must be in [0, 1]"),
    "ref_model_sync_steps": (lambda x: x >= 1, "must be at least 1"),
    "micro_batch_tokens": (lambda x: x is None or x >= 2, "must be at least 2 tokens"),
    "logprob_chunk_size": (lambda x: x is None or x >= 1, "must be at least 1 token"),
    "kv_cache_bytes": (lambda x: x is None or x > 0, "must be a number of bytes above 0"),
    "pad_to_multiple_of": (lambda x: isinstance(x, int) and x >= 1, "must be a whole number of 1 or more"),
    "num_completions_to_print": (lambda x: x is None or x >= 1, "must be at least 1"),
    "per_device_eval_batch_size": (lambda x: x is None or x >= 1, "must be at least 1"),
    "max_length": (lambda x: x is None or x >= 2, "must be at least 2 tokens"),
    "success_threshold": (lambda x: x == x, "must be a number"),
}


def check_ranges(args: Any) -> None:
    """ArgumentError for the first argument that is out of its range."""
    names = {f.name for f in fields(args)}
    for name, (fits, text) in RANGES.items():
        if name in names and not fits(getattr(args, name)):
            raise ArgumentError(f"{name}={getattr(args, name)!r} {text}.")
