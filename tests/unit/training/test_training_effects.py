"""Each argument of ours reaches what it is for."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from lowpeak import GRPOConfig
from lowpeak.arguments.grpo import EntropyBonus, resolve_grpo
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.validation import reset_idle_arguments
from lowpeak.errors import ArgumentError, DataError, EngineError, ModelError, RewardTimeoutError
from small_runs import column, make, ones, rows, saved, spread, steps, trained, weights
from tiny_models import char_tokenizer, tiny_model

grpo = partial(make, "GRPO")


def settings(tmp_path, num_rewards=1, **changes):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, num_generations=4, num_iterations=2, **changes)
    online = resolve_online(args, 1, num_rewards)
    return resolve_grpo(reset_idle_arguments(args, online.facts), online)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("learning_rate", 0.25, lambda run: run.create_optimizer().param_groups[0]["lr"]),
        ("logprob_chunk_size", 17, lambda run: run.run.logprob_settings.chunk_size),
        ("temperature", 0.5, lambda run: run.run.logprob_settings.temperature),
        ("temperature", 0.5, lambda run: run.collector.settings.sampling.temperature),
        (
            "max_completion_length",
            3,
            lambda run: max(len(r.completion) for r in run.collector.collect(0, 0, None).records),
        ),
        ("top_p", 0.9, lambda run: run.collector.settings.sampling.top_p),
        ("top_k", 3, lambda run: run.collector.settings.sampling.top_k),
        ("min_p", 0.1, lambda run: run.collector.settings.sampling.min_p),
        ("repetition_penalty", 1.2, lambda run: run.collector.settings.sampling.repetition_penalty),
        ("reward_weights", [0.5], lambda run: list(run.collector.panel.settings.weights)),
    ],
)
def test_each_value_that_is_ours_reaches_what_it_is_for(tmp_path, name, value, where):
    run = grpo(tmp_path, **{name: value})
    assert where(run) == value


@pytest.mark.parametrize(
    ("kind", "idle", "read", "default"),
    [
        ("GRPO", {"vllm_mode": "server"}, lambda run: run.vllm_mode, "colocate"),  # what a rollout_func reads
        ("Reward", {"log_entropy": False}, lambda run: run.run.logprob_settings.log_entropy, True),
        (
            *("PPO", {"value_learning_rate": 0.5, "vf_coef": 0.0}),
            *(lambda run: {group["lr"] for group in run.create_optimizer().param_groups}, {1e-2}),
        ),
    ],
)
def test_an_argument_without_effect_has_its_default_where_code_reads_it(tmp_path, kind, idle, read, default):
    assert read(make(kind, tmp_path, **idle)) == default


STEERED = {
    **{"entropy_coef": 0.2, "entropy_target": 1.5, "entropy_coef_delta": 0.01},
    **{"entropy_coef_min": 0.1, "entropy_coef_max": 0.3},
}


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"loss_type": "dr_grpo"}, "loss_type", "dr_grpo"),
        ({"importance_sampling_level": "sequence"}, "importance_level", "sequence"),
        ({"delta": 4.0}, "delta", 4.0),
        ({"beta": 0.1, "kl_estimator": "k1"}, "kl_estimator", "k1"),
        ({"beta": 0.1, "use_bias_correction_kl": False}, "bias_corrected_kl", False),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile", 0.2),
        ({"entropy_coef": 0.01}, "entropy_bonus", EntropyBonus(0.01)),
        ({"use_adaptive_entropy": True, **STEERED}, "entropy_bonus", EntropyBonus(0.2, 1.5, 0.01, 0.1, 0.3)),
        (
            {"num_rewards": 2, "multi_objective_aggregation": "normalize_then_sum"},
            *("aggregation", "normalize_then_sum"),
        ),
    ],
)
def test_each_algorithm_argument_reaches_the_settings(tmp_path, changes, name, value):
    assert getattr(settings(tmp_path, **changes), name) == value


@pytest.mark.parametrize("changes", [{"loss_type": "bnpo"}, {"loss_type": "cispo", "epsilon_high": 5.0}], ids=str)
def test_losses_that_are_equal_on_policy_train_the_same_weights(tmp_path, changes):
    plain, changed = (
        weights(trained("GRPO", tmp_path, per_device_train_batch_size=32, **more)) for more in ({}, changes)
    )
    for name, weight in plain.items():
        torch.testing.assert_close(changed[name], weight, rtol=1e-5, atol=1e-6)


def test_the_log_comes_every_logging_steps(tmp_path):
    run = trained("GRPO", tmp_path, logging_steps=2, max_steps=4)
    assert [row["step"] for row in steps(run)] == [2, 4]


def test_entropy_is_logged_unless_turned_off(tmp_path):
    for on in (True, False):
        assert bool(column(trained("GRPO", tmp_path, log_entropy=on, reward_funcs=spread), "entropy")) == on


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.25, "entropy_coef": 0.5}


@pytest.mark.parametrize(("changes", "acted"), [({"entropy_coef": 0.5}, [0.5, 0.5, 0.5]), (ADAPTIVE, [0.0, 0.75, 1.0])])
@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_an_entropy_bonus_logs_the_loss_without_it_and_the_coefficient_that_acted(tmp_path, loss_type, changes, acted):
    small = {"max_steps": 3, "optim": "sgd", "micro_batch_tokens": 20}
    run = trained("GRPO", tmp_path, loss_type=loss_type, **small, **changes)
    assert column(run, "entropy_coef") == acted
    for row in steps(run):
        bonus = row["entropy_coef"] * row["entropy"]  # the mean over the step's tokens, all of which are trained on
        assert row["loss"] == pytest.approx(row["policy_loss"] - bonus, abs=1e-6)
    assert "policy_loss" not in grpo(tmp_path).unlogged_metrics


def test_the_head_can_run_in_fp32(tmp_path):
    def rounding_error_of_logits(**changes):
        run = grpo(tmp_path, bf16=True, max_steps=1, **changes)
        errors = []

        def compare(head, inputs, logits):
            if torch.is_tensor(logits):
                exact = inputs[0].double() @ head.weight.double().T
                errors.append((logits - exact).abs().max().item())

        run.model.lm_head.register_forward_hook(compare)
        run.train()
        return max(errors)

    assert rounding_error_of_logits(cast_lm_head_to_fp32=True) < 1e-6 < 1e-4 < rounding_error_of_logits()


def test_a_head_of_a_run_in_fp32_need_not_be_cast(tmp_path):
    cast = {"cast_lm_head_to_fp32": True, "strict_arguments": True}
    for kind in ("GRPO", "Reward"):
        with pytest.raises(ArgumentError, match="cast_lm_head_to_fp32=True"):
            make(kind, tmp_path, **cast)
    grpo(tmp_path, bf16=True, **cast)
    grpo(tmp_path, tiny_model(dtype=torch.bfloat16), beta=0.1, **cast)  # the reference stays in bf16


def test_chat_template_kwargs_reach_the_template(tmp_path):
    tokenizer = char_tokenizer(chat=True)
    tokenizer.chat_template += "{% if think %}7{% endif %}"
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": str(i)}]} for i in range(4)])

    def prompt_of(**changes):
        run = grpo(tmp_path, tiny_model(len(tokenizer)), data, tokenizer, shuffle_dataset=False, **changes)
        return run.collector.cursor.take(1)[0].ids

    assert prompt_of(chat_template_kwargs={"think": True}) == (*prompt_of(), tokenizer.convert_tokens_to_ids("7"))


def test_without_shuffling_prompts_come_in_their_order(tmp_path):
    plain, shuffled = (grpo(tmp_path, shuffle_dataset=on).collector.cursor.take(16) for on in (False, True))
    order = [row["prompt"] for row in rows()]
    assert [prompt.source for prompt in plain] == order
    assert [prompt.source for prompt in shuffled] != order


def test_the_engines_cache_keeps_to_its_bytes(tmp_path):
    with pytest.raises(EngineError, match="kv_cache_bytes"):
        grpo(tmp_path, kv_cache_bytes=100).train()


def test_padding_to_a_multiple_reaches_the_micro_batches(tmp_path):
    work = grpo(tmp_path, pad_to_multiple_of=16, beta=0.1).next_step()
    assert {batch.input_ids_BL.shape[1] % 16 for batch in work.micro_batches} == {0}


def test_a_slow_reward_stops_the_run_or_counts_as_none(tmp_path):
    def slow(completions, **columns):
        time.sleep(2)
        return ones(completions)

    with pytest.raises(RewardTimeoutError, match="slow"):
        grpo(tmp_path / "a", reward_funcs=slow, reward_timeout=0.1).train()
    late = {"reward_funcs": slow, "reward_timeout": 0.1, "reward_failures": "none"}
    assert column(trained("GRPO", tmp_path / "b", **late, max_steps=1), "rewards/slow/failed") == [8.0]


def test_a_model_whose_code_is_its_own_needs_trust(tmp_path):
    folder = Path(saved(tmp_path / "model", tiny_model()))
    (folder / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = (folder / "config.json").read_text().replace('"model_type": "qwen2"', '"model_type": "own"')
    auto = '{"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},'
    (folder / "config.json").write_text(config.replace("{", auto, 1))
    with pytest.raises(ModelError, match="trust_remote_code"):
        grpo(tmp_path / "out", model=str(folder))
    run = grpo(tmp_path / "out", model=str(folder), trust_remote_code=True, beta=0.1)
    assert type(run.model).__name__ == type(run.run.reference.model).__name__ == "OwnModel"


def test_supervised_arguments_reach_the_reader(tmp_path):
    def counted(data, **changes):
        (record,) = make("SFT", tmp_path, data=Dataset.from_list(data), **changes).cursor.take(1)
        return int(record.completion.loss_mask.sum())

    pair = [{"prompt": "12=", "completion": "34"}]
    assert counted(pair) == 3
    assert counted(pair, completion_only_loss=False) == 5
    assert counted(pair, max_length=4) == 1
    assert counted([{"body": "123"}], dataset_text_field="body") == 3
    with pytest.raises(DataError, match="assistant_only_loss"):
        counted(pair, assistant_only_loss=True)
    for name, data, idle in (
        ("dataset_text_field", pair, {"dataset_text_field": "body"}),
        ("dataset_text_field", pair, {"dataset_text_field": "prompt", "formatting_func": lambda row: row["prompt"]}),
        ("chat_template_kwargs", pair, {"chat_template_kwargs": {"a": 1}}),
    ):
        with pytest.raises(ArgumentError, match=name):
            counted(data, **idle, strict_arguments=True)


def test_a_chat_templates_arguments_have_no_effect_on_prompts_of_text(tmp_path):
    grpo(tmp_path, chat_template_kwargs={"a": 1})
    with pytest.raises(ArgumentError, match="chat_template_kwargs"):
        grpo(tmp_path, chat_template_kwargs={"a": 1}, strict_arguments=True)


def test_end_tokens_that_the_model_lacks_are_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="99999"):
        grpo(tmp_path, generation_kwargs={"stop_token_ids": [3, 99999]})


@pytest.mark.parametrize("config", [{"a": 1}, "path"])
def test_a_config_that_transformers_would_ignore_is_an_error(tmp_path, config):
    folder = str(saved(tmp_path / "model", tiny_model()))
    with pytest.raises(ArgumentError, match="config="):
        grpo(tmp_path, model=folder, model_init_kwargs={"config": config})
