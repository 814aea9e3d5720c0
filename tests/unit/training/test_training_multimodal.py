"""Models of text and images train on text alone: their other parameters are frozen, and images in the data are refused."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from lowpeak.errors import DataError
from lowpeak.parallel.detect import DeviceFractions
from lowpeak.sizes.run_sizes import training_bytes
from model_families import make_config, make_family
from small_runs import column, make, trained
from tiny_models import char_tokenizer

VISION = ("visual", "vision_tower", "multi_modal_projector")
PAIRS = [{"prompt": "12", "completion": "3"}] * 16


def is_vision(name):
    return any(part in name for part in VISION)


@pytest.mark.parametrize("family", ["Qwen2.5-VL", "Qwen3-VL", "Mistral 3", "Gemma 3 with vision"])
def test_a_model_of_text_and_images_trains_its_text_part_by_name(tmp_path, family):
    origin = make_family(family)
    origin.save_pretrained(tmp_path / "model")
    before = dict(origin.named_parameters())
    run = trained("GRPO", tmp_path / "run", str(tmp_path / "model"), beta=0.1, max_steps=2)
    assert column(run, "kl")[0] == 0.0
    after = dict(run.model.named_parameters())
    changed = {name for name, parameter in after.items() if not torch.equal(parameter, before[name])}
    assert any(is_vision(name) for name in before)
    assert not any(is_vision(name) for name in changed)
    assert {name for name in before if "language_model.layers" in name} <= changed
    text = sum(p.numel() for name, p in before.items() if not is_vision(name))
    assert training_bytes(run.model, torch.device("cpu"), DeviceFractions()) == 12 * text
    run.save_model(str(tmp_path / "saved"))
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(parameter, after[name]) for name, parameter in saved.named_parameters())


def test_a_reward_model_of_text_and_images_trains_its_text_part(tmp_path):
    config = make_config("Gemma 3 with vision")
    config.num_labels = 1
    run = make("Reward", tmp_path, AutoModelForSequenceClassification.from_config(config))
    is_trained = {name: p.requires_grad for name, p in run.model.named_parameters()}
    assert is_trained == {name: not is_vision(name) for name in is_trained}


def test_an_image_in_the_data_is_refused(tmp_path):
    model, token = make_family("Qwen3-VL"), 15
    with pytest.raises(DataError, match="'images'"):
        make("SFT", tmp_path, model, Dataset.from_list([{**row, "images": []} for row in PAIRS]))
    tokenizer = char_tokenizer("0123456789=abc")
    assert tokenizer("c")["input_ids"] == [token]
    with pytest.raises(DataError, match=r"row 0 .* 15,"):
        trained("GRPO", tmp_path, model, Dataset.from_list([{"prompt": "1c"}] * 16), tokenizer)
    with pytest.raises(DataError, match=r"row 0 .* 15,"):
        trained("SFT", tmp_path, model, Dataset.from_list([{"prompt": "1c", "completion": "3"}] * 16), tokenizer)
