"""A damaged file of a model's folder, or of the best checkpoint, is one sentence that names the file and the remedy.

A best checkpoint that was removed is a warning: the run keeps its last weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from lowpeak.arguments.base import ModelSettings
from lowpeak.errors import ArgumentError, CheckpointError, ModelError
from lowpeak.models.load import load_policy, load_reference
from preference_data import tiny_classifier
from small_runs import SAVED, make, rows, saved, trained
from tiny_models import tiny_model

MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "num_iterations": 2}


def build(kind, folder):
    """A trainer of the model in a folder, with the tokenizer beside it."""
    return make(kind, folder / "run", str(folder / "model"), tokenizer=False)


def load(folder, loading=None):
    return load_policy(str(folder), ModelSettings(loading or {}))


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


class AtBest(TrainerCallback):
    """Do something with the folder of the best checkpoint."""

    def __init__(self, act):
        self.act = act

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.act(Path(state.best_model_checkpoint))


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, **SAVED}


def test_the_damaged_checkpoint_of_the_best_model_is_named_when_it_is_loaded_at_the_end(tmp_path):
    damaging = AtBest(lambda folder: truncate(folder / "model.safetensors"))
    best = {**BEST, "metric_for_best_model": "reward", "callbacks": [damaging], "eval_dataset": rows(8)}
    with pytest.raises(CheckpointError, match=r"checkpoint-\d/model.safetensors"):
        trained("GRPO", tmp_path, **MOVING, **best)


def test_a_best_checkpoint_that_was_removed_is_told_and_the_last_weights_stay(tmp_path, caplog):
    best = {**BEST, "metric_for_best_model": "reward", "callbacks": [AtBest(shutil.rmtree)], "eval_dataset": rows(8)}
    trained("PPO", tmp_path, save_total_limit=1, num_generations=2, **best)
    (warning,) = [record.message for record in caplog.records if "load_best_model_at_end" in record.message]
    assert f"{tmp_path}/checkpoint-" in warning


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and its tokenizer."""
    return Path(saved(tmp_path / "model", tiny_model()))


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_damaged_file_of_the_model_is_named(folder, tmp_path, file, kind):
    for damage in (truncate, empty):
        damage(folder / file)
        with pytest.raises(ModelError, match=str(folder / file)):
            build(kind, tmp_path)


def test_damaged_weights_of_torch_s_own_format_are_named(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    truncate(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin"):
        build("GRPO", tmp_path)


def test_a_damaged_file_of_a_reward_model_is_named(tmp_path):
    judge = saved(tmp_path / "judge", tiny_classifier())
    truncate(tmp_path / "judge" / "model.safetensors")
    with pytest.raises(ModelError, match=r"judge/model.safetensors"):
        make("GRPO", tmp_path, reward_funcs=judge)


# a checkpoint that is not all of the model


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


UP = "model.layers.1.mlp.up_proj.weight"
LACKS = f"model' .*{UP}"


def test_a_tensor_that_the_checkpoint_lacks_is_named(folder, tmp_path):
    change_weights(folder, lambda weights: weights.pop(UP))
    for kind in ("GRPO", "SFT", "Reward"):
        with pytest.raises(ModelError, match=LACKS):
            build(kind, tmp_path)
    with pytest.raises(ModelError, match=LACKS):
        load_reference(tiny_model(), tiny_model(), ref_model=str(folder))
    loading = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(ModelError, match=LACKS):
        load(folder, loading)


def test_a_model_that_zero3_has_split_is_not_copied_as_the_reference():
    policy = tiny_model()
    next(policy.parameters()).ds_id = 0  # what DeepSpeed gives to a parameter that it splits
    with pytest.raises(ArgumentError, match=r"ZeRO-3 .* ref_model"):
        load_reference(policy, policy)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tie_word_embeddings": False}, r"model' .*lm_head\.weight"),
        ({"vocab_size": 20}, r"model.embed_tokens.weight .*13x32.*20x32"),
        ({"num_hidden_layers": 3}, r"'.*model' \(.*`num_hidden_layers` \(3\).*\).*config.json"),
        ({"hidden_size": None}, r"'.*model' \(.*'hidden_size'.*\).*config.json"),
        ({"rms_norm_eps": "x"}, r"'.*model' \(.*'rms_norm_eps'.*\).*config.json"),
        ({"num_attention_heads": 0}, r"'.*model' \(.*ZeroDivisionError.*\).*config.json"),
    ],
)
def test_a_config_that_does_not_go_with_the_weights_or_makes_no_model_is_one_sentence(folder, changes, names):
    configure(folder, **changes)
    with pytest.raises(ModelError, match=names):
        load(folder)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda text: "null"),
        ("tokenizer_config.json", lambda text: "null"),
        ("tokenizer.json", lambda text: text.replace('"WordLevel"', '"WordLevek"')),
    ],
    ids=["config is no object", "tokenizer's config is no object", "a changed byte of the tokenizer"],
)
def test_a_file_that_is_read_and_makes_no_sense_is_named(folder, tmp_path, file, change):
    (folder / file).write_text(change((folder / file).read_text()))
    with pytest.raises(ModelError, match=str(folder / file)):
        build("GRPO", tmp_path)


def test_ends_that_the_model_does_not_embed_are_told(folder, tmp_path):
    (folder / "tokenizer_config.json").unlink()
    for kind in ("GRPO", "SFT"):
        with pytest.raises(ModelError, match=r"pad_token '<\|endoftext\|>' .* 13.* 13 "):
            build(kind, tmp_path)


@pytest.mark.parametrize(
    ("loading", "error", "names"),
    [
        ({"foo": 4}, ModelError, "'foo'.*model_init_kwargs"),
        ({"dtype": "foo"}, ArgumentError, "dtype='foo'"),
        ({"attn_implementation": "foo"}, ModelError, 'model.*attn_implementation="foo"'),
    ],
)
def test_arguments_of_loading_that_fail_are_one_sentence(folder, loading, error, names):
    with pytest.raises(error, match=names):
        load(folder, loading)


def test_weights_that_are_not_finite_are_named(folder, tmp_path):
    change_weights(folder, lambda weights: weights[UP].fill_(float("nan")))
    with pytest.raises(ModelError, match=rf"{UP} .*NaN"):
        build("GRPO", tmp_path)
