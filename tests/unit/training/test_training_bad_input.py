"""Bad input to a trainer is one clear sentence that says what is wrong, where, and what to do, before anything trains."""

from __future__ import annotations

import math
import sys

import pytest
from datasets import Dataset, IterableDataset
from peft import LoraConfig

from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from lowpeak.errors import ArgumentError, DataError, EngineError, LowpeakError, ModelError, RewardError
from lowpeak.rewards.load import load_reward
from tiny import char_tokenizer, tiny_model

SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 5,
    "max_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
}
INF, NAN = math.inf, math.nan
ROWS = [{"prompt": f"{i}="} for i in range(8)]
TABLE = Dataset.from_list(ROWS)


def ones(completions, **columns):
    return [float(str(completion).count("1")) for completion in completions]


def grpo(
    tmp_path,
    data=TABLE,
    model=None,
    tokenizer=None,
    rewards=ones,
    peft_config=None,
    eval_dataset=None,
    rollout_func=None,
    **changes,
):
    return GRPOTrainer(
        model=model or tiny_model(),
        reward_funcs=rewards,
        args=GRPOConfig(**{"output_dir": str(tmp_path / "run"), **SMALL, **changes}),
        train_dataset=data,
        eval_dataset=eval_dataset,
        processing_class=tokenizer or char_tokenizer(),
        peft_config=peft_config,
        rollout_func=rollout_func,
    )


def told(error: type[LowpeakError], words: str):
    """The error with these words of its sentence."""
    return pytest.raises(error, match=words)


# the data set


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "The data set is empty; check its file, its split or the filter that made it"),
        ([{"question": "1="}], "row 0 has no 'prompt' column, only 'question'; rename the one that holds the prompt"),
        ([*ROWS, {"prompt": ""}], "row 8 has an empty prompt; remove the row or fill it in"),
        ([*ROWS, {"prompt": None}], "row 8 has an empty prompt; remove the row or fill it in"),
        ([{"prompt": []}], "row 0: the prompt is an empty list of messages; remove the row or give it a message"),
        ([{"prompt": "1=", "image": "x"}], "hold images; lowpeak trains on text only, remove them"),
        ([{"prompt": "1=", "completions": "x"}], "'completions' are keywords of every reward; rename them"),
        (
            ROWS[:1],
            r"has 1 usable prompts and a rollout asks 2 \(8 completions, num_generations=4\): add rows, or lower",
        ),
        (None, "train_dataset is None: pass a data set with a 'prompt' column"),
        ([{"prompt": "1" * 124}, *ROWS], "row 0: the prompt has 124 tokens; the model's context less "),
    ],
)
def test_a_data_set_that_cannot_be_used_is_told(tmp_path, data, words):
    with told(DataError, words):
        grpo(tmp_path, data if data is None else Dataset.from_list(data))


def test_prompts_of_both_formats_are_told(tmp_path):
    mixed = [{"prompt": [{"role": "user", "content": "1="}]}, {"prompt": "1="}]  # a table could not hold both
    with told(DataError, "row 1 has a string as its prompt, earlier rows have a list of messages; use one format"):
        GRPOTrainer(
            model=tiny_model(19),
            reward_funcs=ones,
            args=GRPOConfig(output_dir=str(tmp_path), **SMALL),
            train_dataset=mixed,
            processing_class=char_tokenizer(chat=True),
        )


@pytest.mark.parametrize("make", [Dataset.from_list, list])
def test_a_prompt_that_is_too_long_may_be_dropped_and_is_counted(tmp_path, caplog, make):
    run = grpo(tmp_path, make([{"prompt": "1" * 124}, *ROWS]), overlong_prompts="drop")
    assert run.maker.cursor.prompts_per_epoch == 8
    assert "1 of 9 rows are left out: the prompt has more than 123 tokens" in caplog.text


def test_a_stream_without_an_end_is_told(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    with told(ArgumentError, "the data set has no length, so the run needs an end: set max_steps"):
        grpo(tmp_path, stream, max_steps=-1)
    with told(ArgumentError, "the data set has no length, so the run needs an end: set max_steps"):
        args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
        SFTTrainer(tiny_model(), args, train_dataset=stream, processing_class=char_tokenizer())


def test_a_stream_that_ends_before_its_first_row_is_told(tmp_path):
    with told(DataError, "The data set is empty: its stream ended before the first row"):
        grpo(tmp_path, IterableDataset.from_generator(lambda: iter([]))).train()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "The data set is empty"),
        (
            [{"question": "1="}],
            "row 0 has the columns 'question'; supervised training reads 'prompt' with 'completion'",
        ),
        ([{"prompt": "1="}], "row 0 has the columns 'prompt'; supervised training reads"),
    ],
)
def test_supervised_rows_that_cannot_be_used_are_told(tmp_path, rows, words):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    with told(DataError, words):
        SFTTrainer(tiny_model(), args, train_dataset=Dataset.from_list(rows), processing_class=char_tokenizer())


# the tokenizer and the model


def test_a_tokenizer_without_a_pad_token_pads_with_its_end_of_sequence(tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.pad_token = None
    run = grpo(tmp_path, tokenizer=tokenizer)
    run.train()
    assert run.maker.budget.pad_id == tokenizer.eos_token_id


@pytest.mark.parametrize("make", ["grpo", "sft"])
def test_a_tokenizer_with_neither_is_told(tmp_path, make):
    tokenizer = char_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    with told(ModelError, r"neither a pad nor an eos token; set tokenizer.eos_token \(or pad_token\)"):
        if make == "grpo":
            grpo(tmp_path, tokenizer=tokenizer)
        args = SFTConfig(str(tmp_path), use_cpu=True)
        SFTTrainer(tiny_model(), args, train_dataset=[{"text": "1"}], processing_class=tokenizer)


def test_messages_without_a_chat_template_are_told(tmp_path):
    data = [{"prompt": [{"role": "user", "content": "1="}]}] * 4
    with told(DataError, "is a list of messages, but the tokenizer has no chat template; set tokenizer.chat_template"):
        grpo(tmp_path, data)


def test_an_instance_that_does_not_say_where_its_tokenizer_is_is_told(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), **SMALL)
    with told(ArgumentError, "does not say where its tokenizer is: pass processing_class=tokenizer"):
        GRPOTrainer(tiny_model(), ones, args, TABLE)


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "/no/such/folder"])
def test_a_model_that_is_nowhere_is_told_while_offline(tmp_path, name):
    words = (
        f"cannot load '{name}': it is neither a folder with a model on this machine nor a model that could be fetched"
    )
    with told(ModelError, words):
        grpo(tmp_path, model=name)


# rewards


def test_a_reward_file_that_does_not_import_is_told_with_its_line(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("import re\nimport no_such_module\n\ndef good(completions, **columns):\n    return [1.0]\n")
    with told(ArgumentError, r"does not import: line 2: ModuleNotFoundError: No module named 'no_such_module'"):
        load_reward(f"{file}:good")


def test_no_reward_and_a_reward_that_is_none_are_told(tmp_path):
    for rewards in (None, []):
        with told(ArgumentError, "no reward: pass at least one function or reward model as reward_funcs"):
            grpo(tmp_path, rewards=rewards)
    with told(ArgumentError, "A reward must be a function, a reward model, or a model's name or path, not 3"):
        grpo(tmp_path, rewards=3)


def infinite(completions, **columns):
    return [float("inf")] * len(completions)


def failing(completions, **columns):
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (infinite, "Reward 'infinite'.*inf"),
        (failing, "Reward 'failing'.*KeyError: 'answer'"),
        (lambda completions, **columns: [1.0], "Reward '<lambda>'.*1.*8"),
        (lambda completions, answer: [1.0], "Reward '<lambda>' asks for answer, which the data set has no column for"),
    ],
)
def test_a_reward_that_fails_is_named(tmp_path, reward, words):
    with told(RewardError, words):
        grpo(tmp_path, rewards=reward).train()


def test_an_unknown_success_reward_is_told(tmp_path):
    with told(ArgumentError, "success_reward='accuracy' is none of the rewards: ones"):
        grpo(tmp_path, success_reward="accuracy")


# arguments


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": -0.1, "num_iterations": 2}, r"epsilon=-0.1 must be in \[0, 1\)"),
        ({"epsilon": 1.0, "num_iterations": 2}, r"epsilon=1.0 must be in \[0, 1\)"),
        ({"epsilon_high": -1.0, "num_iterations": 2}, "epsilon_high=-1.0 must be 0 or more"),
        ({"temperature": 0.0}, r"temperature=0.0 must be at least 1e-6 in training"),
        ({"output_dir": ""}, "output_dir='' must name a folder"),
        ({"temperature": 1e-300}, "temperature=1e-300 must be at least 1e-6"),
        ({"temperature": -1.0}, r"temperature=-1.0 must be at least 1e-6 in training"),
        ({"max_completion_length": 0}, "max_completion_length=0 must be at least 1 token"),
        (
            {"max_completion_length": 128},
            "max_completion_length=128 leaves no room for a prompt in the model's context of 128 tokens; lower it",
        ),
        *(({name: INF}, f"{name}=inf must be a finite number") for name in ("temperature", "epsilon_high", "beta")),
        *(({name: NAN}, f"{name}=nan must be a finite number") for name in ("success_threshold", "delta")),
        ({"reward_weights": [INF]}, r"reward_weights=\[inf\] must be finite numbers"),
        (
            {"generation_kwargs": {"temperature": INF}},
            r"generation_kwargs\['temperature'\]=inf must be a finite number",
        ),
        ({"num_generations": 3}, "completions, which num_generations=3 does not divide"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1},
            "metric_for_best_model='loss'.*set metric_for_best_model='reward' or 'accuracy'",
        ),
    ],
)
def test_an_argument_out_of_its_range_is_told(tmp_path, changes, words):
    with told(ArgumentError, words):
        grpo(tmp_path, eval_dataset=TABLE, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"save_steps": 0, "save_strategy": "steps"}, "save_steps=0 must be above 0; save_strategy='no' turns it off"),
        ({"save_steps": INF}, "save_steps=inf must be a finite number"),
        ({"logging_steps": -1}, "logging_steps=-1 must be above 0; logging_strategy='no' turns it off"),
        ({"logging_steps": NAN}, "logging_steps=nan must be a finite number"),
        (
            {"eval_steps": -2, "eval_strategy": "steps"},
            "eval_steps=-2 must be above 0; eval_strategy='no' turns it off",
        ),
        ({"eval_delay": -1}, "eval_delay=-1 must be 0 or more"),
        ({"save_total_limit": -1}, r"save_total_limit=-1 must be 0 \(all are kept\) or more, or None"),
        ({"max_grad_norm": -1}, r"max_grad_norm=-1 must be 0 \(gradients are not clipped\) or more"),
        ({"max_grad_norm": INF}, "max_grad_norm=inf must be a finite number"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be 0 or more"),
        ({"adam_beta1": 1.0}, r"adam_beta1=1.0 must be in \[0, 1\)"),
        ({"adam_beta2": -0.5}, r"adam_beta2=-0.5 must be in \[0, 1\)"),
        ({"adam_epsilon": NAN}, "adam_epsilon=nan must be 0 or more"),
        ({"learning_rate": -1e-6}, "learning_rate=-1e-06 must be a finite number of 0 or more"),
        ({"warmup_steps": INF}, "warmup_steps=inf must be a finite number"),
        ({"num_train_epochs": 0}, "num_train_epochs=0 must be above 0"),
        ({"num_train_epochs": INF}, "num_train_epochs=inf must be a finite number"),
        ({"max_steps": -5}, r"max_steps=-5 must be at least 1 \(or -1, to go by num_train_epochs\)"),
        ({"data_seed": -1}, r"data_seed=-1 must be from 0 to 2\*\*32 - 1, or None"),
        ({"ddp_timeout": 0}, "ddp_timeout=0 must be a number of seconds above 0"),
    ],
)
def test_an_argument_of_transformers_out_of_its_range_is_told_by_every_trainer(tmp_path, changes, words):
    with told(ArgumentError, words):
        grpo(tmp_path, eval_dataset=TABLE, **changes)
    small = {"max_steps": 1, "save_strategy": "no", "use_cpu": True, "output_dir": str(tmp_path)}
    with told(ArgumentError, words):
        SFTTrainer(
            tiny_model(),
            SFTConfig(**{**small, **changes}),
            train_dataset=TABLE,
            eval_dataset=TABLE,
            processing_class=char_tokenizer(),
        )


def leave(*args, **columns):
    sys.exit(0)


def test_user_code_that_exits_ends_the_run_with_an_error_that_names_it(tmp_path):
    with told(RewardError, r"Reward 'leave' raised SystemExit: 0 \(.*test_training_bad_input.py, line"):
        grpo(tmp_path, rewards=leave).train()
    with told(EngineError, r"rollout_func called sys.exit\(0\), which would end the run without a save"):
        grpo(tmp_path, rollout_func=leave).train()
    trainer = SFTTrainer(
        tiny_model(),
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_length=8),
        train_dataset=Dataset.from_list([{"prompt": "1=", "completion": "1"}]),
        processing_class=char_tokenizer(),
        compute_metrics=leave,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    with told(LowpeakError, r"compute_metrics called sys.exit\(0\), which would end the run without a save"):
        trainer.evaluate(trainer.train_dataset)
    trainer.preprocess_logits_for_metrics = leave
    with told(LowpeakError, r"preprocess_logits_for_metrics called sys.exit\(0\), which would end the run"):
        trainer.evaluate(trainer.train_dataset)
    with told(DataError, r"formatting_func called sys.exit\(0\), which would end the run without a save"):
        SFTTrainer(
            tiny_model(),
            SFTConfig(output_dir=str(tmp_path), use_cpu=True),
            train_dataset=TABLE,
            processing_class=char_tokenizer(),
            formatting_func=leave,
        )


def test_functions_of_an_evaluation_that_return_nothing_are_told(tmp_path):
    trainer = SFTTrainer(
        tiny_model(),
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, max_length=8),
        train_dataset=Dataset.from_list([{"prompt": "1=", "completion": "1"}]),
        processing_class=char_tokenizer(),
        compute_metrics=lambda found: None,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    with told(ArgumentError, "compute_metrics returned None, a NoneType; it must return a dict of names and numbers"):
        trainer.evaluate(trainer.train_dataset)
    trainer.preprocess_logits_for_metrics = lambda logits, labels: None
    with told(ArgumentError, "preprocess_logits_for_metrics returned None, a NoneType; return a tensor"):
        trainer.evaluate(trainer.train_dataset)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3, 4, -5, 1], "row 0 has the token -5; tokens are whole numbers of 0 or more"),
        ([3, 4.5, 1], r"row 0 has 'input_ids' \[3.0, 4.5, 1.0\]; it must be a list of whole numbers"),
        (["3", "4"], r"row 0 has 'input_ids' \['3', '4'\]; it must be a list of whole numbers"),
    ],
)
def test_token_ids_that_are_none_are_told(tmp_path, ids, words):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    data = Dataset.from_list([{"input_ids": ids}])
    with told(DataError, words):
        SFTTrainer(tiny_model(), args, train_dataset=data, processing_class=char_tokenizer())


def test_a_peft_config_that_is_none_is_told(tmp_path):
    with told(ArgumentError, r"peft_config is {'r': 4}, a dict; pass a configuration of peft's, as LoraConfig\("):
        grpo(tmp_path, peft_config={"r": 4})


def test_an_upload_while_the_hub_is_switched_off_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with told(ArgumentError, r"push_to_hub=True cannot act: the hub is switched off \(HF_HUB_OFFLINE\)"):
        grpo(tmp_path, push_to_hub=True)


def test_a_context_too_short_for_a_supervised_row_cuts_it(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
    data = Dataset.from_list([{"text": "1" * 300}])
    run = SFTTrainer(tiny_model(), args, train_dataset=data, processing_class=char_tokenizer())
    assert run.cursor.take(1)[0].num_tokens == 128


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_a_reference_that_should_move_under_an_adapter_is_told(tmp_path, config):
    trainer = GRPOTrainer if config is GRPOConfig else RLOOTrainer
    args = config(output_dir=str(tmp_path), **SMALL, beta=0.1, sync_ref_model=True)
    with told(ArgumentError, "sync_ref_model moves a reference that has weights of its own, and under an adapter"):
        trainer(tiny_model(), ones, args, TABLE, None, char_tokenizer(), peft_config=LoraConfig(r=2))


# the output folder


def test_an_output_folder_below_a_file_is_told(tmp_path):
    (tmp_path / "run").write_text("a file")
    with told(
        ArgumentError, "output_dir '.*' cannot be written: File exists; name a folder that can be made and written"
    ):
        grpo(tmp_path)
    (tmp_path / "file").write_text("a file")
    args = SFTConfig(output_dir=str(tmp_path / "file/run"), use_cpu=True)
    with told(ArgumentError, "cannot be written: Not a directory; name a folder"):
        SFTTrainer(
            tiny_model(), args, train_dataset=Dataset.from_list([{"text": "1"}]), processing_class=char_tokenizer()
        )
