"""Names of arguments: refusal of unknown names, and TRL names that lowpeak does not accept, each with its remedy.

A TRL name that is set to TRL's default is ignored, so that configurations that spell out TRL's defaults still load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lowpeak.errors import ArgumentError, closest_name

# Commands, and the beginning of the names of their config and trainer.
CLASS_PREFIXES = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "ppo": "PPO",
    "online-dpo": "OnlineDPO",
    "distillation": "Distillation",
    "sft": "SFT",
    "reward": "Reward",
    "dpo": "DPO",
    "kto": "KTO",
}
_NATIVE = "lowpeak generates with its own engine on the policy's weights; remove it"
# Name, default in TRL 1.16, and remedy.
_TRL_REJECTED: tuple[tuple[str, Any, str], ...] = (
    ("cache_implementation", None, _NATIVE),
    ("use_transformers_continuous_batching", False, _NATIVE),
    ("transformers_continuous_batching_config", None, _NATIVE),
    ("use_transformers_paged", False, _NATIVE),
    ("log_multimodal", True, "lowpeak trains text models; remove it"),
    (
        "log_completions_hub_repo",
        None,
        "completions are in <output_dir>/journal/rollouts.jsonl; upload that folder, and remove it",
    ),
    (
        "dataset_kwargs",
        None,
        "prepare the dataset before you pass it (rows with input_ids are used unchanged); remove it",
    ),
    (
        "use_weighting",
        False,
        "WPO's weights need the sum of squared probabilities, which the head does not form; remove it",
    ),
    ("ignore_bias_buffers", False, "it works around an error of DDP that lowpeak's models do not raise; remove it"),
    ("truncation_mode", "keep_start", "rows longer than max_length are truncated at their end; remove it"),
)
REJECTED: dict[str, str] = {
    **{name: remedy for name, _, remedy in _TRL_REJECTED},
    "max_prompt_length": "prompts are never truncated; set overlong_prompts='drop' to skip those that do not fit",
    "use_liger_loss": "the log-prob core never forms the logits; remove it",
    "steps_per_eval": "use eval_steps",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "warmup_ratio": "set warmup_steps to the fraction of all steps, such as warmup_steps=0.1",
    "save_safetensors": "weights are always saved as safetensors; remove it",
    "group_by_length": "micro-batches are formed under a token budget (micro_batch_tokens); remove it",
}
# Arguments of the trainers' constructors, which no config has, and what else there is for those that a file can name.
_OF_TRAINERS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("train_dataset", "eval_dataset", "processing_class", "callbacks", "optimizers", "compute_metrics"),
            *("ref_model", "value_model", "reward_model", "tools", "rollout_func", "environment_factory"),
        ),
        "",
    ),
    "teacher_model": "; a file or a command line names the teacher in teacher_model_name_or_path",
    "reward_funcs": "; a file or a command line names them in reward",
    "peft_config": "; a file or a command line sets use_peft and lora_r",
    "quantization_config": "; a file or a command line sets load_in_4bit",
}
# TRL's defaults of these names, and of arguments with another default here.
TRL_DEFAULTS: dict[str, Any] = {
    **{name: default for name, default, _ in _TRL_REJECTED},
    "per_device_eval_batch_size": 8,
    "ds3_gather_for_generation": True,
    "vllm_group_port": 51216,
}


def drop_trl_defaults(settings: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return `settings` without names that are not `known` and have TRL's default."""
    return {
        name: value
        for name, value in settings.items()
        if name in known or name not in TRL_DEFAULTS or value != TRL_DEFAULTS[name]
    }


def check_names(given: Iterable[str], known: Iterable[str], rejected: Mapping[str, str]) -> None:
    """Raise one ArgumentError for all unknown names, each with its remedy in `rejected` or the closest known name."""
    names = sorted(known)
    messages: list[str] = []
    for name in given:
        if name in names:
            continue
        if name in rejected:
            messages.append(
                f"The argument {name!r} is TRL's or an older transformers' and does not exist in lowpeak: {rejected[name]}."
            )
            continue
        if name in _OF_TRAINERS:
            messages.append(f"{name!r} is an argument of the trainer, in Python: pass it there{_OF_TRAINERS[name]}.")
            continue
        hint = closest_name(name, names) or "--help on the command line and help() of the config list all arguments."
        messages.append(f"Unknown argument {name!r}; {hint}")
    if messages:
        raise ArgumentError(" ".join(messages))
