"""Arguments without effect: named in one warning, each with its reason; errors where going on would mislead, or on request."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset

import lowpeak
from changed_arguments import CHANGED, SERVED, VLLM
from lowpeak import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)
from lowpeak.arguments.base import check_and_reset_arguments, run_facts
from lowpeak.arguments.declare import RunFacts
from lowpeak.arguments.grpo import resolve_grpo
from lowpeak.arguments.offline import resolve_reward_model, resolve_supervised
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.online_dpo import resolve_online_dpo
from lowpeak.arguments.ppo import resolve_ppo
from lowpeak.arguments.rloo import resolve_rloo
from lowpeak.arguments.text import load_yaml
from lowpeak.arguments.validation import EffectReport, check_values, idle_arguments, reset_idle_arguments
from lowpeak.errors import ArgumentError
from tiny_models import char_tokenizer, tiny_model

RESOLVE = {
    GRPOConfig: resolve_grpo,
    RLOOConfig: resolve_rloo,
    PPOConfig: resolve_ppo,
    OnlineDPOConfig: resolve_online_dpo,
}
OFFLINE = {SFTConfig: resolve_supervised, RewardConfig: resolve_reward_model}
EVERY = (*RESOLVE, *OFFLINE)
OF_COMMAND = {
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "ppo": PPOConfig,
    "online-dpo": OnlineDPOConfig,
    "sft": SFTConfig,
    "reward": RewardConfig,
    "distillation": DistillationConfig,
    "dpo": DPOConfig,
    "kto": KTOConfig,
}
OTHERWISE = {
    name: value
    for config, others, values in CHANGED
    if config is GRPOConfig and others in (VLLM, SERVED)
    for name, value in values.items()
}
RAISES = ("vllm_structured_outputs_regex", "max_staleness")  # without vLLM


def resolved(folder, config=GRPOConfig, **arguments):
    """The settings without the facts, and what has no effect in a run that shards nothing and computes in fp32."""
    args = config(output_dir=str(folder), use_cpu=True, **arguments)
    if config in RESOLVE:
        online = resolve_online(args, 1, 1)
        facts = online.facts
        settings = (
            dataclasses.replace(online, facts=RunFacts()),
            RESOLVE[config](reset_idle_arguments(args, facts), online),
        )
    else:
        facts, settings = run_facts(args), OFFLINE[config](check_and_reset_arguments(args))
    late = dataclasses.replace(facts, sharded=False, in_fp32=True, frozen=False)
    return settings, idle_arguments(args, late)


@pytest.mark.parametrize(
    ("config", "others", "idle", "reason"),
    [
        *((GRPOConfig, {}, {name: value}, "use_vllm") for name, value in OTHERWISE.items() if name not in RAISES),
        *((GRPOConfig, SERVED, {name: OTHERWISE[name]}, "lowpeak serve") for name in (
            "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size",
            "vllm_engine_kwargs")),
        *((GRPOConfig, VLLM, {name: OTHERWISE[name]}, "vllm_mode='server'") for name in (
            "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")),
        (GRPOConfig, SERVED, {"kv_cache_bytes": 1 << 20}, "kv_cache_memory_bytes"),
        (GRPOConfig, SERVED, {"offload_during_rollout": True}, "servers"),
        (GRPOConfig, {**VLLM, "vllm_importance_sampling_correction": False},
         {"vllm_importance_sampling_mode": "token_mask"}, "vllm_importance_sampling_correction"),
        *((GRPOConfig, {}, {name: value}, "num_iterations") for name, value in (
            ("epsilon", 0.1), ("epsilon_high", 0.28), ("delta", 0.5), ("importance_sampling_level", "sequence"))),
        *((GRPOConfig, {**VLLM, "old_policy": "sampler"}, {f"vllm_importance_sampling_{name}": value}, "old_policy")
          for name, value in (("correction", False), ("mode", "token_mask"), ("clip_max", 2.0), ("clip_min", 0.5))),
        *((config, {}, {"old_policy": "sampler"}, "ratio") for config in (RLOOConfig, OnlineDPOConfig)),
        (GRPOConfig, VLLM, {"importance_sampling_level": "sequence"}, "num_iterations"),
        (GRPOConfig, {"beta": 0.1, "use_bias_correction_kl": False}, {"importance_sampling_level": "sequence"}, "num_iterations"),
        (GRPOConfig, {"loss_type": "cispo", "epsilon_high": 5.0}, {"epsilon": 0.1}, "epsilon_high"),
        *((GRPOConfig, {}, {name: value}, "beta") for name, value in (
            ("kl_estimator", "k1"), ("sync_ref_model", True), ("use_bias_correction_kl", False))),
        (GRPOConfig, {"beta": 0.1}, {"ref_model_sync_steps": 3}, "sync_ref_model"),
        (GRPOConfig, {}, {"entropy_target": 0.5}, "use_adaptive_entropy"),
        (GRPOConfig, {"gradient_accumulation_steps": 4}, {"steps_per_generation": 2}, "gradient_accumulation_steps"),
        (GRPOConfig, {}, {"multi_objective_aggregation": "normalize_then_sum"}, "reward"),
        (GRPOConfig, {}, {"num_completions_to_print": 3}, "log_completions"),
        *((config, {}, {"remove_unused_columns": True}, "columns") for config in (GRPOConfig, SFTConfig, RewardConfig)),
        *((GRPOConfig, {}, {name: True}, "memory") for name in (
            "activation_offloading", "offload_during_rollout", "offload_optimizer")),
        *((config, {}, {"cudnn_attention": True}, "NVIDIA") for config in (GRPOConfig, SFTConfig)),
        *((config, {"weight_bits": 32}, {"shard_optimizer_states": True}, "same parameters") for config in (GRPOConfig, SFTConfig)),
        (GRPOConfig, {"beta": 0.1}, {"offload_frozen_models": True}, "memory"),
        *((GRPOConfig, {}, {name: value}, reason) for name, value, reason in (
            ("dataloader_num_workers", 4, "cursor"), ("torch_compile", True, "recompile"),
            ("use_liger_kernel", True, "without full logits"), ("save_on_each_node", True, "folder"),
            ("auto_find_batch_size", True, "micro_batch_tokens"), ("eval_accumulation_steps", 2, "evaluation"))),
        *((GRPOConfig, {}, {"accelerator_config": {name: value}}, "cursor") for name, value in (
            ("split_batches", True), ("dispatch_batches", True), ("even_batches", False), ("use_seedable_sampler", False))),
        *((GRPOConfig, {"loss_type": "vespo"}, {name: 0.5}, "num_iterations") for name in (
            "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
        *((GRPOConfig, {"num_iterations": 2}, {name: 0.5}, "loss_type") for name in ("vespo_k_pos", "sapo_temperature_pos")),
        (RLOOConfig, {}, {"epsilon": 0.1}, "num_iterations"),
        *((PPOConfig, {"num_iterations": 1}, {name: 0.1}, "num_iterations") for name in (
            "cliprange", "cliprange_value", "early_stop_kl")),
        *((PPOConfig, {"vf_coef": 0.0}, {name: 0.5}, "vf_coef") for name in ("cliprange_value", "value_learning_rate")),
        (PPOConfig, {"beta": 0.0}, {"kl_target": 1.0}, "beta"),
        (PPOConfig, {}, {"kl_horizon": 5}, "kl_target"),
        (OnlineDPOConfig, {}, {"epsilon": 0.1}, "ratio"),
        (OnlineDPOConfig, {}, {"kl_estimator": "k1"}, "KL"),
        (OnlineDPOConfig, VLLM, {"vllm_importance_sampling_correction": True}, "pair"),
        *((OnlineDPOConfig, VLLM, {f"vllm_importance_sampling_{name}": value}, "pair")
          for name, value in (("mode", "token_mask"), ("clip_max", 2.0), ("clip_min", 0.5))),
        (SFTConfig, {}, {"packing_strategy": "wrapped"}, "packing"),
        (SFTConfig, {}, {"eval_packing": True}, "evaluation"),
        (SFTConfig, {}, {"per_device_eval_batch_size": 4}, "micro_batch_tokens"),
        (RewardConfig, {}, {"log_entropy": False}, "log-probs"),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_that_does_not_act_changes_no_setting_and_is_named_with_the_reason(
    tmp_path, config, others, idle, reason
):
    settings, found = resolved(tmp_path, config, **others, **idle)
    expected, before = resolved(tmp_path, config, **others)
    assert settings == expected
    (shown,) = found.keys() - before.keys()
    assert next(iter(idle)) in shown
    assert ("vllm_server_token" in shown) == ("<hidden>" in shown)
    assert reason in found[shown]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 5}
SAVED = {"save_strategy": "no"}
UPLOADED = {
    "hub_model_id": "a/b", "hub_strategy": "end", "hub_always_push": True, "hub_revision": "a", "hub_private_repo": True,
}  # fmt: skip
TRACKED = {"project": "a", "trackio_space_id": "a", "trackio_bucket_id": "a", "trackio_static_space_id": "a"}
BETAS = {"adam_beta1": 0.5, "adam_beta2": 0.5}
DDP = {
    "ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 4, "ddp_broadcast_buffers": True, "ddp_static_graph": True,
}  # fmt: skip
OF_RANKS = {"ddp_timeout": 60, "log_level_replica": "error", "log_on_each_node": False}
LAYERS = {"every_n_layers": 2}


@pytest.mark.parametrize(
    ("others", "arguments", "idle"),
    [
        ({"max_steps": 4}, {"num_train_epochs": 1.0}, True),
        ({}, {"num_train_epochs": 1.0}, False),
        ({}, {"do_predict": True}, True),
        *(({}, {name: value}, True) for name, value in (
            ("do_eval", True), ("eval_steps", 3), ("eval_delay", 3), ("metric_for_best_model", "reward"),
            ("greater_is_better", True))),
        ({"eval_strategy": "epoch"}, {"eval_steps": 3}, True),
        (EVALUATED, {"do_eval": True, "eval_delay": 3, "metric_for_best_model": "reward", "greater_is_better": False}, False),
        ({"eval_on_start": True}, {"do_eval": True}, False),
        (EVALUATED, {"greater_is_better": True}, True),
        (SAVED, {"load_best_model_at_end": True, "metric_for_best_model": "reward"}, 2),
        (SAVED, {"save_steps": 5}, True),
        ({}, {"save_steps": 5}, False),
        (SAVED, {"save_total_limit": 2, "save_only_model": True}, False),
        ({"logging_strategy": "no"}, {"logging_steps": 3}, True),
        ({"logging_strategy": "no"}, {"logging_first_step": True}, False),
        ({"logging_strategy": "no", "eval_strategy": "steps"}, {"logging_steps": 3}, False),
        *(({}, {name: value}, True) for name, value in {**UPLOADED, **TRACKED}.items()),
        ({"push_to_hub": True}, UPLOADED, False),
        ({"report_to": ["trackio"]}, {**TRACKED, "hub_private_repo": True}, False),
        *(({"report_to": tracker}, {"run_name": "a"}, tracker != "wandb") for tracker in ("none", "tensorboard", "wandb")),
        ({}, {"debug": "tpu_metrics_debug"}, True),
        ({}, {"debug": "underflow_overflow"}, False),
        *(({"optim": name}, {each: 0.5}, True) for name in ("adafactor", "sgd", "rmsprop", "galore_adamw") for each in BETAS),
        *(({"optim": name}, {"adam_epsilon": 0.1}, True) for name in ("adafactor", "lion_8bit", "paged_lion_32bit")),
        *(({"optim": name}, BETAS, False) for name in ("adamw_torch", "lion_8bit", "stable_adamw", "ademamix")),
        ({"optim": "galore_adamw"}, {"weight_decay": 0.1}, True),
        *(({"optim": name}, {"optim_args": "a=1"}, True) for name in (
            "adamw_torch", "adamw_torch_fused", "adafactor", "lion_8bit")),
        *(({"optim": name}, {"optim_args": "a=1"}, False) for name in ("sgd", "rmsprop", "adamw_torch_8bit", "galore_adamw")),
        ({}, {"optim_target_modules": "all-linear"}, True),
        ({"optim": "apollo_adamw"}, {"optim_target_modules": "all-linear"}, False),
        *(({"lr_scheduler_type": "constant"}, idle, True) for idle in ({"warmup_steps": 3}, {"lr_scheduler_kwargs": {"a": 1}})),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"lr_scheduler_kwargs": {"a": 1}}, True),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"warmup_steps": 3}, False),
        ({"lr_scheduler_type": "constant", "optim": "schedule_free_adamw"}, {"warmup_steps": 3}, False),
        ({}, {"warmup_steps": 3, "lr_scheduler_kwargs": {}}, False),
        ({"gradient_checkpointing": False}, {"gradient_checkpointing_kwargs": LAYERS}, True),
        ({"shuffle_dataset": False}, {"data_seed": 5}, True),
        ({}, {"data_seed": 5}, False),
        ({}, {"gradient_checkpointing_kwargs": LAYERS}, False),
        ({}, {"fsdp_config": {"version": 2}}, True),
        *(({}, {name: value}, True) for name, value in (DDP | OF_RANKS).items()),
        ({}, {"accelerator_config": {"non_blocking": True}}, True),
        ({}, {"do_train": True, "save_total_limit": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2}, False),
    ],
    ids=str,
)  # fmt: skip
def test_an_inherited_argument_that_does_not_act_is_named_and_no_other_is(tmp_path, others, arguments, idle):
    _, found = resolved(tmp_path, **others, **arguments)
    assert len(found) == idle, found
    assert all(name in shown for name, shown in zip(arguments, found, strict=False))


@pytest.mark.parametrize(
    "arguments",
    [
        *({name: "foo"} for name in (
            "lr_scheduler_type", "optim", "eval_strategy", "save_strategy", "logging_strategy", "hub_strategy", "debug",
            "log_level", "log_level_replica", "warmup_steps", "logging_steps", "save_steps")),
        {"logging_strategy": "foo", "save_strategy": "epoch"},
        *({name: text} for name in ("lr_scheduler_kwargs", "accelerator_config", "deepspeed") for text in ("{bad", "{}}")),
        {"accelerator_config": {"foo": 1}},
        {"accelerator_config": "foo.json", "save_strategy": "no"},
        {"fsdp_config": "foo.json", "fsdp": True},
        {"deepspeed": "foo.json"},
        {"fsdp": "foo"},
        {"load_best_model_at_end": True, "save_strategy": "epoch"},
    ],
    ids=str,
)  # fmt: skip
def test_what_transformers_cannot_read_is_named(tmp_path, arguments):
    with pytest.raises(ArgumentError, match=next(iter(arguments))) as refused:
        check_values(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **arguments))
    assert "\n" not in str(refused.value)


def test_arguments_of_ranks_act_with_several_processes_and_ddps_never_do(tmp_path):
    ranks = dataclasses.make_dataclass("Ranks", [], bases=(GRPOConfig,), namespace={"world_size": 2})
    idle = idle_arguments(ranks(output_dir=str(tmp_path), use_cpu=True, **DDP, **OF_RANKS), RunFacts())
    assert {shown.partition("=")[0] for shown in idle} == set(DDP)


def test_arguments_of_the_hub_and_of_trackers_keep_their_values_for_who_else_reads_them(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, hub_model_id="a/b", run_name="a", save_strategy="no", save_steps=5
    )
    acting = reset_idle_arguments(args, RunFacts())
    assert (acting.hub_model_id, acting.run_name, acting.save_steps) == ("a/b", "a", 500)


@pytest.mark.parametrize("config", EVERY)
def test_defaults_and_copies_of_them_name_nothing(tmp_path, config):
    args = config(output_dir=str(tmp_path), use_cpu=True)
    spelled_out = config(**{f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init})
    for each in (args, dataclasses.replace(args), spelled_out, config(**json.loads(args.to_json_string()))):
        assert not idle_arguments(each, run_facts(each))


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        *((GRPOConfig, {name: value}) for name, value in (
            ("save_strategy", "best"), ("ddp_backend", "gloo"),
            ("fp16", True), ("label_smoothing_factor", 0.1), ("neftune_noise_alpha", 5.0),
            ("average_tokens_across_devices", False), ("train_sampling_strategy", "sequential"))),
        (GRPOConfig, {"vllm_structured_outputs_regex": "a+"}),
        (GRPOConfig, {"vllm_server_base_url": "http://a:1", **VLLM}),
        (GRPOConfig, {"vllm_server_host": "a", "vllm_server_base_url": "http://a:1", **SERVED}),
        (GRPOConfig, {"vllm_gpu_memory_utilization": 0.5, "kv_cache_bytes": 1 << 20, **VLLM}),
        *((GRPOConfig, {"max_staleness": 1, **others}) for others in ({}, VLLM)),
        (GRPOConfig, {"offload_during_rollout": True, "max_staleness": 1, **SERVED}),
        (GRPOConfig, {"max_staleness": 1, "old_policy": "policy", "vllm_importance_sampling_correction": False, **SERVED}),
        (RLOOConfig, {"max_staleness": 1, "vllm_importance_sampling_correction": False, **SERVED}),
        *((config, {"max_staleness": 2, "vllm_server_base_url": ["http://a:1", "http://b:1"], **level, **SERVED})
          for config, level in ((RLOOConfig, {}), (GRPOConfig, {"importance_sampling_level": "sequence", "num_iterations": 2}))),
        (GRPOConfig, {"max_staleness": 2, **SERVED}),
        (GRPOConfig, {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"}),
        (GRPOConfig, {"sync_ref_model": True, "offload_frozen_models": True, "beta": 0.1}),
        (PPOConfig, {"dynamic_sampling_rounds": 2}),
        (PPOConfig, {"value_model_path": "x"}),
        (PPOConfig, {"missing_eos_penalty": 1.0, "mask_truncated_completions": True}),
        (OnlineDPOConfig, {"missing_eos_penalty": 1.0, "mask_truncated_completions": True}),
        (RewardConfig, {"router_aux_loss_coef": 0.1}),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_without_which_a_run_would_mislead_raises(tmp_path, config, arguments):
    name = next(iter(arguments))
    with pytest.raises(ArgumentError, match=name):
        resolved(tmp_path, config, **arguments)


THREE = {"epsilon": 0.1, "kl_estimator": "k1", "dataloader_num_workers": 4}


def train(folder, optimizers=(None, None), model=None, **arguments):
    tokenizer = char_tokenizer()
    sizes = {"per_device_train_batch_size": 8, "max_completion_length": 4}
    args = GRPOConfig(output_dir=str(folder), use_cpu=True, report_to="none", **sizes, **arguments)
    return GRPOTrainer(
        model=model or tiny_model(len(tokenizer)),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=args,
        optimizers=optimizers,
        train_dataset=Dataset.from_list([{"prompt": "1="}] * 4),
        processing_class=tokenizer,
    )


def test_idle_arguments_are_named_in_one_warning_with_their_reasons(tmp_path, caplog):
    train(tmp_path, **THREE)
    (record,) = [each for each in caplog.records if "strict_arguments" in each.getMessage()]
    message = record.getMessage()
    assert record.levelname == "WARNING"
    assert record.name.startswith("lowpeak")
    assert "\n" not in message
    assert [name in message for name in ("epsilon=0.1", "kl_estimator='k1'", "dataloader_num_workers=4")] == [True] * 3
    assert [word in message for word in ("num_iterations", "beta", "cursor")] == [True] * 3
    caplog.clear()
    train(tmp_path)
    assert "strict_arguments" not in caplog.text


def test_strict_arguments_raises_for_all_of_them_at_once_those_too_that_models_and_devices_leave_idle(tmp_path):
    late = {"cast_lm_head_to_fp32": True, "gather_budget": "8GiB", "offload_frozen_models": True}
    with pytest.raises(ArgumentError, match=r"epsilon=0\.1") as refused:
        train(tmp_path, **THREE, **late, strict_arguments=True)
    assert all(f"{name}={value!r} (" in str(refused.value) for name, value in {**THREE, **late}.items())


def test_what_models_and_devices_leave_idle_is_named_too(tmp_path, caplog):
    idle = {"cast_lm_head_to_fp32": True, "gather_budget": "1GiB"}
    train(tmp_path, **idle)
    assert [name for name in idle if name not in caplog.text] == []


def test_arguments_of_an_optimizer_and_a_schedule_do_not_act_if_those_are_passed(tmp_path, caplog):
    model = tiny_model(len(char_tokenizer()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    arguments = {"learning_rate": 0.5, "optim": "adamw_torch", "weight_decay": 0.1, "adam_beta1": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 3}  # fmt: skip
    train(tmp_path, (optimizer, schedule), model, **arguments)
    assert [name for name in arguments if f"{name}=" not in caplog.text] == []
    caplog.clear()
    train(tmp_path, **arguments)
    assert "strict_arguments" not in caplog.text


def configs_in(text):
    """The calls of a configuration in Python, with the arguments that are literals."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"config_class"} | {
            config.__name__ for config in OF_COMMAND.values()
        }:
            literals = {each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)}
            name = ast.unparse(node.func)
            yield getattr(lowpeak, "GRPOConfig" if name == "config_class" else name), literals


def test_the_configurations_of_readme_and_examples_name_nothing(tmp_path):
    root = Path(__file__).parents[3]
    python = [path.read_text() for path in sorted((root / "examples").glob("*.py"))]
    python += re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)
    found = [each for text in python for each in configs_in(text)]
    for path in sorted((root / "examples").glob("*.yaml")):
        kind = re.search(r"lowpeak (\S+) --config", path.read_text())[1]
        config = OF_COMMAND[kind]
        known = {f.name for f in dataclasses.fields(config)}
        found.append((config, {name: value for name, value in load_yaml(path).items() if name in known}))
    assert len(found) >= 21
    for config, arguments in found:
        args = config(**{**arguments, "output_dir": str(tmp_path), "use_cpu": True})
        assert not idle_arguments(args, run_facts(args)), arguments


def test_torch_compile_without_effect_leaves_transformers_no_backend_to_compile_with(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, torch_compile=True)
    assert (args.torch_compile_backend, args.torch_compile_mode) == (None, None)


def test_another_rank_than_the_first_says_nothing(tmp_path, caplog):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, epsilon=0.1)
    other = dataclasses.make_dataclass("Other", [], bases=(GRPOConfig,), namespace={"process_index": 1})
    for each, count in ((other(output_dir=str(tmp_path), use_cpu=True, epsilon=0.1), 0), (args, 1)):
        effects = EffectReport(each)
        effects.add_declared(RunFacts(num_steps=1))
        effects.report()
        assert caplog.text.count("epsilon=0.1") == count


def test_an_argument_that_has_no_effect_on_later_rows_is_reported_once(tmp_path, caplog):
    effects = EffectReport(GRPOConfig(output_dir=str(tmp_path), use_cpu=True))
    effects.report()
    assert not caplog.text
    for row in (3, 4):
        effects.add("chat_template_kwargs={'a': 1}", f"dataset row {row} is text")
    (record,) = caplog.records
    assert (
        "1 argument has no effect in this run: chat_template_kwargs={'a': 1} (dataset row 3 is text)"
        in record.getMessage()
    )


@pytest.mark.parametrize("name", ["max_staleness", "max_steps", "learning_rate"])
def test_a_boolean_is_no_number(tmp_path, name):
    with pytest.raises(ArgumentError, match=f"{name}=True"):
        check_values(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: True}))
