"""Another value than its default for each argument of ours, with the arguments beside which it acts."""

from __future__ import annotations

from lowpeak import DPOConfig, GRPOConfig, KTOConfig, OnlineDPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig

REUSED = {"num_iterations": 2}
KL = {"beta": 0.1}
MOVED = {**KL, "sync_ref_model": True}
PRINTED = {"log_completions": True}
STEERED = {"use_adaptive_entropy": True, "entropy_coef": 0.5}
VLLM = {"use_vllm": True}
SERVED = {**VLLM, "vllm_mode": "server"}

# Of a config, given the arguments beside: another value than its default for each argument.
CHANGED = [
    (GRPOConfig, {}, {"learning_rate": 0.5, "logging_steps": 3, "bf16": True, "gradient_checkpointing": False,
        "remove_unused_columns": True, "per_device_eval_batch_size": 3, "activation_offloading": True, "plan_memory": True,
        "memory_budget": 0.5, "dataset_num_proc": 2, "resume_from_checkpoint": "auto",
        "model_init_kwargs": {"revision": "a"}, "trust_remote_code": True, "disable_dropout": False,
        "cast_lm_head_to_fp32": True, "chat_template_kwargs": {"a": 1}, "shuffle_dataset": False,
        "micro_batch_tokens": 100, "logprob_chunk_size": 10, "weight_bits": 16, "state_bits": 8,
        "gradient_bits": 32, "offload_optimizer": True, "cudnn_attention": True, "shard_optimizer_states": True,
        "pad_to_multiple_of": 8, "padding_free": False, "cuda_graphs": True,
        "router_aux_loss_coef": 0.1, "log_entropy": False, "num_generations": 4, "max_completion_length": 9,
        "max_new_tokens": 9, "generation_batch_size": 32, "steps_per_generation": 2, "num_iterations": 2,
        "dynamic_sampling_rounds": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.5,
        "repetition_penalty": 1.5, "generation_kwargs": {"stop_strings": ["a"]}, "overlong_prompts": "drop",
        "kv_cache_bytes": 1 << 20, "gather_budget": "8GiB", "ds3_gather_for_generation": False,
        "disable_unwrapping_for_generation": True, "offload_frozen_models": True, "offload_during_rollout": True,
        "share_prompt": True, "num_generations_eval": 2, "beta": 0.1, "reward_weights": [1.0, 2.0],
        "reward_timeout": 5.0, "reward_failures": "none", "mask_truncated_completions": True, "success_reward": "b",
        "success_threshold": 0.5, "log_completions": True, "num_completions_with_tokens": 5, "use_vllm": True,
        "loss_type": "grpo",
        "scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum", "top_entropy_quantile": 0.5,
        "entropy_coef": 0.5, "off_policy_mask_threshold": 0.5, "max_tool_calling_iterations": 1, "tool_timeout": 5.0,
        "tool_isolation": "process", "turn_credit": "turn"}),
    (GRPOConfig, {"turn_credit": "discounted"}, {"turn_discount": 0.5}),
    (GRPOConfig, {"remove_unused_columns": True}, {"strict_arguments": True}),
    (GRPOConfig, KL, {"kl_estimator": "k1", "sync_ref_model": True, "use_bias_correction_kl": False}),
    (GRPOConfig, REUSED, {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0}),
    (GRPOConfig, {**REUSED, "loss_type": "sapo"}, {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 1.5}),
    (GRPOConfig, {**REUSED, "loss_type": "vespo"}, {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0, "vespo_k_neg": 1.0,
        "vespo_lambda_neg": 1.0}),
    (GRPOConfig, MOVED, {"ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 5}),
    (GRPOConfig, PRINTED, {"log_completions_steps": 5, "num_completions_to_print": 3, "log_unique_prompts": True}),
    (GRPOConfig, VLLM, {"vllm_mode": "server", "vllm_model_impl": "auto", "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.5, "vllm_max_model_length": 1024, "vllm_tensor_parallel_size": 2,
        "vllm_engine_kwargs": {"enforce_eager": True}, "vllm_wave_timeout": 1.0, "vllm_batch_size": 4,
        "vllm_structured_outputs_regex": "a+", "vllm_bucket_size": "1MiB", "vllm_verify_weights": False,
        "vllm_adapters": False, "vllm_importance_sampling_correction": False,
        "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0,
        "vllm_importance_sampling_cap": 2.5, "vllm_importance_sampling_clip_min": 0.5}),
    (GRPOConfig, SERVED, {"vllm_server_base_url": "http://a:1", "vllm_server_host": "a", "vllm_server_port": 1,
        "vllm_server_timeout": 1.0, "vllm_group_port": 1, "vllm_server_token": "t", "vllm_transport": "tcp"}),
    (GRPOConfig, {**REUSED, "loss_type": "grpo"}, {"importance_sampling_level": "sequence"}),
    (GRPOConfig, {"entropy_coef": 0.5}, {"use_adaptive_entropy": True}),
    (GRPOConfig, STEERED, {"entropy_coef_min": 0.1, "entropy_coef_max": 0.9, "entropy_coef_delta": 0.1,
        "entropy_target": 0.5}),
    (RLOOConfig, {}, {"normalize_advantages": True, "reward_clip_range": (-1.0, 1.0), "turn_credit": "turn"}),
    (RLOOConfig, {"turn_credit": "discounted"}, {"turn_discount": 0.5}),
    (PPOConfig, {}, {"kl_coef": 0.5, "num_ppo_epochs": 2, "cliprange": 0.1, "num_mini_batches": 2, "kl_target": 1.0,
        "total_episodes": 64, "sft_model_path": "a", "reward_model_path": "a",
        "early_stop_kl": 0.5, "gamma": 0.5, "lam": 0.5, "whiten_rewards": True, "whiten_advantages": False,
        "missing_eos_penalty": 1.0, "critic": "model", "value_learning_rate": 0.5, "value_warmup_steps": 2,
        "vf_coef": 0.5, "cliprange_value": 0.5}),
    (PPOConfig, {"kl_target": 1.0}, {"kl_horizon": 5}),
    (PPOConfig, {"critic": "model"}, {"value_model_path": "a"}),
    (OnlineDPOConfig, {}, {"missing_eos_penalty": 1.0, "loss_type": "ipo", "beta": [0.5], "reward_model_path": "a"}),
    (SFTConfig, {}, {"dataset_text_field": "a", "max_length": 9, "completion_only_loss": True,
        "assistant_only_loss": True, "loss_type": "dft", "eos_token": "a", "pad_token": "a",
        "chat_template_path": "a.jinja", "packing": True, "packing_strategy": "wrapped", "eval_packing": True}),
    (RewardConfig, {}, {"center_rewards_coefficient": 0.1}),
    (DPOConfig, {}, {"loss_type": ["ipo"], "loss_weights": [0.5], "ld_alpha": 0.5, "share_prompt": True,
        "offload_frozen_models": True, "beta": 0.2, "sync_ref_model": True, "precompute_ref_batch_size": 4}),
    (DPOConfig, {}, {"precompute_ref_log_probs": True}),
    (DPOConfig, {"loss_type": ["robust"]}, {"label_smoothing": 0.1}),
    (DPOConfig, {"loss_type": ["discopop"]}, {"discopop_tau": 0.1}),
    (KTOConfig, {}, {"loss_type": "apo_zero_unpaired", "desirable_weight": 0.5, "undesirable_weight": 0.5}),
]  # fmt: skip
