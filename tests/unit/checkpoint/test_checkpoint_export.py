"""A model written slice by slice is the model that `save_pretrained` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lowpeak.checkpoint.export import write_settings, write_weights
from lowpeak.records import WeightSlice
from lowpeak.strategies.flat import ranges
from lowpeak.strategies.outgoing import layout, outgoing
from tiny import tiny_model

SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def moe() -> torch.nn.Module:
    torch.manual_seed(0)
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, intermediate_size=32, **experts))


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, intermediate_size=32, num_local_experts=4))


def slices(model: torch.nn.Module) -> Iterator[WeightSlice]:
    return ranges(outgoing(model, lambda parameter: None, "merged"), 100, None)


def export(model: torch.nn.Module, folder: Path, file_bytes: int = 10**9) -> None:
    folder.mkdir()
    leaving = layout(model, lambda parameter: None, "merged")
    write_settings(folder, model, leaving)
    write_weights(folder, model, leaving, slices(model), file_bytes)


@pytest.mark.parametrize(
    "make",
    [
        tiny_model,
        lambda: tiny_model(tied=False),
        lambda: tiny_model(dtype=torch.bfloat16),
        moe,
        mixtral,
    ],
    ids=["tied", "untied", "bf16", "experts", "renamed experts"],
)
def test_an_export_is_what_transformers_saves(tmp_path, make):
    model = make()
    export(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
            (tmp_path / "theirs" / name).read_text()
        )


@pytest.mark.parametrize("make", [tiny_model, moe])
def test_an_export_of_several_files_gives_the_same_logits(tmp_path, make):
    model = make().eval()
    export(model, tmp_path / "out", file_bytes=4000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([[2, 5, 7, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_buffer_that_checkpoints_hold_is_written(tmp_path):
    model = tiny_model()
    model.model.register_buffer("scale", torch.tensor([3.0]))
    model.model.register_buffer("passing", torch.tensor([4.0]), persistent=False)
    export(model, tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["model.scale"], torch.tensor([3.0]))
    assert "model.passing" not in saved


def test_a_rank_that_does_not_write_takes_every_slice():
    model = tiny_model()
    left = slices(model)
    write_weights(None, model, layout(model, lambda parameter: None, "merged"), left)
    assert next(left, None) is None


def test_an_error_in_writing_is_raised_after_the_last_slice(tmp_path):
    model = tiny_model()
    left = slices(model)
    with pytest.raises(FileNotFoundError):
        write_weights(tmp_path / "missing", model, layout(model, lambda parameter: None, "merged"), left)
    assert next(left, None) is None
