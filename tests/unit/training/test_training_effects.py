"""Each argument of ours reaches what it is for."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from lowpeak.errors import ArgumentError, DataError, EngineError, ModelError, RewardTimeoutError
from small_runs import column, make, ones, saved, steps, trained
from tiny_models import char_tokenizer, tiny_model

grpo = partial(make, "GRPO")


def test_each_value_that_is_ours_reaches_what_it_is_for(tmp_path):
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    others = {"learning_rate": 0.25, "logprob_chunk_size": 17, "max_completion_length": 3, "reward_weights": [0.5]}
    run = grpo(tmp_path, **sampling, **others)
    assert {name: getattr(run.collector.settings.sampling, name) for name in sampling} == sampling
    assert run.run.logprob_settings.temperature == 0.5
    assert run.run.logprob_settings.chunk_size == 17
    assert run.create_optimizer().param_groups[0]["lr"] == 0.25
    assert list(run.collector.panel.settings.weights) == [0.5]
    assert max(len(record.completion) for record in run.collector.collect(0, 0, None).records) == 3


@pytest.mark.parametrize(
    ("kind", "idle", "read", "default"),
    [
        ("GRPO", {"vllm_mode": "server"}, lambda run: run.vllm_mode, "colocate"),  # what a rollout_func reads
        ("GRPO", {"max_branches": 3}, lambda run: run.collector.settings.tools.max_branches, 1),  # no program branches
        ("Reward", {"log_entropy": False}, lambda run: run.run.logprob_settings.log_entropy, True),
        (
            *("PPO", {"value_learning_rate": 0.5, "vf_coef": 0.0}),
            *(lambda run: {group["lr"] for group in run.create_optimizer().param_groups}, {1e-2}),
        ),
    ],
)
def test_an_argument_without_effect_has_its_default_where_code_reads_it(tmp_path, kind, idle, read, default):
    assert read(make(kind, tmp_path, **idle)) == default


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.25, "entropy_coef": 0.5}


@pytest.mark.parametrize(
    ("loss_type", "changes", "acted"),
    [("dr_grpo", {"entropy_coef": 0.5}, [0.5, 0.5, 0.5]), ("dapo", ADAPTIVE, [0.0, 0.75, 1.0])],
)
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
    with pytest.raises(ArgumentError, match="cast_lm_head_to_fp32=True"):
        make("Reward", tmp_path, **cast)
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

    late = {"reward_funcs": slow, "reward_timeout": 0.1, "max_steps": 1}
    with pytest.raises(RewardTimeoutError, match="slow"):
        grpo(tmp_path / "a", **late).next_step()
    assert column(trained("GRPO", tmp_path / "b", **late, reward_failures="none"), "rewards/slow/failed") == [8.0]


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
    with pytest.raises(ArgumentError, match="chat_template_kwargs"):
        grpo(tmp_path, chat_template_kwargs={"a": 1}, strict_arguments=True)


@pytest.mark.parametrize("config", [{"a": 1}, "path"])
def test_a_config_that_transformers_would_ignore_is_an_error(tmp_path, config):
    folder = str(saved(tmp_path / "model", tiny_model()))
    with pytest.raises(ArgumentError, match="config="):
        grpo(tmp_path, model=folder, model_init_kwargs={"config": config})
