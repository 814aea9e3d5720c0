"""Bad input to a trainer is one clear sentence that says what is wrong, where, and what to do, before anything trains."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainingArguments

from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, SFTTrainer
from lowpeak.errors import ArgumentError, CheckpointError, DataError, EngineError, LowpeakError, ModelError, RewardError
from small_runs import TOKENIZER, make, ones, pair_rows, supervised_rows, trained
from tiny_models import char_tokenizer, tiny_model

INF, NAN = math.inf, math.nan
ROWS = [{"prompt": f"{i}="} for i in range(8)]
TABLE = Dataset.from_list(ROWS)
grpo, sft = partial(make, "GRPO", data=TABLE, max_steps=1), partial(make, "SFT", max_steps=1)
USER = {"role": "user", "content": "1="}


def names(error: type[LowpeakError], pattern: str):
    """The error of a message with these arguments, values and places."""
    return pytest.raises(error, match=pattern)


# the dataset


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        ([], "empty"),
        ([{"question": "1="}], "row 0 .*'prompt'.*'question'"),
        ([*ROWS, {"prompt": ""}], "row 8"),
        ([*ROWS, {"prompt": None}], "row 8"),
        ([{"prompt": []}], "row 0"),
        ([{"prompt": "1=", "image": "x"}], "images"),
        ([{"prompt": "1=", "completions": "x"}], "'completions'"),
        (ROWS[:1], r" 1 .* 2 \(8 .*, num_generations=4\)"),
        (None, "train_dataset.*'prompt'"),
        ([{"prompt": "1" * 124}, *ROWS], "row 0: .* 124 "),
    ],
)
def test_a_data_set_that_cannot_be_used_names_the_row(tmp_path, data, pattern):
    with names(DataError, pattern):
        grpo(tmp_path, data=data if data is None else Dataset.from_list(data))


@pytest.mark.parametrize(
    ("data", "pattern"),
    [
        ([], "empty"),
        ([{"question": "1="}], "row 0 .*'question'.*'prompt'.*'completion'"),
        ([{"prompt": "1="}], "row 0 .*'prompt'"),
        ([{"input_ids": [3, 4, -5, 1]}], "row 0 .* -5"),
        ([{"input_ids": [3, 4.5, 1]}], r"row 0 .*'input_ids' \[3.0, 4.5, 1.0\]"),
        ([{"input_ids": ["3", "4"]}], r"row 0 .*'input_ids' \['3', '4'\]"),
    ],
)
def test_supervised_rows_that_cannot_be_used_are_named(tmp_path, data, pattern):
    with names(DataError, pattern):
        sft(tmp_path, data=Dataset.from_list(data))


@pytest.mark.parametrize("kind", [Dataset.from_list, list])
def test_a_prompt_that_is_too_long_may_be_dropped_and_is_counted(tmp_path, caplog, kind):
    run = grpo(tmp_path, data=kind([{"prompt": "1" * 124}, *ROWS]), overlong_prompts="drop")
    assert run.collector.cursor.rows_per_epoch == 8
    assert "1 of 9" in caplog.text
    assert "123" in caplog.text


def test_a_stream_needs_an_end_and_a_first_row(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    for trainer in (grpo, sft):
        with names(ArgumentError, "max_steps"):
            trainer(tmp_path, data=stream, max_steps=-1)
    with names(DataError, "stream"):
        grpo(tmp_path, data=IterableDataset.from_generator(lambda: iter([]))).train()


# the tokenizer and the model


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_sequence(tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.pad_token = None
    run = grpo(tmp_path, tokenizer=tokenizer)
    run.train()
    assert run.run.budget.pad_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    for trainer in (grpo, sft):
        with names(ModelError, "tokenizer.eos_token.*pad_token"):
            trainer(tmp_path, tokenizer=tokenizer)


def test_a_reference_that_lacks_tokens_of_the_policy_is_refused(tmp_path):
    with names(ArgumentError, "ref_model .* 9 .* 13"):
        grpo(tmp_path, ref_model=tiny_model(9), beta=0.1)


def test_a_tokenizer_or_a_model_that_is_nowhere_is_refused(tmp_path):
    with names(DataError, "tokenizer.chat_template"):
        grpo(tmp_path, data=[{"prompt": [USER]}] * 4)
    with names(ArgumentError, "processing_class=tokenizer"):
        grpo(tmp_path, tokenizer=False)
    for name in ("no-such-owner/no-such-model", "/no/such/folder"):
        with names(ModelError, f"'{name}'"):
            grpo(tmp_path, name)


# rewards


@pytest.mark.parametrize(("rewards", "pattern"), [(None, "reward_funcs"), ([], "reward_funcs"), (3, " 3")])
def test_a_reward_that_is_none_is_refused(tmp_path, rewards, pattern):
    with names(ArgumentError, pattern):
        grpo(tmp_path, reward_funcs=rewards)


def infinite(completions, **columns):
    return [float("inf")] * len(completions)


def failing(completions, **columns):
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("reward", "pattern"),
    [
        (infinite, "Reward 'infinite'.*inf"),
        (failing, "Reward 'failing'.*KeyError: 'answer'"),
        (lambda completions, **columns: [1.0], "Reward '<lambda>'.*1.*8"),
        (lambda completions, answer: [1.0], "Reward '<lambda>' .*answer"),
    ],
)
def test_a_reward_that_fails_is_named(tmp_path, reward, pattern):
    with names(RewardError, pattern):
        grpo(tmp_path, reward_funcs=reward).train()


def test_a_sigterm_that_comes_while_a_failure_is_explained_does_not_cut_the_explanation(tmp_path, monkeypatch):
    explained = []

    @contextmanager
    def explaining(ranks, where):
        try:
            yield
        except RewardError:
            os.kill(os.getpid(), signal.SIGTERM)
            explained.append("said")
            raise

    monkeypatch.setattr("lowpeak.trainers.base.detect_failures", explaining)
    before = signal.getsignal(signal.SIGTERM)
    run = grpo(tmp_path, reward_funcs=failing)
    with names(RewardError, "'failing'"):
        run.train()
    assert explained == ["said"]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, r"Ctrl-C"), (signal.SIGTERM, r"SIGTERM.*kill -INT {pid}\b")]
)
def test_a_signal_is_told_with_what_stops_the_run_at_once(tmp_path, number, words, caplog):
    def interrupting(completions, **columns):
        os.kill(os.getpid(), number)
        return ones(completions)

    with pytest.raises(KeyboardInterrupt):
        grpo(tmp_path, reward_funcs=interrupting).train()
    (told,) = [record.getMessage() for record in caplog.records if "finishing" in record.getMessage()]
    assert re.search(words.format(pid=os.getpid()), told)
    assert ("again" in told) == (number == signal.SIGINT)


# arguments


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"success_reward": "accuracy"}, "success_reward='accuracy'.*ones"),
        ({"epsilon": -0.1, "num_iterations": 2}, r"epsilon=-0.1 .* 0 "),
        ({"epsilon": math.nan, "num_iterations": 2}, "epsilon=nan"),
        ({"epsilon_high": -1.0, "num_iterations": 2}, "epsilon_high=-1.0"),
        *(({"temperature": value}, f"temperature={value} .*1e-6") for value in (0.0, 1e-300, -1.0)),
        ({"output_dir": ""}, "output_dir=''"),
        ({"max_completion_length": 0}, "max_completion_length=0"),
        ({"max_completion_length": 128}, "max_completion_length=128 .* 128 "),
        *(({name: INF}, f"{name}=inf") for name in ("temperature", "epsilon_high", "beta")),
        *(({name: NAN}, f"{name}=nan") for name in ("success_threshold", "delta")),
        ({"reward_weights": [INF]}, r"reward_weights=\[inf\]"),
        ({"generation_kwargs": {"temperature": INF}}, r"generation_kwargs\['temperature'\]=inf"),
        ({"num_generations": 3}, "num_generations=3"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1},
            "metric_for_best_model='loss'.*'reward'.*'accuracy'",
        ),
        ({"peft_config": {"r": 4}}, r"peft_config.*{'r': 4}.*LoraConfig\("),
    ],
)
def test_an_argument_out_of_its_range_is_named(tmp_path, changes, pattern):
    with names(ArgumentError, pattern):
        make("GRPO", tmp_path, data=TABLE, **{"eval_dataset": TABLE, "max_steps": 1, **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("save_steps", INF), ("logging_steps", -1), ("logging_steps", NAN), ("eval_delay", -1)),
        *(("save_total_limit", -1), ("max_grad_norm", -1), ("max_grad_norm", INF), ("weight_decay", -0.1)),
        *(("adam_beta1", 1.0), ("adam_beta2", -0.5), ("adam_epsilon", NAN), ("learning_rate", -1e-6)),
        *(("warmup_steps", INF), ("num_train_epochs", 0), ("num_train_epochs", INF), ("max_steps", -5)),
        *(("data_seed", -1), ("ddp_timeout", 0), ("save_steps", 0), ("eval_steps", -2)),
    ],
)
def test_an_argument_of_transformers_out_of_its_range_is_named_by_every_trainer(tmp_path, name, value):
    acts = {"save_steps": {"save_strategy": "steps"}, "eval_steps": {"eval_strategy": "steps"}}.get(name, {})
    for kind, data in (("GRPO", TABLE), ("SFT", supervised_rows()), ("Reward", pair_rows())):
        with names(ArgumentError, re.escape(f"{name}={value!r} ")):
            make(kind, tmp_path, data=data, eval_dataset=data, **{**acts, name: value})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *(("PPO", "kl_horizon", 5), ("OnlineDPO", "epsilon_high", 0.3), ("SFT", "packing_strategy", "wrapped")),
        ("OnlineDPO", "vllm_importance_sampling_correction", True),
        *(("Reward", "logprob_chunk_size", 8), ("Reward", "per_device_eval_batch_size", 4)),
    ],
)
def test_an_argument_without_effect_is_named_by_each_trainer(tmp_path, kind, name, value):
    with names(ArgumentError, f"{name}={value!r} "):
        make(kind, tmp_path, strict_arguments=True, **{name: value})


def leave(*args, **columns):
    sys.exit(0)


def test_user_code_that_exits_ends_the_run_with_an_error_that_names_it(tmp_path):
    with names(RewardError, "'leave'.*SystemExit: 0 .*test_training_bad_input.py"):
        grpo(tmp_path, reward_funcs=leave).train()
    with names(EngineError, r"rollout_func .*sys.exit\(0\)"):
        grpo(tmp_path, rollout_func=leave).train()
    with names(DataError, r"formatting_func .*sys.exit\(0\)"):
        sft(tmp_path, formatting_func=leave)


@pytest.mark.parametrize(
    ("function", "answer"), [(leave, r"sys.exit\(0\)"), (lambda *found: None, "None")], ids=["exits", "returns none"]
)
def test_functions_of_an_evaluation_that_fail_are_named(tmp_path, function, answer):
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        working = {
            "compute_metrics": lambda found: {},
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        }
        trainer = sft(tmp_path, max_length=8, **{**working, name: function})
        with names(LowpeakError, f"{name} .*{answer}"):
            trainer.evaluate(trainer.train_dataset)


def test_an_upload_while_the_hub_is_switched_off_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with names(ArgumentError, r"push_to_hub=True .*HF_HUB_OFFLINE"):
        grpo(tmp_path, push_to_hub=True)


def test_a_context_too_short_for_a_supervised_row_cuts_it(tmp_path):
    run = sft(tmp_path, data=Dataset.from_list([{"text": "1" * 300}]))
    assert run.cursor.take(1)[0].num_tokens == 128


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_reference_that_should_move_under_an_adapter_is_refused(tmp_path, kind):
    with names(ArgumentError, "sync_ref_model.*adapter"):
        make(kind, tmp_path, beta=0.1, sync_ref_model=True, peft_config=LoraConfig(r=2))


def test_an_output_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("a file")
    for trainer, folder in ((grpo, tmp_path / "run"), (sft, tmp_path / "run/below")):
        with names(ArgumentError, f"output_dir '{folder}'"):
            trainer(folder)


# things of the wrong kind, which would fail far away or do nothing


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_a_model_without_a_trainable_weight_is_told(tmp_path, kind):
    with pytest.raises(ModelError, match=r"trainable.*requires_grad_\(True\)"):
        make(kind, tmp_path, tiny_model().requires_grad_(False))


def test_an_adapter_loaded_for_inference_is_told(tmp_path):
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"is_trainable=True"):
        grpo(tmp_path, PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter"))
    grpo(tmp_path, PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter", is_trainable=True))


@pytest.mark.parametrize("model", [5, Path("some/folder")])
def test_a_model_of_another_kind_is_told(tmp_path, model):
    with pytest.raises(ModelError):
        grpo(tmp_path, model)


def test_a_tokenizer_by_name_is_told(tmp_path):
    with pytest.raises(ModelError, match=r"processing_class .*'some/name'"):
        grpo(tmp_path, tokenizer="some/name")


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ("rows.jsonl", r" str; .*datasets\.load_dataset"),
        ({"prompt": ["1="]}, r" dict; .*datasets\.Dataset\.from_dict\("),
        (pd.DataFrame({"prompt": ["1="]}), r" DataFrame; .*datasets\.Dataset\.from_pandas"),
    ],
)
def test_a_data_set_of_another_kind_is_told(tmp_path, data, names):
    with pytest.raises(DataError, match=names):
        grpo(tmp_path, data=data)


def test_a_token_that_the_model_does_not_embed_is_told_with_its_row(tmp_path):
    wide = char_tokenizer("0123456789=ab")
    with pytest.raises(DataError, match=r"row 1 .* 14, .* 13"):
        grpo(tmp_path, data=Dataset.from_list([{"prompt": "1="}, {"prompt": "b="}]), tokenizer=wide)
    with pytest.raises(DataError, match=r"row 1 .* 13, .* 13 "):
        sft(tmp_path, data=Dataset.from_list([{"text": "1"}, {"text": "a"}]), tokenizer=wide)
    grpo(tmp_path, tokenizer=wide)  # a tokenizer may know more than the model, as Gemma's does


@pytest.mark.parametrize("args", [RLOOConfig, TrainingArguments])
def test_arguments_of_another_trainer_are_told(tmp_path, args):
    with pytest.raises(ArgumentError, match=rf"{args.__name__}; .* lowpeak.GRPOConfig"):
        GRPOTrainer(tiny_model(), ones, args(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ArgumentError, match=r"\.SFTConfig"):
        SFTTrainer(tiny_model(), {"output_dir": "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_generations", "4"), ("num_generations", 4.0), ("micro_batch_tokens", 512.5), ("learning_rate", "1e-3")),
        *(("max_completion_length", None), ("log_completions", "no"), ("learning_rate", float("nan"))),
        *(("gradient_accumulation_steps", 0), ("seed", -1), ("reward_weights", "12")),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_told(tmp_path, name, value):
    with pytest.raises(ArgumentError, match=re.escape(f"{name}={value!r} ")):
        grpo(tmp_path, **{name: value})


def test_arguments_may_be_copied_with_a_change(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", max_completion_length=5)
    changed = dataclasses.replace(args, learning_rate=1e-4)
    run = GRPOTrainer(tiny_model(), ones, changed, TABLE, processing_class=TOKENIZER)
    assert run.args.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"beta": 0.1}, "checkpoint-2.*reference"), ({"num_generations": 8}, "num_generations .*4 .*8")],
)
def test_a_rollout_in_use_that_other_arguments_made_is_told(tmp_path, changes, names):
    reused = {"steps_per_generation": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trained("GRPO", tmp_path, **reused)
    with pytest.raises(CheckpointError, match=names):
        trained("GRPO", tmp_path, **reused, **changes, resume=tmp_path / "checkpoint-2")
