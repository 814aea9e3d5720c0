"""The command with real trainers on a tiny model: from files to a trained model in a folder."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lowpeak.cli.commands import main
from tiny_models import char_tokenizer, tiny_model

COMMON = ["--use_cpu", "--max_steps", "2", "--per_device_train_batch_size", "8", "--report_to", "none"]


@pytest.fixture
def folder(tmp_path):
    """A model, rows, a reward, and a place for what is trained."""
    tiny_model().save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{i % 10}+", "completion": f"{i % 10}"} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def short(completions, **columns):\n    return [-len(x) for x in completions]\n"
    )
    return tmp_path


def words(folder, *more):
    files = f"--model {folder}/model --dataset {folder}/rows.jsonl --output_dir {folder}/out"
    return [*files.split(), *COMMON, *more]


def rewarded(folder, *more):
    return words(folder, "--reward", f"{folder}/judge.py:short", "--max_completion_length", "4", *more)


def planned(command, argv, folder, capsys):
    """What a dry run prints; it writes no model."""
    assert main([command, *argv, "--dry-run"]) == 0
    assert not (folder / "out/model.safetensors").exists()
    return yaml.safe_load(capsys.readouterr().out)


def test_a_run_leaves_its_model_and_its_results_with_what_its_journal_measured(folder, capsys):
    more = ["--num_generations", "4", "--hub_token", "S3CRET", "--eval_dataset", f"{folder}/rows.jsonl"]
    more += ["--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2"]
    more += ["--load_best_model_at_end", "true", "--metric_for_best_model", "reward"]
    assert main(["grpo", *rewarded(folder, *more)]) == 0
    AutoModelForCausalLM.from_pretrained(folder / "out")
    text = (folder / "out/results.json").read_text()
    found = json.loads(text)
    steps = [json.loads(line) for line in (folder / "out/journal/steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert "S3CRET" not in text
    assert (found["run"], found["command"], found["steps"], found["devices"]) == ("out", "grpo", 2, 1)
    assert found["arguments"]["num_generations"] == 4
    assert found["environment"]["torch"] == metadata.version("torch")
    assert found["seconds"]["train"] == steps[1]["time/train"]
    assert (found["step_time"], found["tokens_per_second"]) == (steps[1]["step_time"], steps[1]["tokens_per_second"])
    assert found["peak_memory"]["train"] == max(step["peak_memory/train"] for step in steps)
    assert found["reward"] == pytest.approx(sum(step["reward"] for step in steps) / 2)
    assert found["evaluation"]["step"] == 2
    (start,) = (json.loads(line) for line in (folder / "out/journal/run.jsonl").read_text().splitlines())
    assert (start["data"], start["rewards"]) == ("rows.jsonl", ["short"])
    assert found["best_model_checkpoint"] == f"{folder}/out/checkpoint-2"
    assert found["best_metric"] == found["evaluation"]["eval_reward"]
    assert "best checkpoint-2 (" in capsys.readouterr().out.splitlines()[-1]
    assert main(["grpo", *rewarded(folder, *more, "--resume_from_checkpoint", "true")]) == 0  # no step is left
    assert (folder / "out/results.json").read_text() == text


def contents(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lowpeak.lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_the_same_command_starts_a_run_resumes_it_and_leaves_a_finished_one_as_it_is(folder, capfd):
    saves = ["--num_generations", "4", "--save_strategy", "steps", "--save_steps", "1"]
    command = ["grpo", *rewarded(folder, *saves, "--resume_from_checkpoint", "auto")]
    assert main(command) == 0
    whole = (folder / "out/model.safetensors").read_bytes()
    # As if the run had been killed between its last checkpoint and its results.
    for name in ("results.json", "model.safetensors"):
        (folder / "out" / name).unlink()
    assert main(command) == 0
    assert (folder / "out/model.safetensors").read_bytes() == whole
    assert json.loads((folder / "out/results.json").read_text())["steps"] == 2
    before = contents(folder / "out")
    capfd.readouterr()
    assert main(command) == 0
    assert "is finished: it has all of its 2 steps" in capfd.readouterr().err
    assert contents(folder / "out") == before
    assert main([*command, "--beta", "0.5"]) == 2
    assert "'auto'" in (output := capfd.readouterr().err)
    assert "beta was 0.0 and is 0.5" in output


def test_preferences_make_a_causal_model_a_reward_model(folder, capsys):
    rows = [{"prompt": f"{i % 10}+", "chosen": f"{i % 10}", "rejected": "77"} for i in range(16)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sizes = ["--micro_batch_tokens", "64", "--max_length", "16"]
    plan = planned("reward", words(folder, *sizes), folder, capsys)["micro_batches"]
    assert (plan["rows_per_step"], plan["micro_batches_at_most"]) == (8, 4)
    assert main(["reward", *words(folder, "--eval_dataset", f"{folder}/rows.jsonl", "--eval_strategy", "epoch")]) == 0
    model, report = AutoModelForSequenceClassification.from_pretrained(folder / "out", output_loading_info=True)
    assert model.config.num_labels == 1
    assert not report["missing_keys"]


def test_a_dry_run_shows_no_token(folder, capsys):
    more = ["--hub_token", "S3CRET", "--eos_token", "9"]
    more += ["--model_init_kwargs", '{"token": "S3CRET", "revision": "main"}']
    resolved = planned("sft", words(folder, *more), folder, capsys)
    shown = resolved["arguments"]
    assert (shown["hub_token"], shown["eos_token"]) == ("<hidden>", "9")
    assert shown["model_init_kwargs"] == {"token": "<hidden>", "revision": "main"}
    assert "S3CRET" not in str(resolved)


@pytest.mark.parametrize("command", ["grpo", "rloo", "ppo", "online-dpo"])
def test_a_dry_run_resolves_everything_and_writes_no_model(command, folder, capsys):
    shown = planned(command, rewarded(folder, "--num_generations", "4"), folder, capsys)
    of_critic = 32 if command == "ppo" else 0  # a head
    assert shown["model"]["parameters"] == of_critic + sum(p.numel() for p in tiny_model().parameters())
    assert shown["arguments"]["max_steps"] == shown["data"]["steps"] == 2
    assert (shown["first_prompt"], shown["generation"]) == ("0", "decode loop")  # the tokenizer has no plus
    assert shown["micro_batches"]["rows_per_step"] == (4 if command == "online-dpo" else 8)  # two of each group of four


def test_a_dry_run_of_pairs_plans_pairs(folder, capsys):
    """A pair is not cut, though one of its rows would fit."""
    more = "--num_generations 2 --micro_batch_tokens 8 --padding_free false --share_prompt false"
    plan = planned("online-dpo", rewarded(folder, *more.split()), folder, capsys)["micro_batches"]
    assert (plan["rows_per_step"], plan["micro_batches_at_most"], plan["rows_per_micro_batch_at_least"]) == (8, 4, 2)


def test_a_dry_run_of_supervised_training_resolves_everything_too(folder, capsys):
    more = ["--max_length", "16", "--micro_batch_tokens", "32", "--max_steps", "-1", "--num_train_epochs", "1.5"]
    shown = planned("sft", words(folder, *more), folder, capsys)
    plan = shown["micro_batches"]
    assert (shown["first_row"], shown["data"]["steps"]) == ("00<eos>", 3)
    assert (shown["data"]["usable_rows"], plan["longest_row"]) == (16, 16)
    assert plan["micro_batches_at_most"] == 8 // (32 // 16)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--model", "nowhere/to-be-found"], "nowhere/to-be-found"),
        (["--num_generations", "3"], "3"),
        (["--reward", "nowhere.py:f"], "nowhere.py"),
        (["--temperature", "-1"], "temperature"),
        (["--use_peft", "--lora_target_modules", "nope"], "peft_config"),
        (["--eval_strategy", "epoch"], "--eval_dataset"),
        (["--prompt_column", "question"], "question"),
    ],
)
def test_what_the_user_got_wrong_is_one_sentence(more, sentence, folder, capsys):
    assert main(["grpo", *rewarded(folder, *more)]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowpeak: error: ")]
    assert len(error) == 1
    assert sentence in error[0]


def test_ctrl_c_says_where_everything_is_saved(folder, capsys):
    """The trainer's own sentence, not one that promises a checkpoint whether there is one or not."""
    (folder / "judge.py").write_text(
        "import os, signal\n\n"
        "def short(completions, **columns):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return [-len(x) for x in completions]\n"
    )
    assert main(["grpo", *rewarded(folder, "--num_generations", "4")]) == 130
    assert f"{folder}/out/checkpoint-1. " in capsys.readouterr().err


def test_help_says_what_a_run_resumes_from(capsys):
    with pytest.raises(SystemExit):
        main(["grpo", "--help"])
    output = " ".join(capsys.readouterr().out.split()).partition("--resume_from_checkpoint")[2][:200]
    assert "auto (output_dir's last undamaged checkpoint" in output
