from __future__ import annotations

import json
import logging

import pytest
import torch
import yaml

from lowpeak.cli.output import to_yaml
from lowpeak.cli.train import parse_job, run_training, with_config
from lowpeak.errors import ArgumentError, DataError, MemoryExhaustedError, MissingPackageError


def argv(folder, *more, reward=True):
    start = ["--model", "m", "--dataset", f"{folder}/rows.jsonl", "--prompt_column", "question", "--use_cpu"]
    rewards = ["--reward", f"{folder}/judge.py:right"] if reward else []
    return [*start, "--output_dir", f"{folder}/out", *rewards, *more]


def trainer_of(kind, words, library):
    """The trainer that a command has made and trained."""
    assert run_training(kind, words, library) == 0
    return library.made[-1]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online-dpo"])
def test_the_trainer_gets_what_a_script_would_give_it(kind, library, folder):
    trainer = trainer_of(kind, argv(folder, "--learning_rate", "1e-5"), library)
    assert trainer.keywords["model"] == "m"
    assert trainer.keywords["args"].learning_rate == 1e-5
    assert trainer.keywords["train_dataset"][0] == {"prompt": "0+1?", "answer": "1"}
    assert trainer.keywords["eval_dataset"] is trainer.keywords["peft_config"] is None
    (reward,) = trainer.keywords["reward_funcs"]
    assert reward(completions=["a", "b"]) == [1.0, 1.0]
    assert trainer.calls == ["train", "save_model"]


def test_reward_models_take_two_answers_and_no_reward(library, folder):
    rows = [{"question": f"{i}+1?", "better": str(i + 1), "worse": str(i)} for i in range(10)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = ["--chosen_column", "better", "--rejected_column", "worse"]
    more = ["--use_peft", "--center_rewards_coefficient", "0.01"]
    plain = trainer_of("reward", argv(folder, *columns, *more, reward=False), library)
    chat = trainer_of("reward", argv(folder, *columns, "--conversational", reward=False), library)
    assert plain.keywords["train_dataset"][0] == {"prompt": "0+1?", "chosen": "1", "rejected": "0"}
    assert plain.keywords["args"].center_rewards_coefficient == 0.01
    assert plain.keywords["peft_config"].task_type == "SEQ_CLS"
    assert plain.calls == ["train", "save_model"]
    assert chat.keywords["train_dataset"][0]["rejected"] == [{"role": "assistant", "content": "0"}]
    assert "reward_funcs" not in plain.keywords
    with pytest.raises(ArgumentError, match="'num_generations'"):
        run_training("reward", argv(folder, "--num_generations", "4", reward=False), library)


def test_online_dpo_takes_a_judge_of_a_file_or_a_module(library, folder):
    (folder / "pairs.py").write_text(
        "class Judge:\n    def judge(self, prompts, completions):\n        return [0 for _ in prompts]\n\n\nfirst = Judge()\n"
    )
    trainer = trainer_of("online-dpo", argv(folder, "--judge", f"{folder}/pairs.py:first", reward=False), library)
    assert trainer.keywords["judge"].judge(["p"], [["a", "b"]]) == [0]
    assert trainer.keywords["reward_funcs"] == []
    for judge, pattern in ((f"{folder}/pairs.py:second", r"'second'.*pairs\.py"), ("pairs", "'pairs'")):
        with pytest.raises(ArgumentError, match=pattern):
            run_training("online-dpo", argv(folder, "--judge", judge, reward=False), library)
    with pytest.raises(ArgumentError, match="'judge'"):
        run_training("grpo", argv(folder, "--judge", "pairs"), library)


def test_tools_and_environments_come_from_files(library, folder):
    (folder / "world.py").write_text(
        "def add(a, b):\n    return a + b\n\n\nclass World:\n    pass\n\n\nclass Moon:\n    pass\n"
    )
    world = f"{folder}/world.py"
    words = ["--tools", f"{world}:add", "--environment", f"{world}:World"]
    keywords = trainer_of("grpo", argv(folder, *words, reward=False), library).keywords
    assert keywords["tools"][0](1, 2) == 3
    assert keywords["environment_factory"].__name__ == "World"
    several = ["--environment", f"earth={world}:World", f"moon={world}:Moon"]
    factories = trainer_of("rloo", argv(folder, *several), library).keywords["environment_factory"]
    assert {name: factory.__name__ for name, factory in factories.items()} == {"earth": "World", "moon": "Moon"}
    (folder / "broken.py").write_text("def add(:\n")
    for words, text in (
        (["--environment", f"{world}:World", f"{world}:Moon"], "--environment.*NAME="),
        (["--environment", f"a={world}:World", f"a={world}:Moon"], "--environment.*a name of its own"),
        (["--environment", f"{world}:Wrold"], "Environment .*Wrold'.*'.*world.py'"),
        (["--tools", f"{folder}/wrold.py:add"], r"Tool file .*wrold\.py' does not exist.*'world\.py'"),
        (["--tools", f"{folder}/broken.py:add"], r"Tool file .*broken\.py' does not import: line 1: SyntaxError"),
        (["--tools", world], r"Tool .*world\.py' is a file: name an object in it"),
    ):
        with pytest.raises(ArgumentError, match=text):
            run_training("grpo", argv(folder, *words), library)


def test_an_environment_may_take_the_place_of_the_dataset(library, folder, caplog):
    (folder / "world.py").write_text("class World:\n    pass\n")
    words = ["--model", "m", "--use_cpu", "--output_dir", f"{folder}/out", "--environment", f"{folder}/world.py:World"]
    trainer = trainer_of("grpo", words, library)
    assert trainer.keywords["train_dataset"] is trainer.keywords["eval_dataset"] is None
    trainer_of("grpo", [*words, "--dataset_split", "dev", "--prompt_column", "question"], library)
    assert "--dataset_split dev" in caplog.text
    assert "--prompt_column question" in caplog.text
    with pytest.raises(ArgumentError, match=r"--test_split_size.*--dataset"):
        run_training("grpo", [*words, "--test_split_size", "2"], library)
    with pytest.raises(MissingPackageError, match=r"verifiers:sums.*\[verifiers\]"):
        run_training("grpo", [*words[:-1], "verifiers:sums"], library)
    with pytest.raises(ArgumentError, match=" --dataset"):
        run_training("grpo", [*words[:-2], "--reward", f"{folder}/judge.py:right"], library)


def test_a_list_of_betas_is_several_words_or_a_list_in_the_file(library, folder):
    (folder / "betas.yaml").write_text("beta: [0.1, 0.4]\n")
    given = (["--beta", "0.1", "0.2"], ["--beta", "0.3"], ["--config", f"{folder}/betas.yaml"])
    found = [trainer_of("online-dpo", argv(folder, *words), library).keywords["args"].beta for words in given]
    assert found == [[0.1, 0.2], [0.3], [0.1, 0.4]]


@pytest.mark.parametrize("name", ["max_length", "gpu_memory_utilization"])
def test_names_of_trls_online_dpo_say_what_to_use_instead(name, library, folder):
    with pytest.raises(ArgumentError, match=f"'{name}'"):
        run_training("online-dpo", argv(folder, f"--{name}", "5"), library)
    (folder / "old.yaml").write_text(f"{name}: 5\n")
    with pytest.raises(ArgumentError, match=f"'{name}'"):
        run_training("online-dpo", argv(folder, "--config", f"{folder}/old.yaml"), library)


def test_supervised_training_takes_completions_and_no_reward(library, folder):
    trainer = trainer_of("sft", argv(folder, "--completion_column", "answer", reward=False), library)
    assert trainer.keywords["train_dataset"][0] == {"prompt": "0+1?", "completion": "1"}
    assert "reward_funcs" not in trainer.keywords
    with pytest.raises(ArgumentError, match="'reward'"):
        run_training("sft", argv(folder), library)


def test_the_evaluation_set_has_its_own_file_and_slice_or_is_a_slice_of_the_training_one(library, folder):
    own = ["--eval_dataset", f"{folder}/rows.jsonl", "--eval_split", "test[:3]"]
    for words, prompts in ((own, ["0+1?", "1+1?", "2+1?"]), (["--eval_split", "train[8:]"], ["8+1?", "9+1?"])):
        trainer = trainer_of("grpo", argv(folder, *words, "--eval_strategy", "steps"), library)
        assert trainer.keywords["eval_dataset"]["prompt"] == prompts


def test_an_evaluation_set_that_nothing_reads_is_refused(library, folder):
    with pytest.raises(ArgumentError, match="--eval_dataset null"):
        run_training("grpo", argv(folder, "--eval_dataset", f"{folder}/rows.jsonl"), library)
    assert trainer_of("grpo", argv(folder, "--eval_dataset", "none"), library).keywords["eval_dataset"] is None


@pytest.mark.parametrize(
    ("idle", "switch"),
    [
        (["--num_generations_eval", "2"], ["--eval_split", "train[8:]", "--eval_on_start"]),
        (["--eval_split", "train[8:]"], ["--eval_on_start"]),
        (["--lora_r", "4"], ["--use_peft"]),
        (["--use_dora"], ["--use_peft"]),
    ],
)
def test_arguments_of_the_command_without_effect_are_named(library, folder, idle, switch):
    words = argv(folder, *idle, "--strict_arguments")
    with pytest.raises(ArgumentError, match=idle[0]):
        run_training("grpo", words, library)
    assert trainer_of("grpo", [*words, *switch], library).calls


def test_words_about_a_hubs_data_set_that_do_nothing_for_a_file_are_told(library, folder, caplog):
    trainer = trainer_of("grpo", argv(folder, "--dataset_split", "nope", "--dataset_config", "main"), library)
    assert len(trainer.keywords["train_dataset"]) == 10
    assert "'nope'" in caplog.text
    assert "dataset_config='main'" in caplog.text
    strict = argv(folder, "--dataset_config", "main", "--strict_arguments", "true")
    with pytest.raises(ArgumentError, match="dataset_config"):
        trainer_of("grpo", strict, library)
    caplog.clear()
    assert len(trainer_of("grpo", argv(folder, "--dataset_split", "train[:8]"), library).keywords["train_dataset"]) == 8
    assert "dataset_config" not in caplog.text


@pytest.mark.parametrize(("level", "shown"), [(None, True), ("info", True), ("warning", False)])
def test_a_command_shows_messages_of_level_info_unless_log_level_excludes_them(level, shown, library, folder, capsys):
    class Logging(library.GRPOTrainer):
        def train(self):
            logging.getLogger("lowpeak.training").info("the sizes of the run")

    library.GRPOTrainer = Logging
    assert run_training("grpo", argv(folder, *(["--log_level", level] if level else [])), library) == 0
    assert ("the sizes of the run" in capsys.readouterr().err) == shown
    assert not logging.getLogger("lowpeak").handlers


def test_models_that_do_not_fit_in_memory_are_no_bad_argument(library, folder):
    class Large(library.GRPOTrainer):
        def __init__(self, **keywords):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    library.GRPOTrainer = Large
    with pytest.raises(MemoryExhaustedError, match=r"2\.00 GiB.*--fit"):
        run_training("grpo", argv(folder), library)


def test_a_dry_run_prints_what_was_resolved_and_does_not_train(library, folder, capsys):
    assert run_training("grpo", argv(folder, "--dry-run", "--learning_rate", "1e-5"), library) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"] == {"parameters": 7, "device": "<class 'object'>"}
    assert shown["sizes"] == [1, 2]
    assert shown["arguments"]["prompt_column"] == "question"
    assert shown["arguments"]["learning_rate"] == 1e-5
    assert "num_generations" not in shown["arguments"]
    assert library.made[0].calls == []


def test_adapters_are_described_for_peft_and_four_bits_for_from_pretrained(library, folder):
    more = ["--lora_r", "4", "--lora_target_modules", "all-linear", "--model_init_kwargs", '{"revision": "r"}']
    keywords = trainer_of("grpo", argv(folder, "--use_peft", "--load_in_4bit", *more), library).keywords
    adapters, options = keywords["peft_config"], keywords["args"].model_init_kwargs
    assert (adapters.r, adapters.target_modules, adapters.task_type) == (4, "all-linear", "CAUSAL_LM")
    assert options["revision"] == "r"
    assert options["quantization_config"]["load_in_4bit"] is True


def test_a_run_is_resumed_from_its_newest_checkpoint_or_a_named_one_and_pushed_on_request(library, folder):
    checkpoint = folder / "out" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "lowpeak_state.json").write_text("{}")
    for word, value in (("true", True), (f"{checkpoint}", f"{checkpoint}"), ("auto", "auto")):
        trainer = trainer_of("grpo", argv(folder, "--resume_from_checkpoint", word, "--push_to_hub"), library)
        assert trainer.keywords["args"].resume_from_checkpoint == value
        assert trainer.calls == ["train", "save_model", ("push_to_hub", None)]  # the hub knows no local file


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("grpo", ["--model", "m"], "--dataset .*--reward"),
        ("online-dpo", ["--model", "m", "--dataset", "d"], "--reward .*--judge"),
        ("sft", [], "--model .*--dataset"),
        ("grpo", ["--model", "m", "--dataset", "d", "--reward", "r", "--load_in_8bit"], "--load_in_8bit"),
        ("grpo", ["--model", "m", "--dataset", "d", "--reward", "r", "--load_in_4bit"], "--load_in_4bit"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_be_is_refused_before_anything_is_loaded(kind, words, message, library):
    with pytest.raises(ArgumentError, match=message):
        with_config(parse_job(kind, words, library), library)


def test_what_transformers_refuses_is_an_argument_error(library, folder):
    with pytest.raises(ArgumentError, match=r"eval_steps|logging"):
        run_training(
            "grpo", argv(folder, "--eval_strategy", "steps", "--eval_steps", "0", "--logging_steps", "0"), library
        )


def test_a_data_file_that_is_not_there_is_a_data_error(library, folder):
    words = argv(folder)
    words[words.index(f"{folder}/rows.jsonl")] = f"{folder}/nowhere.jsonl"
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        run_training("grpo", words, library)


def test_what_was_resolved_is_shown_in_its_order():
    assert to_yaml({"b": 1, "a": {"x": None}}) == "b: 1\na:\n  x: null\n"
