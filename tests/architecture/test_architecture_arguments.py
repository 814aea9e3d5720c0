"""No argument is silently ignored: each of ours changes what a run is made of, or is named, and each inherited one has its actor.

Each inherited one is in exactly one list: it always acts, it acts under a condition, or it never acts.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from architecture.sources import files, module_of, tree_of
from lowpeak import GRPOConfig, OnlineDPOConfig, PPOConfig, RewardConfig, RLOOConfig, SFTConfig
from lowpeak.arguments.base import check_and_reset_arguments, run_facts
from lowpeak.arguments.declare import RunFacts, data_argument, declaration
from lowpeak.arguments.grpo import resolve_grpo
from lowpeak.arguments.inherited import ACT_IF, NEVER_ACT
from lowpeak.arguments.names import REJECTED
from lowpeak.arguments.offline import resolve_reward_model, resolve_supervised
from lowpeak.arguments.online import OnlineArguments, resolve_online
from lowpeak.arguments.online_dpo import resolve_online_dpo
from lowpeak.arguments.ppo import resolve_critic, resolve_ppo
from lowpeak.arguments.rloo import resolve_rloo
from lowpeak.arguments.validation import EffectReport, idle_arguments, reset_idle_arguments
from lowpeak.errors import ArgumentError
from lowpeak.trainers.constructor import base_arguments

ONLINE = {
    GRPOConfig: resolve_grpo,
    RLOOConfig: resolve_rloo,
    PPOConfig: lambda args, online: (resolve_ppo(args, online), resolve_critic(args)),
    OnlineDPOConfig: resolve_online_dpo,
}
OFFLINE = {SFTConfig: resolve_supervised, RewardConfig: resolve_reward_model}
CONFIGS = (*ONLINE, *OFFLINE)

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
        "memory_budget": 0.5,
        "model_init_kwargs": {"revision": "a"}, "trust_remote_code": True, "disable_dropout": True,
        "cast_lm_head_to_fp32": True, "chat_template_kwargs": {"a": 1}, "shuffle_dataset": False,
        "micro_batch_tokens": 100, "logprob_chunk_size": 10, "weight_bits": 16, "state_bits": 8,
        "gradient_bits": 32, "offload_optimizer": True, "cudnn_attention": True, "shard_optimizer_states": True,
        "pad_to_multiple_of": 8, "padding_free": False,
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
        "entropy_coef": 0.5, "off_policy_mask_threshold": 0.5}),
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
    (RLOOConfig, {}, {"normalize_advantages": True, "reward_clip_range": (-1.0, 1.0)}),
    (PPOConfig, {}, {"kl_coef": 0.5, "num_ppo_epochs": 2, "cliprange": 0.1, "num_mini_batches": 2, "kl_target": 1.0,
        "early_stop_kl": 0.5, "gamma": 0.5, "lam": 0.5, "whiten_rewards": True, "whiten_advantages": False,
        "missing_eos_penalty": 1.0, "critic": "model", "value_learning_rate": 0.5, "value_warmup_steps": 2,
        "vf_coef": 0.5, "cliprange_value": 0.5}),
    (PPOConfig, {"kl_target": 1.0}, {"kl_horizon": 5}),
    (PPOConfig, {"critic": "model"}, {"value_model_path": "a"}),
    (OnlineDPOConfig, {}, {"missing_eos_penalty": 1.0, "loss_type": "ipo", "beta": [0.5]}),
    (SFTConfig, {}, {"dataset_text_field": "a", "max_length": 9, "completion_only_loss": True,
        "assistant_only_loss": True, "loss_type": "dft", "eos_token": "a", "pad_token": "a",
        "chat_template_path": "a.jinja", "packing": True, "packing_strategy": "wrapped", "eval_packing": True}),
    (RewardConfig, {}, {"center_rewards_coefficient": 0.1}),
]  # fmt: skip
CASES = [(config, others, name, value) for config, others, values in CHANGED for name, value in values.items()]


# transformers' arguments that always act, by the part that reads them: lowpeak, with the same meaning; transformers' Trainer
# around lowpeak's step; accelerate, which prepares and launches; or a user's script. logging_nan_inf_filter, use_cpu and the like
# count as acting if they ask for what happens anyway.
ALWAYS_ACT = {
    "lowpeak": """output_dir per_device_train_batch_size gradient_accumulation_steps seed max_steps
        save_only_model save_total_limit logging_nan_inf_filter""",
    "trainer": """max_grad_norm activation_checkpointing logging_strategy logging_first_step log_level disable_tqdm
        report_to eval_strategy eval_on_start push_to_hub restore_callback_states_from_checkpoint full_determinism
        skip_memory_metrics tf32 use_cpu""",
    "accelerate": "accelerator_config parallelism_config fsdp deepspeed local_rank",
    "scripts": "do_train resume_from_checkpoint",
}


def names(config) -> set[str]:
    return {f.name for f in fields(config)}


def ours(config) -> set[str]:
    return {f.name for f in fields(config) if declaration(f).group}


# They run before the arguments are resolved.
READ_ARGUMENTS = ("lowpeak.arguments", "lowpeak.cli", "lowpeak.setup.preflight", "lowpeak.trainers.constructor")


def outcome(config, folder, said):
    """What a run of two ranks with two rewards is made of; the error where it cannot be."""
    args = config(output_dir=str(folder), use_cpu=True, **said)
    try:
        if config in ONLINE:
            online = resolve_online(args, 2, 2)
            facts, acted = online.facts, reset_idle_arguments(args, online.facts)
            settings = (dataclasses.replace(online, facts=RunFacts()), ONLINE[config](acted, online))
        else:
            facts, acted = run_facts(args), check_and_reset_arguments(args)
            settings = OFFLINE[config](acted)
        facts = dataclasses.replace(facts, sharded=False, in_fp32=True, frozen=False)
        effects = EffectReport(args)
        effects.add_declared(facts)
        effects.report()
    except ArgumentError as error:
        return str(error)
    inner = base_arguments(acted)
    of_transformers = {f.name: getattr(inner, f.name) for f in fields(TrainingArguments)}
    return settings, of_transformers, idle_arguments(args, facts)


@pytest.mark.parametrize(("config", "others", "name", "value"), CASES, ids=str)
def test_each_argument_changes_what_a_run_is_made_of_or_is_named(tmp_path, config, others, name, value):
    changed = outcome(config, tmp_path, {**others, name: value})
    assert changed != outcome(config, tmp_path, others)
    assert not isinstance(changed, str) or name in changed


def test_the_table_has_every_argument_of_ours():
    covered = {name for _, _, name, _ in CASES}
    assert [sorted(ours(config) - covered) for config in CONFIGS] == [[]] * len(CONFIGS)


def test_an_argument_that_nothing_reads_would_be_found(tmp_path):
    @dataclasses.dataclass(repr=False)
    class Extended(GRPOConfig):
        nobody_reads_this: int = data_argument(1, "Not read.")

    ONLINE[Extended] = resolve_grpo
    try:
        assert outcome(Extended, tmp_path, {"nobody_reads_this": 2}) == outcome(Extended, tmp_path, {})
    finally:
        del ONLINE[Extended]


def test_nothing_reads_lowpeaks_arguments_once_the_settings_are_resolved():
    declared = set().union(*map(ours, CONFIGS)) - names(TrainingArguments)
    reads = [
        f"{module_of(path)}: {ast.unparse(node)}"
        for path in files()
        if not module_of(path).startswith(READ_ARGUMENTS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in declared
        if ast.unparse(node.value).split(".")[-1] in ("args", "user_args", "acting_args")
    ]
    assert not reads


def test_every_argument_of_transformers_always_acts_or_acts_under_a_condition_or_never_acts():
    inherited = names(TrainingArguments) - set().union(*map(ours, CONFIGS))
    lists = [{name for line in ALWAYS_ACT.values() for name in line.split()}, ACT_IF.keys(), NEVER_ACT.keys()]
    in_none = sorted(inherited - set().union(*lists))
    assert not in_none, (
        f"put {in_none} of the installed transformers into ALWAYS_ACT here, or ACT_IF or NEVER_ACT of inherited.py"
    )
    assert [sorted(one & other) for one, other in itertools.combinations(lists, 2)] == [[]] * 3


def test_nothing_is_both_an_argument_and_rejected_by_name():
    everything = set().union(*map(names, CONFIGS))
    assert not everything & REJECTED.keys()
    assert not names(OnlineDPOConfig) & OnlineDPOConfig.rejected.keys()


def test_an_argument_of_every_online_trainer_is_declared_once():
    for config in ONLINE:
        assert names(OnlineArguments) <= names(config)
