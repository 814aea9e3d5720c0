"""Names of arguments: refusal of unknown names, and TRL names that lowpeak does not accept, each with its remedy.

A TRL name that is set to TRL's default is ignored, so that configurations that spell out TRL's defaults still load.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from lowpeak.errors import ArgumentError

_NATIVE = "lowpeak generates with its own engine on the policy's weights; remove it"
_LOSS = "loss_type is one of grpo, bnpo, dr_grpo, dapo, cispo; remove it"
_REUSE = (
    "rollouts come from the policy itself, reused for at most num_iterations passes that clipping bounds; remove it"
)
# A name, TRL 1.16's default of it, and what to do instead.
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("vllm_importance_sampling_cap", None, "its name is vllm_importance_sampling_clip_max, as in TRL; use that"),
    ("cache_implementation", None, _NATIVE),
    ("use_transformers_continuous_batching", False, _NATIVE),
    ("transformers_continuous_batching_config", None, _NATIVE),
    ("use_transformers_paged", False, _NATIVE),
    ("sapo_temperature_neg", 1.05, _LOSS),
    ("sapo_temperature_pos", 1.0, _LOSS),
    ("vespo_k_pos", 2.0, _LOSS),
    ("vespo_lambda_pos", 3.0, _LOSS),
    ("vespo_k_neg", 3.0, _LOSS),
    ("vespo_lambda_neg", 2.0, _LOSS),
    ("off_policy_mask_threshold", None, _REUSE),
    ("max_tool_calling_iterations", None, "run tools in a rollout_func of your own; remove it"),
    ("log_multimodal", True, "lowpeak trains text models; remove it"),
    (
        "log_completions_hub_repo",
        None,
        "completions are in <output_dir>/journal/rollouts.jsonl, upload that folder; remove it",
    ),
    ("dataset_num_proc", None, "rows are tokenised as they are needed; remove it"),
    (
        "dataset_kwargs",
        None,
        "prepare the data set before it is passed in (rows with input_ids are taken as they are); remove it",
    ),
    ("truncation_mode", "keep_start", "rows longer than max_length are cut at their end; remove it"),
)
REJECTED: dict[str, str] = {
    **{name: remedy for name, _, remedy in _REFUSED},
    "max_prompt_length": "prompts are never cut; set overlong_prompts='drop' to leave out those that do not fit",
    "use_liger_loss": "the log-prob core never forms the logits; remove it",
    "steps_per_eval": "use eval_steps",
}
# TRL's defaults of these names, and of arguments whose default is another one here.
TRL_DEFAULTS: dict[str, Any] = {
    **{name: default for name, default, _ in _REFUSED},
    "reward_model_path": None,
    "per_device_eval_batch_size": 8,
    "ds3_gather_for_generation": True,
    "vllm_group_port": 51216,
}


def drop_trl_defaults(settings: Mapping[str, Any], known: Mapping[str, Any] | set[str]) -> dict[str, Any]:
    """Return `settings` without names that are not `known` and stand at TRL's default."""
    return {
        name: value
        for name, value in settings.items()
        if name in known or name not in TRL_DEFAULTS or value != TRL_DEFAULTS[name]
    }


def check_names(given: Iterable[str], known: Iterable[str], rejected: Mapping[str, str]) -> None:
    """Raise one ArgumentError for all names that are not known: with the remedy that `rejected` has, or the closest name."""
    names = sorted(known)
    told: list[str] = []
    for name in given:
        if name in names:
            continue
        if name in rejected:
            told.append(f"The argument {name!r} is TRL's and does not exist in lowpeak: {rejected[name]}.")
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see --help for those there are."
        told.append(f"Unknown argument {name!r}; {hint}")
    if told:
        raise ArgumentError(" ".join(told))
