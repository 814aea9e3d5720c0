"""Defaults are TRL 1.16's, but for those that stand here with the reason."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import HfArgumentParser

import lowpeak
from architecture.arguments_page import PAGE, text
from lowpeak.arguments.base import run_facts
from lowpeak.arguments.validation import idle_arguments
from lowpeak.cli.parser import parse_arguments
from lowpeak.errors import ArgumentError
from preference_data import tiny_classifier
from tiny_models import char_tokenizer, tiny_model

# What TRL 1.16's configurations declare beside transformers' TrainingArguments, or with another default.
EVERY = {
    "bf16": None, "gradient_checkpointing": True, "logging_steps": 10, "model_init_kwargs": None,
    "trust_remote_code": False, "per_device_eval_batch_size": 8,
}  # fmt: skip
VLLM = {
    "use_vllm": False, "vllm_mode": "colocate", "vllm_model_impl": "vllm", "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None, "vllm_server_base_url": None, "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000, "vllm_server_timeout": 240.0, "vllm_group_port": 51216, "vllm_tensor_parallel_size": 1,
}  # fmt: skip
ONLINE = {
    **EVERY, **VLLM, "remove_unused_columns": False, "disable_dropout": False, "ds3_gather_for_generation": True,
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None,
    "cache_implementation": None, "reward_weights": None,
}  # fmt: skip
GROUPS = {
    **ONLINE, "learning_rate": 1e-6, "num_generations_eval": None, "max_completion_length": 512,
    "shuffle_dataset": True, "pad_to_multiple_of": "auto", "generation_batch_size": None, "steps_per_generation": None,
    "chat_template_kwargs": None, "vllm_gpu_memory_utilization": 0.3, "vllm_max_model_length": None,
    "num_iterations": 1, "epsilon": 0.2, "epsilon_high": None, "mask_truncated_completions": False,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "log_completions": False,
    "log_multimodal": True, "num_completions_to_print": None, "log_unique_prompts": False,
    "use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None,
    "use_transformers_paged": False, "router_aux_loss_coef": None,
}  # fmt: skip
OFFLINE = {
    **EVERY, "remove_unused_columns": True, "chat_template_path": None, "dataset_num_proc": None, "eos_token": None,
    "pad_token": None, "max_length": 1024, "pad_to_multiple_of": "auto", "activation_offloading": False,
}  # fmt: skip
PREFERENCES = {
    **EVERY,
    "learning_rate": 1e-6,
    "router_aux_loss_coef": None,
    "disable_dropout": True,
    "dataset_num_proc": None,
    "max_length": 1024,
    "pad_to_multiple_of": "auto",
    "precompute_ref_log_probs": False,
    "precompute_ref_batch_size": None,
    "beta": 0.1,
    "activation_offloading": False,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
}
TRL = {
    "GRPOConfig": {
        **GROUPS, "num_generations": 8, "beta": 0.0, "cast_lm_head_to_fp32": False, "delta": None,
        "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "importance_sampling_level": "token",
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "loss_type": "dapo",
        "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_coef_min": 0.0,
        "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
        "max_tool_calling_iterations": None, "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
        "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None, "use_bias_correction_kl": True,
        "log_completions_hub_repo": None, "vllm_importance_sampling_cap": None,
    },
    "RLOOConfig": {
        **GROUPS, "num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None,
    },
    "OnlineDPOConfig": {
        **ONLINE, "learning_rate": 5e-7, "reward_model_path": None, "max_new_tokens": 64, "max_length": 512,
        "temperature": 0.9, "missing_eos_penalty": None, "beta": [0.1], "loss_type": "sigmoid",
        "disable_dropout": True, "vllm_gpu_memory_utilization": 0.55,
    },
    "SFTConfig": {
        **OFFLINE, "learning_rate": 2e-5, "router_aux_loss_coef": None, "dataset_text_field": "text",
        "dataset_kwargs": None, "truncation_mode": "keep_start", "shuffle_dataset": False, "packing": False,
        "packing_strategy": "bfd", "padding_free": False, "eval_packing": None, "completion_only_loss": None,
        "assistant_only_loss": False, "loss_type": "nll",
    },
    "DPOConfig": {
        **PREFERENCES, "padding_free": False, "loss_type": ["sigmoid"], "loss_weights": None, "ld_alpha": None,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "label_smoothing": 0.0,
        "use_weighting": False, "discopop_tau": 0.05, "pad_token": None, "truncation_mode": "keep_start",
    },
    "KTOConfig": {
        **PREFERENCES, "train_sampling_strategy": "sequential", "loss_type": "kto", "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    },
    "RewardConfig": {
        **OFFLINE, "learning_rate": 1e-4, "disable_dropout": True, "center_rewards_coefficient": None,
    },
}  # fmt: skip

# Our default where it differs, and why.
DIFFERENT = {
    "gradient_checkpointing": (None, "None is on, under whichever name the installed transformers has for it"),
    "per_device_eval_batch_size": (None, "as many rows as the memory holds; micro-batches follow a budget"),
    "ds3_gather_for_generation": (None, "as much of a sharded model is gathered as the memory holds"),
    ("GRPOConfig", "disable_dropout"): (True, "dropout makes log-probs of training differ from those of sampling"),
    ("RLOOConfig", "disable_dropout"): (True, "as in GRPO"),
    "vllm_group_port": (None, "any free port, so that two runs of a host do not meet"),
    ("OnlineDPOConfig", "temperature"): (1.0, "log-probs are at the sampling temperature, and TRL's are at 1"),
    ("OnlineDPOConfig", "max_new_tokens"): (None, "another name of max_completion_length, whose default is 64"),
    ("OnlineDPOConfig", "beta"): (0.1, "a list of one is its number"),
    ("SFTConfig", "shuffle_dataset"): (True, "rows are drawn in random order, as TRL's sampler does without it, too"),
    ("SFTConfig", "padding_free"): (
        None,
        "without padding where the model's attention can; nothing is truncated by it",
    ),
    ("DPOConfig", "padding_free"): (None, "as in supervised training"),
    ("KTOConfig", "train_sampling_strategy"): ("random", "rows are shuffled, and z0 is of each step's own pairs"),
    ("SFTConfig", "remove_unused_columns"): (False, "a reader takes the columns that it needs; either value says so"),
    ("RewardConfig", "remove_unused_columns"): (False, "as in supervised training"),
}
# Refused also at TRL's default, which acts there and could not here.
REFUSED_DEFAULTS = {("OnlineDPOConfig", "max_length"), ("KTOConfig", "train_sampling_strategy")}


def defaults_of(name):
    return {
        f.name: f.default if f.default is not MISSING else f.default_factory()
        for f in fields(getattr(lowpeak, name))
        if f.default is not MISSING or f.default_factory is not MISSING
    }


@pytest.mark.parametrize("name", TRL)
def test_a_default_is_trls_or_differs_for_a_reason(name):
    ours = defaults_of(name)
    expected = {key: DIFFERENT.get((name, key), DIFFERENT.get(key, (value,)))[0] for key, value in TRL[name].items()}
    assert {key: ours[key] for key in expected if key in ours} == {k: v for k, v in expected.items() if k in ours}


def test_every_difference_that_is_listed_is_one():
    for key, (ours, _) in DIFFERENT.items():
        names = [key] if isinstance(key, tuple) else [(name, key) for name in TRL if key in TRL[name]]
        assert all(TRL[name][argument] != ours == defaults_of(name)[argument] for name, argument in names)


@pytest.mark.parametrize("name", TRL)
def test_a_name_that_is_not_ours_says_nothing_at_trls_default(tmp_path, name):
    config, ours = getattr(lowpeak, name), defaults_of(name)
    foreign = {key: value for key, value in TRL[name].items() if key not in ours}
    for key, value in foreign.items():
        if (name, key) in REFUSED_DEFAULTS:
            continue
        config(output_dir=str(tmp_path), use_cpu=True, **{key: value})
        with pytest.raises(ArgumentError, match=repr(key)):
            config(output_dir=str(tmp_path), use_cpu=True, **{key: "another"})


@pytest.mark.parametrize("name", TRL)
def test_a_trainer_takes_trls_defaults_spelled_out(tmp_path, name):
    shown = {key: value for key, value in TRL[name].items() if (name, key) not in REFUSED_DEFAULTS}
    args = getattr(lowpeak, name)(output_dir=str(tmp_path), use_cpu=True, report_to="none", **shown)
    tokenizer = char_tokenizer()
    columns = {
        "SFTConfig": ["prompt", "completion"],
        **{key: ["chosen", "rejected"] for key in ("RewardConfig", "DPOConfig")},
        "KTOConfig": ["prompt", "completion", "label"],
    }.get(name, ["prompt"])
    online = {} if len(columns) > 1 else {"reward_funcs": lambda completions, **more: [0.0] * len(completions)}
    getattr(lowpeak, name.replace("Config", "Trainer"))(
        model=tiny_classifier() if name == "RewardConfig" else tiny_model(context=1024),
        args=args,
        train_dataset=Dataset.from_list([dict(zip(columns, ("1", "2", True), strict=False))] * 8),
        processing_class=tokenizer,
        **online,
    )


def test_the_page_for_trls_users_has_every_field():
    page = (Path(__file__).parents[3] / "docs" / "migrating.md").read_text()
    configs = [name for name in TRL if name != "OnlineDPOConfig"]  # its table is in docs/algorithms.md
    assert {field for name in configs for field in TRL[name] if f"`{field}`" not in page} == set()
    assert len(TRL["GRPOConfig"].keys() - defaults_of("GRPOConfig").keys()) <= 10


def test_the_page_of_arguments_is_that_of_the_arguments():
    assert PAGE.read_text(encoding="utf-8") == text(), "run python tests/architecture/arguments_page.py"


def test_a_file_with_trls_defaults_is_read(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("dataset_kwargs: null\ntruncation_mode: keep_start\nlearning_rate: 1e-5\nloss_type: nll\n")
    arguments = parse_arguments([lowpeak.SFTConfig], ["--config", str(path)], "lowpeak sft")
    assert arguments == {"learning_rate": 1e-5, "loss_type": "nll"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GRPOConfig", {"scale_rewards": "batch", "gather_budget": "8GiB", "vllm_bucket_size": "1MiB"}),
        ("PPOConfig", {"num_mini_batches": 2, "gradient_accumulation_steps": 4}),
        ("OnlineDPOConfig", {"beta": 0.3, "max_new_tokens": 9}),
        ("SFTConfig", {"packing": True, "pad_to_multiple_of": "8"}),
        ("RewardConfig", {"center_rewards_coefficient": 0.5}),
    ],
)
def test_hf_argument_parser_reads_a_configuration(tmp_path, name, words):
    parser = HfArgumentParser((getattr(lowpeak, name),))
    assert "--learning_rate" in parser.format_help()
    words = {"output_dir": str(tmp_path), "use_cpu": True, **words}
    (args,) = parser.parse_args_into_dataclasses([f"--{key}={value}" for key, value in words.items()])
    assert {key: getattr(args, key) for key in words} == words
    assert set(idle_arguments(args, run_facts(args))) <= {"vllm_bucket_size='1MiB'"}


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (lowpeak.DPOConfig, "ref_model", "an argument of the trainer"),
        (lowpeak.DistillationConfig, "teacher_model", "an argument of the trainer.*teacher_model_name_or_path"),
        (lowpeak.KTOConfig, "peft_config", "an argument of the trainer.*use_peft"),
    ],
)
def test_an_argument_of_the_constructor_is_said_to_be_one(tmp_path, config, name, words):
    with pytest.raises(ArgumentError, match=f"'{name}' is {words}"):
        config(str(tmp_path), **{name: "a"})
