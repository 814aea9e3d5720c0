"""Names that TRL users may bring and lowpeak does not take, each with what to do instead.

They are refused by name, because an argument that silently does nothing costs somebody a night.
"""

from __future__ import annotations

_NATIVE = "lowpeak generates with its own engine on the policy's weights; remove it"
_LOSS = "loss_type is one of grpo, bnpo, dr_grpo, dapo, cispo; remove it"

REJECTED: dict[str, str] = {
    "vllm_importance_sampling_cap": "its name is vllm_importance_sampling_clip_max, as in TRL; use that",
    "cache_implementation": _NATIVE,
    "use_transformers_continuous_batching": _NATIVE,
    "transformers_continuous_batching_config": _NATIVE,
    "use_transformers_paged": _NATIVE,
    "sapo_temperature_neg": _LOSS,
    "sapo_temperature_pos": _LOSS,
    "vespo_k_pos": _LOSS,
    "vespo_lambda_pos": _LOSS,
    "vespo_k_neg": _LOSS,
    "vespo_lambda_neg": _LOSS,
    "off_policy_mask_threshold": "rollouts come from the policy itself, reused for at most num_iterations passes that "
    "clipping bounds; remove it",
    "max_tool_calling_iterations": "run tools in a rollout_func of your own; remove it",
    "log_multimodal": "lowpeak trains text models; remove it",
    "log_completions_hub_repo": "completions are in <output_dir>/journal/rollouts.jsonl, upload that folder; remove it",
    "max_prompt_length": "prompts are never cut; set overlong_prompts='drop' to leave out those that do not fit",
    "max_new_tokens": "its name is max_completion_length",
    "use_liger_loss": "the log-prob core never forms the logits; remove it",
    "steps_per_eval": "use eval_steps",
    "dataset_num_proc": "rows are tokenised as they are needed; remove it",
    "dataset_kwargs": "prepare the data set before it is passed in (rows with input_ids are taken as they are); remove it",
    "chat_template_path": "set the tokenizer's chat_template and pass it as processing_class; remove it",
    "eos_token": "set it on the tokenizer and pass that as processing_class; remove it",
    "pad_token": "set it on the tokenizer and pass that as processing_class; remove it",
    "truncation_mode": "rows longer than max_length are cut at their end; remove it",
}
