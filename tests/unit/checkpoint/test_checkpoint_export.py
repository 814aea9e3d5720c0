"""A model written slice by slice is the model that `save_pretrained` writes."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from lowpeak.checkpoint.atomic import stage_files
from lowpeak.checkpoint.export import SafetensorsWriter, write_configs, write_weights
from lowpeak.parallel.parameters import broadcast_slices, exported_parameters, layout
from lowpeak.ranks import Ranks
from tiny_models import tiny_experts, tiny_model

TENSORS = {
    "half": torch.randn(5, 3).bfloat16(),
    "scalar": torch.tensor(2.5),
    "wide": torch.randn(7, 11),
    "ids": torch.arange(6).view(2, 3),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4),
}
LAYOUT = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


def mixtral():
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 32, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**heads, **sizes))


def slices(model):
    return broadcast_slices(exported_parameters(model, lambda parameter: None, "merged"), 100, None)


def layout_of(model):
    return layout(model, lambda parameter: None, "merged")


def export(model, folder, file_bytes=10**9):
    folder.mkdir()
    write_configs(folder, model, layout_of(model))
    write_weights(folder, model, layout_of(model), slices(model), file_bytes)
    return folder


MODELS = {
    "tied": tiny_model,
    "untied": lambda: tiny_model(tied=False),
    "bf16": lambda: tiny_model(dtype=torch.bfloat16),
    "experts": tiny_experts,
    "renamed experts": mixtral,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_an_export_is_what_transformers_saves(tmp_path, make):
    model = make()
    model.save_pretrained(tmp_path / "theirs")
    folders = (export(model, tmp_path / "ours"), tmp_path / "theirs")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("config.json", "generation_config.json"):
        one, other = (json.loads((folder / name).read_text()) for folder in folders)
        assert one == other


@pytest.mark.parametrize("make", [tiny_model, tiny_experts])
def test_an_export_of_several_files_gives_the_same_logits(tmp_path, make):
    model = make().eval()
    export(model, tmp_path / "out", file_bytes=4000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[2, 5, 7, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_persistent_buffer_is_written(tmp_path):
    model = tiny_model()
    model.model.register_buffer("scale", torch.tensor([3.0]))
    model.model.register_buffer("passing", torch.tensor([4.0]), persistent=False)
    saved = load_file(export(model, tmp_path / "out") / "model.safetensors")
    assert torch.equal(saved["model.scale"], torch.tensor([3.0]))
    assert "model.passing" not in saved


def test_all_slices_are_consumed_by_ranks_that_do_not_write_and_after_an_error(tmp_path):
    model = tiny_model()
    left = slices(model)
    write_weights(None, model, layout_of(model), left)
    assert next(left, None) is None
    left = slices(model)
    with pytest.raises(FileNotFoundError):
        write_weights(tmp_path / "missing", model, layout_of(model), left)
    assert next(left, None) is None


def write(folder, max_bytes, count=4):
    """Every tensor in ranges of `count` values, all of them in a random order."""
    pieces = [
        (name, first, tensor.reshape(-1)[first : first + count])
        for name, tensor in TENSORS.items()
        for first in range(0, tensor.numel(), count)
    ]
    random.Random(0).shuffle(pieces)
    files = SafetensorsWriter(folder, LAYOUT, max_bytes)
    for piece in pieces:
        files.write(*piece)


@pytest.mark.parametrize(("first", "second"), [(320, 1 << 30), (1 << 30, 320)])
def test_ranges_in_any_order_give_the_tensors_and_replace_an_earlier_export(tmp_path, first, second):
    for max_bytes in (first, second):
        with stage_files(tmp_path, Ranks()) as stage:
            write(stage, max_bytes)
    files = sorted(path.name for path in tmp_path.glob("model*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    if second == 320:
        found = json.loads(index.read_text())
        assert found["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in TENSORS.values())
        assert found["metadata"]["total_parameters"] == sum(t.numel() for t in TENSORS.values())
        assert set(found["weight_map"].values()) == set(files)
        assert files == [f"model-0000{n}-of-0000{len(files)}.safetensors" for n in range(1, len(files) + 1)]
        place = found["weight_map"]
    else:
        assert files == ["model.safetensors"]
        assert not index.exists()
        place = dict.fromkeys(TENSORS, "model.safetensors")
    assert place.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        with safe_open(tmp_path / place[name], "pt") as file:
            assert file.metadata() == {"format": "pt"}
            loaded = file.get_tensor(name)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)
