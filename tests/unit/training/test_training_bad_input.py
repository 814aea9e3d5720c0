"""Bad input to a trainer is one clear sentence that says what is wrong, where, and what to do, before anything trains."""

from __future__ import annotations

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

from lowpeak import GRPOTrainer, RLOOConfig, SFTTrainer
from lowpeak.errors import ArgumentError, CheckpointError, DataError, EngineError, LowpeakError, ModelError, RewardError
from small_runs import make, ones, trained
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
    ("trainer", "data", "pattern"),
    [
        (grpo, [], "empty"),
        (grpo, [*ROWS, {"prompt": ""}], "row 8"),
        (grpo, [{"prompt": "1=", "image": "x"}], "images"),
        (grpo, [{"prompt": "1=", "completions": "x"}], "'completions'"),
        (grpo, ROWS[:1], r" 1 .* 2 \(8 .*, num_generations=4\)"),
        (grpo, [{"prompt": "1" * 124}, *ROWS], "row 0: .* 124 "),
        (grpo, None, "train_dataset.*'prompt'"),
        (grpo, "rows.jsonl", r" str; .*datasets\.load_dataset"),
        (grpo, {"prompt": ["1="]}, r" dict; .*datasets\.Dataset\.from_dict\("),
        (grpo, pd.DataFrame({"prompt": ["1="]}), r" DataFrame; .*datasets\.Dataset\.from_pandas"),
        (sft, [], "empty"),
        (sft, [{"question": "1="}], "row 0 .*'question'.*'prompt'.*'completion'"),
        (sft, [{"input_ids": [3, 4.5, 1]}], r"row 0 .*'input_ids' \[3.0, 4.5, 1.0\]"),
        (sft, [{"input_ids": ["3", "4"]}], r"row 0 .*'input_ids' \['3', '4'\]"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_named_with_its_row_or_its_kind(tmp_path, trainer, data, pattern):
    with names(DataError, pattern):
        trainer(tmp_path, data=Dataset.from_list(data) if isinstance(data, list) else data)


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
        grpo(tmp_path, data=IterableDataset.from_generator(lambda: iter([]))).next_step()


# the tokenizer and the model


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_sequence(tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.pad_token = None
    run = grpo(tmp_path, tokenizer=tokenizer)
    run.next_step()
    assert run.run.budget.pad_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    for trainer in (grpo, sft):
        with names(ModelError, "tokenizer.eos_token.*pad_token"):
            trainer(tmp_path, tokenizer=tokenizer)


def test_a_tokenizer_or_a_model_that_is_nowhere_or_of_another_kind_is_refused(tmp_path):
    with names(ArgumentError, "ref_model .* 9 .* 13"):
        grpo(tmp_path, ref_model=tiny_model(9), beta=0.1)
    with names(DataError, "tokenizer.chat_template"):
        grpo(tmp_path, data=[{"prompt": [USER]}] * 4)
    with names(ArgumentError, "processing_class=tokenizer"):
        grpo(tmp_path, tokenizer=False)
    for model, pattern in (
        *(("no-such-owner/no-such-model", "'no-such-owner/no-such-model'"), ("/no/such/folder", "'/no/such/folder'")),
        *((5, " int"), (Path("some/folder"), " PosixPath")),
    ):
        with names(ModelError, pattern):
            grpo(tmp_path, model)
    get_peft_model(tiny_model(), LoraConfig(r=2)).save_pretrained(tmp_path / "adapter")
    with names(ModelError, "'.*/adapter' holds an adapter and no model: merge"):
        grpo(tmp_path, str(tmp_path / "adapter"))
    with names(ModelError, "processing_class .*'some/name'"):
        grpo(tmp_path, tokenizer="some/name")


# rewards


def failing(completions, **columns):
    raise KeyError("answer")


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
    with names(RewardError, "Reward 'failing'.*KeyError: 'answer'"):
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
    (message,) = [record.getMessage() for record in caplog.records if "finishing" in record.getMessage()]
    assert re.search(words.format(pid=os.getpid()), message)
    assert ("again" in message) == (number == signal.SIGINT)


# arguments


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"success_reward": "accuracy"}, "success_reward='accuracy'.*ones"),
        ({"output_dir": ""}, "output_dir=''"),
        ({"max_completion_length": 128}, "max_completion_length=128 .* 128 "),
        ({"num_generations": 3}, "num_generations=3"),
        ({"generation_kwargs": {"stop_token_ids": [3, 99999]}}, "99999"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1},
            "metric_for_best_model='loss'.*'reward'.*'accuracy'",
        ),
        ({"peft_config": {"r": 4}}, r"peft_config.*{'r': 4}.*LoraConfig\("),
        ({"beta": 0.1, "sync_ref_model": True, "peft_config": LoraConfig(r=2)}, "sync_ref_model.*adapter"),
        ({"reward_funcs": None}, "reward_funcs"),
        ({"reward_funcs": []}, "reward_funcs"),
    ],
)
def test_an_argument_that_does_not_go_with_the_model_the_rewards_or_another_argument_is_named(
    tmp_path, changes, pattern
):
    with names(ArgumentError, pattern):
        make("GRPO", tmp_path, data=TABLE, **{"eval_dataset": TABLE, "max_steps": 1, **changes})


@pytest.mark.parametrize("kind", ["GRPO", "SFT", "Reward"])
def test_an_argument_of_transformers_out_of_its_range_is_named_by_every_trainer(tmp_path, kind):
    with names(ArgumentError, "max_grad_norm=-1 "):
        make(kind, tmp_path, max_grad_norm=-1)


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
    with names(EngineError, r"rollout_func .*sys.exit\(0\)"):
        grpo(tmp_path, rollout_func=leave).next_step()
    with names(DataError, r"formatting_func .*sys.exit\(0\)"):
        sft(tmp_path, formatting_func=leave)


@pytest.mark.parametrize(
    ("function", "answer"), [(leave, r"sys.exit\(0\)"), (lambda *found: None, "None")], ids=["exits", "returns none"]
)
@pytest.mark.parametrize("name", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_functions_of_an_evaluation_that_fail_are_named(tmp_path, name, function, answer):
    working = {"compute_metrics": len, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
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


def test_a_token_that_the_model_does_not_embed_is_told_with_its_row(tmp_path):
    wide = char_tokenizer("0123456789=ab")
    with pytest.raises(DataError, match=r"row 1 .* 14, .* 13"):
        grpo(tmp_path, data=Dataset.from_list([{"prompt": "1="}, {"prompt": "b="}]), tokenizer=wide)
    with pytest.raises(DataError, match=r"row 1 .* 13, .* 13 "):
        sft(tmp_path, data=Dataset.from_list([{"text": "1"}, {"text": "a"}]), tokenizer=wide)
    grpo(tmp_path, tokenizer=wide)  # a tokenizer may know more than the model, as Gemma's does


def test_arguments_of_another_trainer_are_told(tmp_path):
    with pytest.raises(ArgumentError, match=r"RLOOConfig; .* lowpeak\.GRPOConfig"):
        GRPOTrainer(tiny_model(), ones, RLOOConfig(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ArgumentError, match=r"\.SFTConfig"):
        SFTTrainer(tiny_model(), {"output_dir": "x"})


def test_a_rollout_in_use_that_other_arguments_made_is_told(tmp_path):
    reused = {"steps_per_generation": 4, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trained("GRPO", tmp_path, **reused)
    others = {"checkpoint-2.*reference": {"beta": 0.1}, "num_generations .*4 .*8": {"num_generations": 8}}
    for pattern, changes in others.items():
        with names(CheckpointError, pattern):
            trained("GRPO", tmp_path, **{**reused, "max_steps": 4, **changes}, resume=tmp_path / "checkpoint-2")
