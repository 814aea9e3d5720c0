"""Arguments become settings, or raise; `tests/unit/arguments/test_arguments_validation.py` has those without effect."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from lowpeak import GRPOConfig, OnlineDPOConfig, PPOConfig, RLOOConfig, SFTConfig
from lowpeak.arguments.base import check_and_reset_arguments
from lowpeak.arguments.grpo import EntropyBonus, resolve_grpo
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.validation import check_values, reset_idle_arguments
from lowpeak.errors import ArgumentError


def grpo(tmp_path, num_rewards=1, world_size=1, **changes):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **changes)
    settings = resolve_online(args, world_size, num_rewards)
    return resolve_grpo(reset_idle_arguments(args, settings.facts), settings)


def online(tmp_path, world_size=1, **changes):
    return resolve_online(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **changes), world_size, 1)


INF, NAN = math.inf, math.nan
STEERED = {
    **{"use_adaptive_entropy": True, "entropy_coef": 0.2, "entropy_target": 1.5, "entropy_coef_delta": 0.01},
    **{"entropy_coef_min": 0.1, "entropy_coef_max": 0.3},
}
SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
SEQUENCE_ACTS = [
    *({"num_iterations": 2}, {"steps_per_generation": 2}, {"top_entropy_quantile": 0.5}, {"beta": 0.1}),
    {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
]
CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}


def test_a_rollout_holds_what_trls_does_and_serves_as_many_steps(tmp_path):
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    settings = online(tmp_path, 2, **batches, steps_per_generation=8, num_iterations=3).rollout
    assert (settings.num_sequences, settings.num_prompts, settings.rows_per_step) == (64, 8, 16)
    assert (settings.steps_per_pass, settings.num_steps) == (4, 12)


def test_generation_batch_size_says_the_same_in_completions(tmp_path):
    assert online(tmp_path, generation_batch_size=32).rollout == online(tmp_path, steps_per_generation=4).rollout


def test_a_rollout_that_would_fill_a_part_of_a_step_fills_the_step(tmp_path):
    step = online(tmp_path, gradient_accumulation_steps=4).rollout
    for part in ({"steps_per_generation": 2}, {"generation_batch_size": 8}):
        assert online(tmp_path, gradient_accumulation_steps=4, **part).rollout == step
        with pytest.raises(ArgumentError, match="gradient_accumulation_steps=4"):
            online(tmp_path, gradient_accumulation_steps=4, num_iterations=2, **part)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"per_device_train_batch_size": 6}, "num_generations=8 .*steps_per_generation=4"),
        (
            {"per_device_train_batch_size": 6, "generation_batch_size": 6},
            "num_generations=8 .*generation_batch_size=24",
        ),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "n=3 .*_steps=2.* steps_per_generation=2"),
        ({"generation_batch_size": 12}, "generation_batch_size=12 .*per_device_train_batch_size.* 8.* 16"),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "generation_batch_size=16 .*steps_per_generation"),
        ({"generation_batch_size": 0}, "generation_batch_size=0 "),
        ({"num_generations": 1, "per_device_train_batch_size": 1}, "num_generations=1 .* 2"),
        ({"loss_type": "ppo"}, "loss_type='ppo' .*'grpo', 'bnpo'"),
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({**CISPO, "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"delta": 1.1, "num_iterations": 2}, r"delta=1\.1 .*1\.2"),
        ({"epsilon": -0.1, "num_iterations": 2}, r"epsilon=-0.1 .* 0 "),
        ({"epsilon_high": -1.0, "num_iterations": 2}, "epsilon_high=-1.0"),
        *(({"temperature": value}, f"temperature={value} .*1e-6") for value in (0.0, 1e-300, -1.0)),
        ({"generation_kwargs": {"temperature": INF}}, r"generation_kwargs\['temperature'\]=inf"),
        *(
            ({"generation_kwargs": {name: value}}, f"{name}.*{remedy}")
            for name, value, remedy in (
                ("num_beams", 4, "token"),
                ("no_repeat_ngram_size", 3, "repetition_penalty"),
                ("typical_p", 0.9, "top_p"),
                ("suppress_tokens", [3], "logit_bias"),
                ("num_return_sequences", 2, "num_generations"),
                ("min_length", 5, "min_new_tokens"),
                ("banana", 1, "min_new_tokens"),
            )
        ),
        *(
            ({"generation_kwargs": {"min_new_tokens": value}}, f"min_new_tokens={value!r}")
            for value in (-1, 1.5, 999999)
        ),
        ({"generation_kwargs": {"stop_strings": [""]}}, r"generation_kwargs.*\[''\]"),
        ({"generation_kwargs": {"stop_strings": 5}}, "generation_kwargs.* 5"),
        ({"generation_kwargs": {"stop_token_ids": 5}}, "stop_token_ids=5"),
        ({"generation_kwargs": {"stop_token_ids": ["a"]}}, r"stop_token_ids=\['a'\]"),
        ({"generation_kwargs": {"stop": ["1"], "stop_strings": ["2"]}}, "generation_kwargs.* stop .*stop_strings"),
        ({"generation_kwargs": {"stop_token_ids": [True]}}, r"stop_token_ids=\[True\]"),
        ({"generation_kwargs": {"seed": -5}}, r"generation_kwargs.* seed=-5"),
        ({"generation_kwargs": {"seed": True}}, r"generation_kwargs.* seed=True"),
        ({"ddp_timeout": "1800"}, "ddp_timeout='1800' .*integer"),
        ({"success_reward": 1}, "success_reward=1 .*string"),
        ({"activation_checkpointing_kwargs": True}, "activation_checkpointing_kwargs=True .*mapping"),
        ({"pad_to_multiple_of": 10**30}, "pad_to_multiple_of=10+ "),
        ({"generation_kwargs": {"eos_token_id": "<eos>"}}, "eos_token_id='<eos>'"),
        ({"generation_kwargs": {"top_p": 1.5}}, r"generation_kwargs\['top_p'\]=1.5 .*\(0, 1\]"),
        ({"top_p": 0.0}, r"top_p=0.0 .*\(0, 1\]"),
        ({"generation_kwargs": {"temperature": 0.0}}, r"generation_kwargs\['temperature'\]=0.0 .*1e-6"),
        ({"padding_free": 0}, "padding_free=0 .*True.*False.*None"),
        ({"share_prompt": 1}, "share_prompt=1 .*True.*False.*None"),
        ({"share_prompt": True, "padding_free": False}, "share_prompt=True .*padding_free=False"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights .*2 .* 1 "),
        *(
            ({"reward_weights": weights}, f"reward_weights={re.escape(repr(weights))} ")
            for weights in ([None], [INF], "1")
        ),
        ({"pad_to_multiple_of": "many"}, "pad_to_multiple_of='many'"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of=0"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, "gradient_accumulation_steps"),
        ({"metric_for_best_model": "loss"}, "metric_for_best_model='loss'"),
    ],
    ids=str,
)
def test_what_is_out_of_range_or_contradicts_itself_raises(tmp_path, changes, pattern):
    with pytest.raises(ArgumentError, match=pattern):
        grpo(tmp_path, **changes)


@pytest.mark.parametrize("steps", [None, 6])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("batch", [1, 4, 8, 11])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_size_that_an_error_names_is_taken_and_only_the_last_changes_the_steps_of_a_rollout(
    tmp_path, batch, accumulation, world_size, steps
):
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "num_generations": 9}
    sizes |= {} if steps is None else {"steps_per_generation": steps}
    with pytest.raises(ArgumentError) as refused:
        online(tmp_path, world_size, **sizes)
    advice = str(refused.value).split(": use ")[1]
    advised = re.findall(r"(\w+)=(\d+)(?: or (\d+))?", advice)
    assert [name for name, *_ in advised][0 :: len(advised) - 1] == [
        "per_device_train_batch_size",
        "steps_per_generation",
    ]
    for name, *values in advised:
        for value in filter(None, values):
            served = online(tmp_path, world_size, **{**sizes, name: int(value)}).rollout.num_steps
            if name == "steps_per_generation":
                assert f"serves {served} steps, off-policy after the first" in advice or served == 1
            else:
                assert served == (1 if steps is None else steps // accumulation)


def test_what_names_what_happens_anyway_is_taken(tmp_path):
    arguments = {"dispatch_batches": False, "non_blocking": True, "gradient_accumulation_kwargs": {}}
    grpo(tmp_path, accelerator_config=arguments, per_device_eval_batch_size=8, ds3_gather_for_generation=True)


@pytest.mark.parametrize(("value", "multiple"), [("auto", 1), (None, 1), ("none", 1), (8, 8), ("16", 16)])
def test_the_multiple_of_padding_is_trls(tmp_path, value, multiple):
    assert online(tmp_path, pad_to_multiple_of=value).memory.pad_to_multiple_of == multiple


def test_generation_kwargs_say_what_arguments_say_in_transformers_names(tmp_path):
    pattern = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    args = GRPOConfig(output_dir=str(tmp_path), generation_kwargs={**pattern, "do_sample": True, "max_new_tokens": 9})
    sampling = resolve_online(args, 1, 1).sampling
    assert {name: getattr(sampling, name) for name in pattern} == pattern
    assert {name: getattr(args, name) for name in pattern} == pattern  # log-probs are at the same temperature
    assert sampling.max_new_tokens == args.max_completion_length == 9
    assert args.generation_kwargs == {**pattern, "do_sample": True, "max_new_tokens": 9}
    copied = dataclasses.replace(args, learning_rate=1e-4)
    assert resolve_online(copied, 1, 1).sampling == sampling
    for name in ("min_new_tokens", "min_tokens"):
        assert online(tmp_path, generation_kwargs={name: 4}).sampling.min_new_tokens == 4


def test_tokens_that_end_a_completion_are_told_in_either_way(tmp_path):
    ends = {"eos_token_id": [3, 4], "stop_token_ids": [5]}
    assert online(tmp_path, generation_kwargs=ends).sampling.stop_token_ids == (5, 3, 4)
    assert online(tmp_path, generation_kwargs={"eos_token_id": 3}).sampling.stop_token_ids == (3,)


def test_an_argument_that_is_said_twice_must_be_said_alike(tmp_path):
    assert online(tmp_path, top_k=5, generation_kwargs={"top_k": 5}).sampling.top_k == 5
    with pytest.raises(ArgumentError, match=r"generation_kwargs\['top_k'\]=5 .*top_k=4"):
        GRPOConfig(output_dir=str(tmp_path), top_k=4, generation_kwargs={"top_k": 5})
    with pytest.raises(ArgumentError, match=r"max_new_tokens=8 .*max_completion_length=9"):
        GRPOConfig(output_dir=str(tmp_path), max_new_tokens=8, max_completion_length=9)
    assert GRPOConfig(output_dir=str(tmp_path), max_new_tokens=8).max_completion_length == 8


def test_ratios_of_completions_in_a_sum_over_tokens_are_warned_of(tmp_path, caplog):
    arguments = {"importance_sampling_level": "sequence", "num_iterations": 2}
    grpo(tmp_path, **arguments, loss_type="grpo")
    assert not caplog.text
    for loss_type in ("dapo", "bnpo", "dr_grpo"):
        grpo(tmp_path, **arguments, loss_type=loss_type)
        assert f"loss_type='{loss_type}'" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"num_iterations": 2, "epsilon_high": 0.28}, "clip_high", 0.28),  # an offset for every loss type
        (CISPO, "clip_high", 4.0),
        ({"num_iterations": 2, "epsilon": 0.1}, "clip_high", 0.1),
        ({}, "score_old", False),  # only where a rollout serves more than its first step
        ({"num_iterations": 2}, "score_old", True),
        ({"steps_per_generation": 2}, "score_old", True),
        *(({**SEQUENCE, **acts}, "importance_level", "sequence") for acts in SEQUENCE_ACTS),
        (STEERED, "entropy_bonus", EntropyBonus(0.2, 1.5, 0.01, 0.1, 0.3)),
        ({"scale_rewards": False}, "scale_rewards", "none"),  # TRL's booleans
        ({"scale_rewards": True}, "scale_rewards", "group"),
    ],
    ids=str,
)
def test_arguments_become_settings_of_grpo(tmp_path, changes, name, value):
    assert getattr(grpo(tmp_path, **changes), name) == value


OUT_OF_RANGE = [
    *(("max_new_tokens", "9"), ("num_generations", "4"), ("num_generations", 4.0), ("micro_batch_tokens", 512.5)),
    *(
        ("max_completion_length", None),
        ("max_completion_length", 0),
        ("log_completions", "no"),
        ("reward_weights", "12"),
    ),
    *(("temperature", INF), ("epsilon", NAN), ("epsilon_high", INF), ("beta", INF), ("success_threshold", NAN)),
    *(("delta", NAN), ("learning_rate", "1e-3"), ("learning_rate", NAN), ("learning_rate", -1e-6), ("seed", -1)),
    *(("gradient_accumulation_steps", 0), ("save_steps", INF), ("save_steps", 0), ("save_total_limit", -1)),
    *(("logging_steps", -1), ("logging_steps", NAN), ("eval_delay", -1), ("max_grad_norm", -1), ("max_grad_norm", INF)),
    *(("weight_decay", -0.1), ("adam_beta1", 1.0), ("adam_beta2", -0.5), ("adam_epsilon", NAN), ("warmup_steps", INF)),
    *(("num_train_epochs", 0), ("num_train_epochs", INF), ("max_steps", -5), ("data_seed", -1), ("ddp_timeout", 0)),
    ("eval_steps", -2),
]


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (SFTConfig, "packing_strategy", "nonsense"),
        *((RLOOConfig, "reward_clip_range", clip) for clip in (5, (1.0, -1.0), (None, 1.0), (0.0, 1.0, 2.0))),
        *((config, "missing_eos_penalty", -1.0) for config in (PPOConfig, OnlineDPOConfig)),
        *((config, "num_generations", 1) for config in (RLOOConfig, OnlineDPOConfig)),
        (PPOConfig, "kl_coef", "a"),  # by the name that the user wrote
        *((GRPOConfig, name, value) for name, value in OUT_OF_RANGE),
    ],
)
def test_a_value_out_of_its_declared_range_raises_whatever_the_others_say(tmp_path, config, name, value):
    acts = {"save_steps": {"save_strategy": "steps"}, "eval_steps": {"eval_strategy": "steps"}}.get(name, {})
    with pytest.raises(ArgumentError, match=f"^{re.escape(f'{name}={value!r} ')}"):
        check_values(config(output_dir=str(tmp_path), use_cpu=True, **{**acts, name: value}))


def test_activation_checkpointing_is_on_and_bf16_off_on_a_cpu_and_nothing_warns(tmp_path, recwarn):
    pattern = {"output_dir": str(tmp_path), "use_cpu": True}
    assert [SFTConfig(**pattern).gradient_checkpointing, SFTConfig(**pattern).bf16] == [True, False]
    assert SFTConfig(**pattern, gradient_checkpointing=False).gradient_checkpointing is False
    assert not [w for w in recwarn if "checkpointing" in str(w.message)]


def test_what_reports_arguments_has_an_evaluations_batch_size(tmp_path):
    for config in (GRPOConfig, SFTConfig):
        assert config(output_dir=str(tmp_path), use_cpu=True).to_sanitized_dict()["eval_batch_size"] == 8
        assert config(output_dir=str(tmp_path), use_cpu=True, per_device_eval_batch_size=3).eval_batch_size == 3


def test_json_on_the_command_line_becomes_a_mapping(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), generation_kwargs='{"stop_strings": ["a"], "seed": 3}')
    sampling = resolve_online(args, 1, 1).sampling
    assert sampling.stop == ("a",)
    assert sampling.seed == 3


@pytest.mark.parametrize(
    "value", [["a"], 3, '{"token": "S3CRET", ', '"S3CRET"', "[1]", "[" * 100_000], ids=lambda v: repr(v)[:9]
)
@pytest.mark.parametrize(
    "name", ["model_init_kwargs", "chat_template_kwargs", "generation_kwargs", "vllm_engine_kwargs"]
)
def test_an_argument_of_keywords_is_a_mapping_or_the_text_of_one(tmp_path, name, value):
    with pytest.raises(ArgumentError, match=f"^{name}.*JSON") as refused:
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})
    assert "S3CRET" not in str(refused.value)


def test_the_users_arguments_are_not_modified(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), gradient_accumulation_steps=4)
    before = args.to_dict()
    check_and_reset_arguments(args)
    assert args.to_dict() == before
