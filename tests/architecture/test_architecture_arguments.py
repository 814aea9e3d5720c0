"""No argument is silently ignored: each of ours names the test that shows its effect, each inherited one who acts on it.

An inherited argument is acted on by transformers' Trainer or accelerate, or it is refused when set.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from lowpeak import GRPOConfig, OnlineDPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from lowpeak.config.inapplicable import REFUSED_INHERITED
from lowpeak.config.rejected import REJECTED

CONFIGS = (GRPOConfig, RLOOConfig, PPOConfig, OnlineDPOConfig, SFTConfig, RewardConfig)
TESTS = Path(__file__).parent.parent

SHOWN_BY = {
    # every trainer
    "learning_rate": "test_each_value_that_is_ours_reaches_what_it_is_for",
    "logging_steps": "test_the_log_comes_every_logging_steps",
    "bf16": "test_bf16_compute_trains_fp32_weights_and_an_unmoved_policy_has_its_references_log_probs",
    "remove_unused_columns": "test_what_cannot_act_raises_with_the_remedy",
    "per_device_eval_batch_size": "test_evaluating_changes_nothing_and_gives_the_same_twice_and_in_portions",
    "gradient_checkpointing": "test_activation_checkpointing_is_on_unless_turned_off_and_nothing_warns",
    "activation_offloading": "test_activation_offloading_is_refused_where_activations_are_in_host_memory_already",
    "model_init_kwargs": "test_quantization_config_in_model_init_kwargs_loads_a_4_bit_base",
    "trust_remote_code": "test_a_model_whose_code_is_its_own_needs_trust",
    "disable_dropout": "test_dropout_of_modules_and_numbers_can_be_disabled_in_policy_and_reference",
    "cast_lm_head_to_fp32": "test_the_head_can_run_in_fp32",
    "chat_template_kwargs": "test_chat_template_kwargs_reach_the_template",
    "shuffle_dataset": "test_without_shuffling_prompts_come_in_their_order",
    "micro_batch_tokens": "test_micro_batches_and_chunks_change_no_weight",
    "logprob_chunk_size": "test_each_value_that_is_ours_reaches_what_it_is_for",
    "pad_to_multiple_of": "test_padding_to_a_multiple_reaches_the_micro_batches",
    "padding_free": "test_every_layout_trains_the_same_weights",
    "log_entropy": "test_entropy_is_logged_unless_turned_off",
    # online
    "num_generations": "test_a_rollout_holds_what_trls_does_and_serves_as_many_steps",
    "num_generations_eval": "test_several_evaluation_sets_are_reported_under_their_names",
    "max_completion_length": "test_each_value_that_is_ours_reaches_what_it_is_for",
    "max_new_tokens": "test_an_argument_that_is_said_twice_must_be_said_alike",
    "generation_batch_size": "test_generation_batch_size_says_the_same_in_completions",
    "steps_per_generation": "test_a_rollout_serves_its_iterations_and_steps",
    "temperature": "test_each_member_of_the_family_trains_other_weights",
    "top_p": "test_each_member_of_the_family_trains_other_weights",
    "top_k": "test_each_member_of_the_family_trains_other_weights",
    "min_p": "test_each_member_of_the_family_trains_other_weights",
    "repetition_penalty": "test_each_member_of_the_family_trains_other_weights",
    "generation_kwargs": "test_json_on_the_command_line_becomes_a_mapping",
    "kv_cache_bytes": "test_the_engines_cache_keeps_to_its_bytes",
    "gather_budget": "test_one_budget_is_said_in_three_ways",
    "ds3_gather_for_generation": "test_one_budget_is_said_in_three_ways",
    "disable_unwrapping_for_generation": "test_one_budget_is_said_in_three_ways",
    "offload_frozen_models": "test_arguments_of_sharded_models_or_devices_are_refused_without_them",
    "offload_during_rollout": "test_arguments_of_sharded_models_or_devices_are_refused_without_them",
    "share_prompt": "test_what_was_asked_decides_the_layout",
    "overlong_prompts": "test_prompts_that_do_not_fit_are_an_error_or_a_counted_drop",
    "beta": "test_training_raises_the_reward_it_is_given",
    "kl_estimator": "test_each_member_of_the_family_trains_other_weights",
    "num_iterations": "test_a_rollout_serves_its_iterations_and_steps",
    "epsilon": "test_each_member_of_the_family_trains_other_weights",
    "epsilon_high": "test_epsilon_high_is_an_offset_for_every_loss_type",
    "reward_weights": "test_each_member_of_the_family_trains_other_weights",
    "reward_timeout": "test_a_slow_reward_stops_the_run_or_counts_as_none",
    "reward_failures": "test_a_slow_reward_stops_the_run_or_counts_as_none",
    "mask_truncated_completions": "test_truncated_completions_can_be_left_out_of_the_loss",
    "dynamic_sampling_rounds": "test_groups_with_equal_rewards_are_asked_again_under_dynamic_sampling",
    "sync_ref_model": "test_the_reference_moves_towards_the_policy_when_asked",
    "ref_model_mixup_alpha": "test_the_reference_moves_towards_the_policy_when_asked",
    "ref_model_sync_steps": "test_the_reference_moves_towards_the_policy_when_asked",
    "success_reward": "test_a_success_follows_the_reward_and_threshold_that_were_named",
    "success_threshold": "test_a_success_follows_the_reward_and_threshold_that_were_named",
    "log_completions": "test_completions_are_printed_when_asked_for",
    "num_completions_to_print": "test_completions_are_printed_when_asked_for",
    "log_unique_prompts": "test_completions_are_printed_when_asked_for",
    # vLLM
    "use_vllm": "test_without_vllm_there_are_no_settings_and_with_it_trls_defaults",
    "vllm_mode": "test_without_vllm_there_are_no_settings_and_with_it_trls_defaults",
    "vllm_model_impl": "test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks",
    "vllm_enable_sleep_mode": "test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks",
    "vllm_gpu_memory_utilization": "test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks",
    "vllm_max_model_length": "test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks",
    "vllm_tensor_parallel_size": "test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks",
    "vllm_engine_kwargs": "test_a_colocated_engine_takes_its_share_its_lengths_and_its_ranks",
    "vllm_server_base_url": "test_servers_are_named_by_url_or_by_host_and_port",
    "vllm_server_host": "test_servers_are_named_by_url_or_by_host_and_port",
    "vllm_server_port": "test_servers_are_named_by_url_or_by_host_and_port",
    "vllm_server_timeout": "test_a_server_has_its_time_its_port_and_its_token",
    "vllm_group_port": "test_a_server_has_its_time_its_port_and_its_token",
    "vllm_server_token": "test_a_server_has_its_time_its_port_and_its_token",
    "vllm_wave_timeout": "test_weights_waves_and_completions_are_said_for_both_modes",
    "vllm_batch_size": "test_weights_waves_and_completions_are_said_for_both_modes",
    "vllm_structured_outputs_regex": "test_weights_waves_and_completions_are_said_for_both_modes",
    "vllm_bucket_size": "test_weights_waves_and_completions_are_said_for_both_modes",
    "vllm_transport": "test_weights_waves_and_completions_are_said_for_both_modes",
    "vllm_verify_weights": "test_weights_waves_and_completions_are_said_for_both_modes",
    "vllm_adapters": "test_a_lora_policy_is_generated_with_its_adapter",
    "vllm_importance_sampling_correction": "test_the_correction_is_trls_with_vllm_and_none_without",
    "vllm_importance_sampling_mode": "test_the_correction_has_four_modes_and_two_bounds",
    "vllm_importance_sampling_clip_max": "test_the_correction_has_four_modes_and_two_bounds",
    "vllm_importance_sampling_clip_min": "test_the_correction_has_four_modes_and_two_bounds",
    # GRPO
    "loss_type": "test_each_member_of_the_family_trains_other_weights",
    "importance_sampling_level": "test_each_member_of_the_family_trains_other_weights",
    "delta": "test_each_member_of_the_family_trains_other_weights",
    "scale_rewards": "test_each_member_of_the_family_trains_other_weights",
    "multi_objective_aggregation": "test_several_rewards_can_be_normalised_before_they_are_summed",
    "use_bias_correction_kl": "test_each_member_of_the_family_trains_other_weights",
    "top_entropy_quantile": "test_each_member_of_the_family_trains_other_weights",
    "router_aux_loss_coef": "test_every_trainer_trains_with_it_and_logs_it",
    "entropy_coef": "test_each_member_of_the_family_trains_other_weights",
    "use_adaptive_entropy": "test_each_member_of_the_family_trains_other_weights",
    "entropy_coef_min": "test_each_algorithm_argument_reaches_the_settings",
    "entropy_coef_max": "test_each_algorithm_argument_reaches_the_settings",
    "entropy_coef_delta": "test_each_member_of_the_family_trains_other_weights",
    "entropy_target": "test_each_member_of_the_family_trains_other_weights",
    # RLOO
    "normalize_advantages": "test_rloo_has_its_own_settings",
    "reward_clip_range": "test_rloo_has_its_own_settings",
    # PPO
    "kl_coef": "test_trls_names_say_the_same",
    "num_ppo_epochs": "test_trls_names_say_the_same",
    "cliprange": "test_trls_names_say_the_same",
    "num_mini_batches": "test_trls_names_say_the_same",
    "kl_target": "test_the_steered_coefficient_is_logged_and_survives_a_resume",
    "kl_horizon": "test_the_steered_coefficient_is_logged_and_survives_a_resume",
    "early_stop_kl": "test_a_policy_that_has_moved_too_far_gets_a_new_rollout",
    "gamma": "test_each_argument_of_ppo_trains_other_weights",
    "lam": "test_each_argument_of_ppo_trains_other_weights",
    "whiten_rewards": "test_each_argument_of_ppo_trains_other_weights",
    "whiten_advantages": "test_each_argument_of_ppo_trains_other_weights",
    "missing_eos_penalty": "test_each_argument_of_ppo_trains_other_weights",
    "critic": "test_a_saved_model_is_the_policy_alone_and_its_separate_critic_beside_it",
    "value_model_path": "test_a_reward_models_checkpoint_can_start_the_critic",
    "value_learning_rate": "test_the_critic_learns_at_a_rate_of_its_own",
    "value_warmup_steps": "test_values_warm_up_while_the_policy_stays_where_it_is",
    "vf_coef": "test_each_argument_of_ppo_trains_other_weights",
    "cliprange_value": "test_each_argument_of_ppo_trains_other_weights",
    # SFT
    "dataset_text_field": "test_supervised_arguments_reach_the_reader",
    "max_length": "test_supervised_arguments_reach_the_reader",
    "completion_only_loss": "test_supervised_arguments_reach_the_reader",
    "assistant_only_loss": "test_supervised_arguments_reach_the_reader",
    "eos_token": "test_special_tokens_can_be_named",
    "pad_token": "test_special_tokens_can_be_named",
    "chat_template_path": "test_a_chat_template_comes_from_a_file",
    "packing": "test_packing_is_the_layout_without_padding_or_an_error",
    "packing_strategy": "test_a_packing_that_would_change_what_is_learned_is_refused",
    "eval_packing": "test_eval_packing_changes_nothing_and_says_so",
    # reward models
    "center_rewards_coefficient": "test_a_run_learns_its_pairs_and_says_so_in_log_and_journal",
}

# Who acts on an inherited argument: "trainer" is transformers' Trainer around our step, "accelerate" what prepares and
# launches, "us" is overridden behaviour of the same meaning.
ACTED_ON_BY = {
    "us": """output_dir per_device_train_batch_size gradient_accumulation_steps seed data_seed max_steps num_train_epochs
        save_only_model save_total_limit""",
    "trainer": """lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2
        adam_epsilon optim_target_modules max_grad_norm activation_checkpointing activation_checkpointing_kwargs
        gradient_checkpointing_kwargs logging_strategy logging_first_step log_on_each_node
        log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id eval_strategy eval_steps eval_delay eval_on_start save_strategy save_steps
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        load_best_model_at_end metric_for_best_model greater_is_better restore_callback_states_from_checkpoint
        full_determinism debug skip_memory_metrics tf32 use_cpu logging_nan_inf_filter""",
    "accelerate": """accelerator_config parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed local_rank""",
    "scripts": "do_train do_eval do_predict resume_from_checkpoint",
}


def names(config) -> set[str]:
    return {f.name for f in fields(config)}


def overridden(config) -> set[str]:
    base = {f.name: f.default for f in fields(TrainingArguments)}
    return {f.name for f in fields(config) if f.name in base and f.default is not base[f.name]}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_argument_of_ours_names_the_test_that_shows_its_effect(config):
    ours = (names(config) - names(TrainingArguments)) | overridden(config)
    assert ours <= SHOWN_BY.keys(), sorted(ours - SHOWN_BY.keys())


def test_the_tests_that_are_named_exist():
    text = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", text))
    assert set(SHOWN_BY.values()) <= defined, sorted(set(SHOWN_BY.values()) - defined)


def test_every_inherited_argument_is_acted_on_or_refused():
    acted_on = {name for who in ACTED_ON_BY.values() for name in who.split()}
    inherited = names(TrainingArguments) - SHOWN_BY.keys()
    assert inherited <= acted_on | REFUSED_INHERITED.keys(), sorted(inherited - acted_on - REFUSED_INHERITED.keys())


def test_nothing_is_both_an_argument_and_rejected_by_name():
    everything = set().union(*map(names, CONFIGS))
    assert not everything & REJECTED.keys()
    assert not names(OnlineDPOConfig) & OnlineDPOConfig.rejected.keys()
