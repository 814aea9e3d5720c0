"""Checks of the names and values of a model's tensors, in vLLM and in files, against the checkpoint that transformers writes."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fused_model import FusedVllm
from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.checkpoint.export import write_weights
from lowpeak.errors import EngineError
from lowpeak.models.load import freeze_other_modalities
from lowpeak.parallel.parameters import broadcast_slices, exported_parameters, layout, unchanged_names
from lowpeak.records import WeightSlice
from lowpeak.vllm.weight_sync.push import push_weights

SETTINGS = VllmSettings(ServerSettings(()), bucket_bytes=1 << 16)


class PublishedModel(nn.Module):
    """A model of vLLM that accepts the tensors of a published checkpoint alone, and counts how often each comes."""

    rank = 0

    def __init__(self, config: Any, published: dict[str, Tensor]) -> None:
        super().__init__()
        self.hf_config = config
        self.tensors = nn.ParameterList(
            nn.Parameter(torch.full_like(tensor, 7), requires_grad=False) for tensor in published.values()
        )
        self.by_name = dict(zip(published, self.tensors, strict=True))
        self.num_loads: Counter[str] = Counter()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if tensor.shape != self.by_name[name].shape:
                raise ValueError(f"{name} has the shape {tuple(self.by_name[name].shape)}, not {tuple(tensor.shape)}")
            self.by_name[name].copy_(tensor)
            self.num_loads[name] += 1


def check_weight_names(model: nn.Module) -> str:
    """Return "yes" if two updates give vLLM the checkpoint's tensors, the frozen ones once; otherwise what went wrong."""
    freeze_other_modalities(model)
    published = published_tensors(model)
    engine = PublishedModel(model.config, published)  # type: ignore[arg-type]
    vllm, unchanged = FusedVllm(engine), unchanged_names(model)  # type: ignore[arg-type]
    try:
        push_weights(slices(model), [vllm], SETTINGS, 0, unchanged=unchanged)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0 if parameter.requires_grad else 0.0)
        again = published_tensors(model)
        push_weights(slices(model), [vllm], SETTINGS, 1, unchanged=unchanged)
    except EngineError as error:
        return f"no: {error}"
    wrong = [name for name, tensor in again.items() if not torch.equal(engine.by_name[name], tensor)]
    is_trained = {name for name, tensor in again.items() if not torch.equal(published[name], tensor)}
    is_frozen = again.keys() - is_trained if unchanged else set()
    expected = {name: 1 if name in is_frozen else 2 for name in again}
    wrong += [name for name, count in expected.items() if engine.num_loads[name] != count]
    return f"no: {', '.join(wrong[:3])}" if wrong else "yes"


def slices(model: nn.Module) -> Iterator[WeightSlice]:
    return broadcast_slices(exported_parameters(model, lambda parameter: None, "merged"), 4000, None)


def published_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def exported_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint that lowpeak writes."""
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), model, layout(model, lambda parameter: None, "merged"), slices(model))
        return load_file(Path(folder) / "model.safetensors")
