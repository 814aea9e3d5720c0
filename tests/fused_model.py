"""A worker of vLLM as far as weights see it: a model that fuses, pads and ties what it loads, and the workers' methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.records import WeightSlice
from lowpeak.vllm.protocol import EngineInfo, check_worker_answers
from lowpeak.vllm.weight_sync.worker import Extension

VOCAB, PADDED, WIDTH = 13, 16, 12
SHAPES = {
    "embed.weight": (VOCAB, WIDTH),
    "q.weight": (8, WIDTH),
    "k.weight": (4, WIDTH),
    "v.weight": (4, WIDTH),
    "o.weight": (WIDTH, 8),
    "norm.weight": (WIDTH,),
}


class FusedModel(nn.Module):
    """q, k and v in one parameter, the vocabulary padded with zeros; with `tp` ranks, heads and columns of this rank alone."""

    def __init__(self, *, tied: bool = True, tp: int = 1, rank: int = 0) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank
        self.embed = nn.Parameter(torch.full((PADDED, WIDTH), 7.0))
        self.head = self.embed if tied else nn.Parameter(torch.full((PADDED, WIDTH), 7.0))
        self.qkv = nn.Parameter(torch.full((16 // tp, WIDTH), 7.0))
        self.o = nn.Parameter(torch.full((WIDTH, 8 // tp), 7.0))
        self.norm = nn.Parameter(torch.full((WIDTH,), 7.0))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            kind = name.removesuffix(".weight")
            if kind in "qkv":
                rows = len(tensor) // self.tp
                first = {"q": 0, "k": 8, "v": 12}[kind] // self.tp
                self.qkv.data[first : first + rows].copy_(tensor[self.rank * rows :][:rows])
            elif kind in ("embed", "head"):
                parameter = getattr(self, kind)
                parameter.data[:VOCAB].copy_(tensor)
                parameter.data[VOCAB:].fill_(0)
            elif kind == "o":
                columns = tensor.shape[1] // self.tp
                self.o.data.copy_(tensor[:, self.rank * columns :][:, :columns])
            else:
                getattr(self, kind).data.copy_(tensor)


class FusedWorker(Extension):
    """What the methods need of a worker."""

    def __init__(self, model: FusedModel) -> None:
        self.model = model
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        parallel, config = SimpleNamespace(rank=model.rank), getattr(model, "hf_config", None)
        models = SimpleNamespace(hf_config=config)
        self.vllm_config = SimpleNamespace(quant_config=None, parallel_config=parallel, model_config=models)


class FusedVllm:
    """As much of a `Vllm` as weights need; arguments must survive JSON where it stands for another process."""

    def __init__(self, *models: FusedModel, in_process: bool = True) -> None:
        self.workers = [FusedWorker(model) for model in models or (FusedModel(),)]
        self.in_process = in_process
        self.calls: list[str] = []
        self.transport = ""
        self.before: Callable[[str, Mapping[str, Any]], None] = lambda method, arguments: None

    @property
    def model(self) -> FusedModel:
        return self.workers[0].model

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        self.calls.append(method)
        self.transport = arguments.get("invitation", {}).get("transport", self.transport)
        self.before(method, arguments)
        given = arguments if self.in_process else json.loads(json.dumps(arguments))
        return check_worker_answers([getattr(worker, method)(**given) for worker in self.workers])

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        return EngineInfo("", "fused", "", "float32", 128, 8, 1000, in_process=self.in_process)

    def versions(self) -> list[int | None]:
        return [answer["policy_version"] for answer in self.call("lowpeak_identity", {})]


def weights(seed: int = 0, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if tied else SHAPES | {"head.weight": (VOCAB, WIDTH)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def slices(tensors: Mapping[str, Tensor], count: int = 10) -> Iterable[WeightSlice]:
    """`tensors` in ranges of `count` elements, all in one buffer, as the strategies' are."""
    for name, tensor in tensors.items():
        buffer, flat = torch.empty(count, dtype=tensor.dtype), tensor.reshape(-1)
        for start in range(0, len(flat), count):
            part = flat[start : start + count]
            values = buffer[: len(part)].copy_(part)
            yield WeightSlice(name, tuple(tensor.shape), tensor.dtype, start, values)
            buffer.fill_(float("nan"))
