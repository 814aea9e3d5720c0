"""A damaged file of a model's folder, or of the best checkpoint, is one sentence that names the file and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForSequenceClassification, TrainerCallback

from lowpeak.critic import critics_model
from lowpeak.errors import ArgumentError, CheckpointError, ModelError
from lowpeak.training.models import load_policy, load_reference
from small_runs import make, rows
from tiny import char_tokenizer, tiny_model

MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "num_iterations": 2}


def build(kind, folder):
    """A trainer of the model in a folder, with the tokenizer beside it."""
    return make(kind, folder / "run", str(folder / "model"), tokenizer=False)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file):
    file.write_bytes(b"")


def test_the_damaged_checkpoint_of_the_best_model_is_named_when_it_is_loaded_at_the_end(tmp_path):
    class Damaging(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            if state.global_step == 2:
                truncate(Path(state.best_model_checkpoint) / "model.safetensors")

    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "reward",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    saving = {"save_strategy": "steps", "save_steps": 1, "callbacks": [Damaging()], "eval_dataset": rows(8)}
    with pytest.raises(CheckpointError, match=r"checkpoint-\d/model.safetensors"):
        make("GRPO", tmp_path, **MOVING, **best, **saving).train()


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and its tokenizer."""
    tiny_model().save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("damage", [truncate, empty])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_damaged_file_of_the_model_is_named(folder, tmp_path, file, damage):
    damage(folder / file)
    for kind in ("GRPO", "SFT"):
        with pytest.raises(ModelError, match=str(folder / file)):
            build(kind, tmp_path)


def test_damaged_weights_of_torch_s_own_format_are_named(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    truncate(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin"):
        build("GRPO", tmp_path)


def test_a_damaged_file_of_a_reward_model_is_named(tmp_path):
    config = Qwen2Config(**{**tiny_model().config.to_dict(), "num_labels": 1, "architectures": None})
    Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    char_tokenizer().save_pretrained(tmp_path / "judge")
    truncate(tmp_path / "judge" / "model.safetensors")
    with pytest.raises(ModelError, match=r"judge/model.safetensors"):
        make("GRPO", tmp_path, reward_funcs=str(tmp_path / "judge"))


# a checkpoint that is not all of the model


def without(folder, tensor):
    """Take a tensor out of the folder's weights."""
    weights = load_file(folder / "model.safetensors")
    del weights[tensor]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def configure(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


UP = "model.layers.1.mlp.up_proj.weight"
LACKS = f"model' .*{UP}"


def test_a_tensor_that_the_checkpoint_lacks_is_named(folder, tmp_path):
    without(folder, UP)
    for kind in ("GRPO", "SFT", "Reward"):
        with pytest.raises(ModelError, match=LACKS):
            build(kind, tmp_path)
    with pytest.raises(ModelError, match=LACKS):
        load_reference(tiny_model(), tiny_model(), None, str(folder), trust_remote_code=False)
    loading = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(ModelError, match=LACKS):
        load_policy(str(folder), loading, trust_remote_code=False)


def test_a_head_that_is_not_tied_and_not_there_is_named(folder):
    configure(folder, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"model' .*lm_head\.weight"):
        load_policy(str(folder), None, trust_remote_code=False)


def test_the_critic_starts_from_the_policy_s_backbone_and_a_head_of_its_own(folder, tmp_path):
    critic = make("PPO", tmp_path, str(folder), tokenizer=False, critic="model")
    assert not critics_model(critic.model).score.weight.any()


def test_a_mismatch_of_shapes_names_the_tensor(folder):
    configure(folder, vocab_size=20)
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight .*13x32.*20x32"):
        load_policy(str(folder), None, trust_remote_code=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, r"`num_hidden_layers` \(3\)"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps'"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
    ],
)
def test_a_number_of_the_config_that_makes_no_model_is_one_sentence(folder, changes, words):
    configure(folder, **changes)
    with pytest.raises(ModelError, match=rf"'.*model' \(.*{words}.*\).*config.json"):
        load_policy(str(folder), None, trust_remote_code=False)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_config_that_is_no_object_is_named(folder, tmp_path, file):
    (folder / file).write_text("null")
    with pytest.raises(ModelError, match=rf"{folder / file}"):
        build("GRPO", tmp_path)


def test_a_changed_byte_of_the_tokenizer_names_its_file(folder, tmp_path):
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"WordLevel"', '"WordLevek"'))
    with pytest.raises(ModelError, match=rf"{folder / 'tokenizer.json'}"):
        build("GRPO", tmp_path)


def test_ends_that_the_model_does_not_embed_are_told(folder, tmp_path):
    (folder / "tokenizer_config.json").unlink()
    for kind in ("GRPO", "SFT"):
        with pytest.raises(ModelError, match=r"pad_token '<\|endoftext\|>' .* 13.* 13 "):
            build(kind, tmp_path)


@pytest.mark.parametrize(
    ("loading", "error", "words"),
    [
        ({"foo": 4}, ModelError, "'foo'.*model_init_kwargs"),
        ({"dtype": "foo"}, ArgumentError, "dtype='foo'"),
        ({"attn_implementation": "foo"}, ModelError, r"cannot load .*\(Specified `attn_implementation=\"foo\"`"),
    ],
)
def test_arguments_of_loading_that_fail_are_one_sentence(folder, loading, error, words):
    with pytest.raises(error, match=words):
        load_policy(str(folder), loading, trust_remote_code=False)


def test_weights_that_are_not_finite_are_named(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    weights[UP][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{UP} .*NaN"):
        build("GRPO", tmp_path)
