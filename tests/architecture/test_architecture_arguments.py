"""No argument is silently ignored: each of ours changes what a run is made of, or is named, and each inherited one has its actor.

An inherited argument is acted on by transformers' Trainer or accelerate, or it is named when set.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from architecture.sources import files, module_of, tree_of
from lowpeak import GRPOConfig, OnlineDPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from lowpeak.config.check import idle_arguments
from lowpeak.config.declare import Facts
from lowpeak.config.grpo import resolve_grpo
from lowpeak.config.online import OnlineArguments, resolve_online
from lowpeak.config.online_dpo import resolve_online_dpo
from lowpeak.config.ppo import resolve_ppo
from lowpeak.config.rejected import REJECTED
from lowpeak.config.reward_model import resolve_reward_model
from lowpeak.config.rloo import resolve_rloo
from lowpeak.config.training import IDLE_INHERITED, facts_of, resolve_common
from lowpeak.errors import ArgumentError
from lowpeak.training.constructor import base_arguments

ONLINE = {
    GRPOConfig: resolve_grpo,
    RLOOConfig: resolve_rloo,
    PPOConfig: resolve_ppo,
    OnlineDPOConfig: resolve_online_dpo,
}
OFFLINE = {SFTConfig: lambda args: None, RewardConfig: resolve_reward_model}
CONFIGS = (*ONLINE, *OFFLINE)

REUSED = {"num_iterations": 2}
KL = {"beta": 0.1}
MOVED = {**KL, "sync_ref_model": True}
PRINTED = {"log_completions": True}
STEERED = {"use_adaptive_entropy": True, "entropy_coef": 0.5}
VLLM = {"use_vllm": True}
SERVED = {**VLLM, "vllm_mode": "server"}

# An argument (with its config's name where that is not GRPO's): the others that it needs, and another value than its default.
CHANGED = {
    "learning_rate": ({}, 0.5),
    "logging_steps": ({}, 3),
    "bf16": ({}, True),
    "gradient_checkpointing": ({}, False),
    "remove_unused_columns": ({}, True),
    "per_device_eval_batch_size": ({}, 3),
    "strict_arguments": ({"remove_unused_columns": True}, True),
    "activation_offloading": ({}, True),
    "model_init_kwargs": ({}, {"revision": "a"}),
    "trust_remote_code": ({}, True),
    "disable_dropout": ({}, True),
    "cast_lm_head_to_fp32": ({}, True),
    "chat_template_kwargs": ({}, {"a": 1}),
    "shuffle_dataset": ({}, False),
    "micro_batch_tokens": ({}, 100),
    "logprob_chunk_size": ({}, 10),
    "pad_to_multiple_of": ({}, 8),
    "padding_free": ({}, False),
    "router_aux_loss_coef": ({}, 0.1),
    "log_entropy": ({}, False),
    "num_generations": ({}, 4),
    "max_completion_length": ({}, 9),
    "max_new_tokens": ({}, 9),
    "generation_batch_size": ({}, 32),
    "steps_per_generation": ({}, 2),
    "num_iterations": ({}, 2),
    "dynamic_sampling_rounds": ({}, 2),
    "temperature": ({}, 0.5),
    "top_p": ({}, 0.5),
    "top_k": ({}, 5),
    "min_p": ({}, 0.5),
    "repetition_penalty": ({}, 1.5),
    "generation_kwargs": ({}, {"stop_strings": ["a"]}),
    "overlong_prompts": ({}, "drop"),
    "kv_cache_bytes": ({}, 1 << 20),
    "gather_budget": ({}, "8GiB"),
    "ds3_gather_for_generation": ({}, False),
    "disable_unwrapping_for_generation": ({}, True),
    "offload_frozen_models": ({}, True),
    "offload_during_rollout": ({}, True),
    "share_prompt": ({}, True),
    "num_generations_eval": ({}, 2),
    "beta": ({}, 0.1),
    "kl_estimator": (KL, "k1"),
    "epsilon": (REUSED, 0.1),
    "epsilon_high": (REUSED, 0.3),
    "reward_weights": ({}, [1.0, 2.0]),
    "reward_timeout": ({}, 5.0),
    "reward_failures": ({}, "none"),
    "mask_truncated_completions": ({}, True),
    "sync_ref_model": (KL, True),
    "ref_model_mixup_alpha": (MOVED, 0.5),
    "ref_model_sync_steps": (MOVED, 5),
    "success_reward": ({}, "b"),
    "success_threshold": ({}, 0.5),
    "log_completions": ({}, True),
    "log_completions_steps": (PRINTED, 5),
    "num_completions_to_print": (PRINTED, 3),
    "log_unique_prompts": (PRINTED, True),
    "use_vllm": ({}, True),
    "vllm_mode": (VLLM, "server"),
    "vllm_model_impl": (VLLM, "auto"),
    "vllm_enable_sleep_mode": (VLLM, True),
    "vllm_gpu_memory_utilization": (VLLM, 0.5),
    "vllm_max_model_length": (VLLM, 1024),
    "vllm_tensor_parallel_size": (VLLM, 2),
    "vllm_engine_kwargs": (VLLM, {"enforce_eager": True}),
    "vllm_server_base_url": (SERVED, "http://a:1"),
    "vllm_server_host": (SERVED, "a"),
    "vllm_server_port": (SERVED, 1),
    "vllm_server_timeout": (SERVED, 1.0),
    "vllm_group_port": (SERVED, 1),
    "vllm_server_token": (SERVED, "t"),
    "vllm_wave_timeout": (VLLM, 1.0),
    "vllm_batch_size": (VLLM, 4),
    "vllm_structured_outputs_regex": (VLLM, "a+"),
    "vllm_bucket_size": (VLLM, "1MiB"),
    "vllm_transport": (SERVED, "tcp"),
    "vllm_verify_weights": (VLLM, False),
    "vllm_adapters": (VLLM, False),
    "vllm_importance_sampling_correction": (VLLM, False),
    "vllm_importance_sampling_mode": (VLLM, "token_mask"),
    "vllm_importance_sampling_clip_max": (VLLM, 2.0),
    "vllm_importance_sampling_clip_min": (VLLM, 0.5),
    "loss_type": ({}, "grpo"),
    "importance_sampling_level": ({**REUSED, "loss_type": "grpo"}, "sequence"),
    "delta": (REUSED, 4.0),
    "scale_rewards": ({}, "batch"),
    "multi_objective_aggregation": ({}, "normalize_then_sum"),
    "use_bias_correction_kl": (KL, False),
    "top_entropy_quantile": ({}, 0.5),
    "entropy_coef": ({}, 0.5),
    "use_adaptive_entropy": ({"entropy_coef": 0.5}, True),
    "entropy_coef_min": (STEERED, 0.1),
    "entropy_coef_max": (STEERED, 0.9),
    "entropy_coef_delta": (STEERED, 0.1),
    "entropy_target": (STEERED, 0.5),
    "RLOOConfig.normalize_advantages": ({}, True),
    "RLOOConfig.reward_clip_range": ({}, (-1.0, 1.0)),
    "PPOConfig.kl_coef": ({}, 0.5),
    "PPOConfig.num_ppo_epochs": ({}, 2),
    "PPOConfig.cliprange": ({}, 0.1),
    "PPOConfig.num_mini_batches": ({}, 2),
    "PPOConfig.kl_target": ({}, 1.0),
    "PPOConfig.kl_horizon": ({"kl_target": 1.0}, 5),
    "PPOConfig.early_stop_kl": ({}, 0.5),
    "PPOConfig.gamma": ({}, 0.5),
    "PPOConfig.lam": ({}, 0.5),
    "PPOConfig.whiten_rewards": ({}, True),
    "PPOConfig.whiten_advantages": ({}, False),
    "PPOConfig.missing_eos_penalty": ({}, 1.0),
    "PPOConfig.critic": ({}, "model"),
    "PPOConfig.value_model_path": ({"critic": "model"}, "a"),
    "PPOConfig.value_learning_rate": ({}, 0.5),
    "PPOConfig.value_warmup_steps": ({}, 2),
    "PPOConfig.vf_coef": ({}, 0.5),
    "PPOConfig.cliprange_value": ({}, 0.5),
    "OnlineDPOConfig.missing_eos_penalty": ({}, 1.0),
    "OnlineDPOConfig.loss_type": ({}, "ipo"),
    "OnlineDPOConfig.beta": ({}, [0.5]),
    "SFTConfig.dataset_text_field": ({}, "a"),
    "SFTConfig.max_length": ({}, 9),
    "SFTConfig.completion_only_loss": ({}, True),
    "SFTConfig.assistant_only_loss": ({}, True),
    "SFTConfig.loss_type": ({}, "dft"),
    "SFTConfig.eos_token": ({}, "a"),
    "SFTConfig.pad_token": ({}, "a"),
    "SFTConfig.chat_template_path": ({}, "a.jinja"),
    "SFTConfig.packing": ({}, True),
    "SFTConfig.packing_strategy": ({}, "wrapped"),
    "SFTConfig.eval_packing": ({}, True),
    "RewardConfig.center_rewards_coefficient": ({}, 0.1),
}  # fmt: skip

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


def ours(config) -> set[str]:
    return {f.name for f in fields(config) if "group" in f.metadata}


def read_beside_settings() -> set[str]:
    """Arguments that code beyond the declarations reads as they are: `args.name`, `trainer.user_args.name`."""
    read = set()
    for path in files():
        if module_of(path).startswith(("lowpeak.config", "lowpeak.cli")):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("args", "user_args"):
                read.add(node.attr)
            elif isinstance(node, ast.FunctionDef) and "getattr(args, " in ast.unparse(
                node
            ):  # by names that stand beside
                read |= {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    return read


READ = read_beside_settings()


def outcome(config, folder, said):
    """What a run of two ranks with two rewards is made of; the error where it cannot be."""
    args = config(output_dir=str(folder), use_cpu=True, **said)
    try:
        if config in ONLINE:
            online = resolve_online(args, 2, 2)
            settings = (dataclasses.replace(online, facts=Facts()), ONLINE[config](args, online))
            facts = online.facts
        else:
            settings = (resolve_common(args), OFFLINE[config](args))
            facts = facts_of(args)
    except ArgumentError as error:
        return str(error)
    inner = base_arguments(args)
    of_transformers = {f.name: getattr(inner, f.name) for f in fields(TrainingArguments)}
    facts = dataclasses.replace(facts, sharded=False, in_fp32=True, frozen=False)
    return settings, of_transformers, idle_arguments(args, facts)


@pytest.mark.parametrize("key", CHANGED)
def test_each_argument_changes_what_a_run_is_made_of_or_is_named(tmp_path, key):
    kind, _, name = key.rpartition(".")
    config = next((each for each in CONFIGS if each.__name__ == kind), GRPOConfig)
    others, value = CHANGED[key]
    changed = outcome(config, tmp_path, {**others, name: value})
    assert changed != outcome(config, tmp_path, others) or name in READ
    assert not isinstance(changed, str) or name in changed


def test_the_table_has_every_argument_of_ours():
    covered = {key.rpartition(".")[2] for key in CHANGED}
    assert [sorted(ours(config) - covered) for config in CONFIGS] == [[]] * len(CONFIGS)


def test_an_argument_that_nothing_reads_would_be_found(tmp_path):
    @dataclasses.dataclass(repr=False)
    class Extended(GRPOConfig):
        nobody_reads_this: int = dataclasses.field(default=1, metadata={"group": "data"})

    ONLINE[Extended] = resolve_grpo
    try:
        assert outcome(Extended, tmp_path, {"nobody_reads_this": 2}) == outcome(Extended, tmp_path, {})
        assert "nobody_reads_this" not in READ
    finally:
        del ONLINE[Extended]


def test_every_inherited_argument_is_acted_on_or_named():
    acted_on = {name for who in ACTED_ON_BY.values() for name in who.split()}
    inherited = names(TrainingArguments) - set().union(*map(ours, CONFIGS))
    assert inherited <= acted_on | IDLE_INHERITED.keys(), sorted(inherited - acted_on - IDLE_INHERITED.keys())


def test_nothing_is_both_an_argument_and_rejected_by_name():
    everything = set().union(*map(names, CONFIGS))
    assert not everything & REJECTED.keys()
    assert not names(OnlineDPOConfig) & OnlineDPOConfig.rejected.keys()


def test_an_argument_of_every_online_trainer_is_declared_once():
    for config in ONLINE:
        assert names(OnlineArguments) <= names(config)
