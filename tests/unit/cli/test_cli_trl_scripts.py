"""TRL's scripts run with their import changed: those of the pinned wheel as they are, notebooks' flows in our words."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import lowpeak
from lowpeak import (
    DatasetMixtureConfig,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from lowpeak.errors import ArgumentError, DataError
from small_runs import saved, steps
from tiny_models import char_tokenizer, tiny_model
from trl_wheel import needs_trl, text_of

TOKENIZER = char_tokenizer(chat=True)
ROWS = {
    "grpo": [{"prompt": f"{i % 10}=", "answer": str(i % 10)} for i in range(16)],
    "rloo": [{"prompt": f"{i % 10}="} for i in range(16)],
    "sft": [{"prompt": f"{i % 10}=", "completion": str(i % 10)} for i in range(16)],
    "reward": [{"prompt": f"{i % 10}=", "chosen": str(i % 10), "rejected": str((i + 3) % 10)} for i in range(16)],
    "kto": [{"prompt": f"{i % 10}=", "completion": str(i % 10), "label": i % 2 == 0} for i in range(16)],
}
ROWS["dpo"] = ROWS["reward"]
RUN = {
    **{"max_steps": 2, "per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none", "learning_rate": 1e-2},
    **{"logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"},
}
REWARD = "def ones(completions, **columns):\n    return [float(str(text).count('1')) for text in completions]\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model and a module of rewards, in which scripts run."""
    saved(tmp_path / "model", tiny_model(len(TOKENIZER)), TOKENIZER)
    (tmp_path / "rewards_of_a_test.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("rewards_of_a_test", None)


def data_in(folder: Path, kind: str) -> str:
    for split in ("train", "test"):
        Dataset.from_list(ROWS[kind]).to_json(folder / "data" / f"{split}.jsonl")
    return str(folder / "data")


def words(**arguments):
    listed = ((f"--{name}", value if isinstance(value, list) else [value]) for name, value in arguments.items())
    return [str(word) for name, values in listed for word in (name, *values)]


def run_script(kind: str, monkeypatch, *more: str, **arguments) -> None:
    """Run the wheel's script with this command line, its imports of trl changed to lowpeak."""
    monkeypatch.setattr(sys, "argv", [f"{kind}.py", *words(**arguments), *more])
    text = text_of(f"scripts/{kind}.py").replace("from trl", "from lowpeak")
    exec(compile(text, f"{kind}.py", "exec"), {"__name__": "__main__"})


@needs_trl
@pytest.mark.parametrize("kind", ROWS)
def test_a_script_of_the_wheel_trains_evaluates_and_saves(kind, folder, monkeypatch, capsys):
    online = {"reward_funcs": "rewards_of_a_test.ones", "max_completion_length": 5, "num_generations": 4}
    arguments = {
        **{"model_name_or_path": folder / "model", "dataset_name": data_in(folder, kind), "output_dir": "out"},
        **{"eval_strategy": "steps", "eval_steps": 2, **RUN, **(online if kind in ("grpo", "rloo") else {})},
    }
    run_script(kind, monkeypatch, **arguments)
    shown = capsys.readouterr().out
    assert re.search(r"  eval  (loss|reward) ", shown)
    assert (folder / "out" / "model.safetensors").is_file()


@needs_trl
def test_a_script_reads_adapters_mixtures_and_names_that_it_does_not_know_from_a_file(
    folder, monkeypatch, caplog, capsys
):
    data_in(folder, "grpo")
    mixture = [{"path": f"{folder}/data/train.jsonl", "columns": ["prompt"], "fraction": share} for share in (3, 1)]
    file = {
        **{
            "model_name_or_path": f"{folder}/model",
            "datasets": mixture,
            "test_split_size": 4,
            "output_dir": "out",
            **RUN,
        },
        **{"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0},
        **{"reward_funcs": "rewards_of_a_test.ones", "max_completion_length": 5, "num_generations": 4},
        **{"eval_strategy": "steps", "eval_steps": 2, "name_of_another_tool": 3, "env": {"LOWPEAK_OF_A_TEST": 7}},
    }
    (folder / "run.yaml").write_text(json.dumps(file))
    monkeypatch.setenv("LOWPEAK_OF_A_TEST", "")
    run_script("grpo", monkeypatch, "--config", "run.yaml", "--lora_r", "2")
    assert json.loads((folder / "out" / "adapter_config.json").read_text())["r"] == 2
    assert "--name_of_another_tool" in caplog.text
    assert "  eval  reward " in capsys.readouterr().out


def test_the_parser_takes_a_file_below_the_command_line_and_names_what_it_cannot_take(tmp_path):
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nbeta: 0.5\nlora_r: 4\n")
    script, config, model = parser.parse_args_and_config(["--config", f"{tmp_path}/run.yaml", "--lora_r", "8"])
    assert (script.dataset_train_split, config.beta, model.lora_r, model.dtype) == ("train", 0.5, 8, "float32")
    for name, remedy in (("max_prompt_length", "overlong_prompts"), ("bta", "beta"), ("ignore_bias_buffers", "DDP")):
        (tmp_path / "bad.yaml").write_text(f"{name}: 5\n")
        for argv in (["--config", f"{tmp_path}/bad.yaml"], [f"--{name}", "5"]):
            with pytest.raises(ArgumentError, match=f"{name}.*{remedy}"):
                parser.parse_args_and_config([*argv, "--output_dir", str(tmp_path), "--use_cpu"])
    (tmp_path / "trl.yaml").write_text("dataset_kwargs: null\nignore_bias_buffers: false\n")
    parser.parse_args_and_config(["--config", f"{tmp_path}/trl.yaml", "--output_dir", str(tmp_path), "--use_cpu"])


@needs_trl
def test_the_classes_have_trls_fields_and_defaults():
    tree = ast.parse(text_of("trainer/model_config.py") + text_of("scripts/utils.py"))
    theirs = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind in (ModelConfig, ScriptArguments):
        fields = [node for node in theirs[kind.__name__].body if isinstance(node, ast.AnnAssign)]
        defaults = {field.target.id: ast.literal_eval(field.value.keywords[0].value) for field in fields}
        defaults.pop("ignore_bias_buffers", None)  # refused by its name
        ours = kind()
        assert {name: getattr(ours, name) for name in defaults} == defaults


@needs_trl
def test_every_public_name_of_trl_exists_or_is_an_error_that_names_trl():
    listed = next(node for node in ast.parse(text_of("__init__.py")).body if "_import_structure" in ast.unparse(node))
    names = [name for group in ast.literal_eval(listed.value).values() for name in group]
    assert len(names) > 40
    missing = [name for name in names if name not in lowpeak.__all__]
    for name in missing:
        with pytest.raises(ImportError, match=f"lowpeak.*{name}.*trl"):
            exec(f"from lowpeak import {name}")
    assert "BEMACallback" in missing
    with pytest.raises(ImportError, match="OnlineDPOTrainer"):
        exec("from lowpeak.experimental.online_dpo import OnlineDPOTrainer")


def test_a_mixture_is_a_dataset_with_a_split_that_may_be_held_out(folder):
    data_in(folder, "sft")
    path = f"{folder}/data/train.jsonl"
    assert (
        get_dataset(DatasetMixtureConfig([path, {"path": path, "columns": ["prompt", "completion"]}]))["train"].num_rows
        == 32
    )
    held = get_dataset(DatasetMixtureConfig([path], test_split_size=0.25))
    assert {name: split.num_rows for name, split in held.items()} == {"train": 12, "test": 4}
    assert next(iter(get_dataset(DatasetMixtureConfig([path], streaming=True))["train"])) == ROWS["sft"][0]
    with pytest.raises(DataError, match="datasets"):
        get_dataset(DatasetMixtureConfig())


def ones(completions, **columns):
    return [float(str(text).count("1")) for text in completions]


def test_lora_grpo_reloads_and_merges_as_in_the_notebook(folder):

    model_args = ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS["grpo"]]
    args = GRPOConfig(output_dir="out", max_completion_length=5, num_generations=4, **RUN)
    trainer = lowpeak.GRPOTrainer(
        model=f"{folder}/model",
        reward_funcs=[ones],
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model("out")
    reloads_and_merges(folder, trainer)


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_qlora_trains_on_a_4_bit_base_and_its_adapter_merges_into_the_plain_one(kind, folder):
    pytest.importorskip("bitsandbytes")
    model_args = ModelConfig(
        load_in_4bit=True, use_peft=True, lora_r=4, lora_target_modules=["all-linear"], lora_dropout=0.0
    )
    quantization = get_quantization_config(model_args)
    assert isinstance(quantization, BitsAndBytesConfig)
    assert (quantization.bnb_4bit_quant_type, quantization.bnb_4bit_compute_dtype) == ("nf4", torch.float32)
    online = {"max_completion_length": 5, "num_generations": 4}
    config = SFTConfig if kind == "SFT" else GRPOConfig
    trainer = getattr(lowpeak, f"{kind}Trainer")(
        model=f"{folder}/model",
        args=config(output_dir="out", **RUN, **({} if kind == "SFT" else online)),
        train_dataset=Dataset.from_list(ROWS[kind.lower()]),
        quantization_config=quantization,
        peft_config=get_peft_config(model_args),
        **({} if kind == "SFT" else {"reward_funcs": ones}),
    )
    trainer.train()
    assert len(steps(trainer)) == 2
    trainer.save_model("out")
    reloads_and_merges(folder, trainer, exact=False)


def reloads_and_merges(folder, trainer, exact=True):
    """The saved adapter changes the plain base as the trained one changed its own; merging changes nothing."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = AutoTokenizer.from_pretrained(folder / "model")("12=", return_tensors="pt").input_ids
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, folder / "out")
        expected = adapted(ids).logits
        merged = adapted.merge_and_unload()
        found = merged(ids).logits
        trained = trainer.model.eval()(input_ids=ids).logits
    assert not torch.equal(plain, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if exact:
        torch.testing.assert_close(expected, trained, rtol=1e-4, atol=1e-4)


def test_the_other_trainers_arguments_parse_too(tmp_path):
    for name in ("RLOOConfig", "PPOConfig", "OnlineDPOConfig", "SFTConfig", "RewardConfig"):
        parser = TrlParser([getattr(lowpeak, name)])
        (args,) = parser.parse_args_and_config(["--output_dir", str(tmp_path), "--use_cpu", "--learning_rate", "1e-3"])
        assert (type(args).__name__, args.learning_rate) == (name, 1e-3)
        parser.format_help()
