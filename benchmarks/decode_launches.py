"""Kernel launches per decoded token of the native engine: `python -m benchmarks.decode_launches [--quick]`.

One step of the decode loop on fake tensors, of Qwen2.5's 0.5B and 7B shapes with 64 sequences: the operations that launch a
kernel on CUDA, and the bytes that they copy; with bf16 weights, with fp32 ones under autocast, with and without 16-bit copies, and
what is left to launch beside a CUDA graph of the forward. Views, allocations and scalars launch none; attention counts as one. A
CUDA build of torch takes fake CUDA tensors, another one fake CPU tensors with CUDA's code. No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.report import print_result, versions
from lowpeak.arguments.sampling import Sampling
from lowpeak.attention.install import install_attention
from lowpeak.device_kind import rehearse_device
from lowpeak.heads.lm_head import install_head
from lowpeak.records import Prompt
from lowpeak.rollout.native.copied_weights import weight_copies
from lowpeak.rollout.native.decode_graphs import DecodeGraphs
from lowpeak.rollout.native.decode_loop import DecodeLoop
from lowpeak.rollout.native.output import OutputBuffer, StopStrings
from lowpeak.rollout.native.scheduler import PromptQueue
from lowpeak.rollout.sampling import TokenDraw

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    },
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.95},
    "top_k, top_p": {"top_k": 50, "top_p": 0.95},
    "min_p": {"min_p": 0.1},
}
LIMITS = {
    "0.5B": {"none": 1069, "top_p": 1070, "fp32, copied": 1069, "bf16, graph": 60},
    "7B": {"none": 1232, "top_p": 1233, "fp32, copied": 1232, "bf16, graph": 60},
}
WEIGHTS = ("fp32, copied", "fp32", "bf16, graph")
_PROMPT, _PROMPTS, _GENERATIONS = 256, 8, 8
# A scalar is a kernel's argument.
_NO_KERNEL_OPERATIONS = (
    *("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "_unsafe_view", "device"),
    "scalar_tensor",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernel launches per decoded token.")
    parser.add_argument("--quick", action="store_true", help="two layers, without filters and with top_p")
    quick = parser.parse_args(sys.argv[1:]).quick
    names = ("none", "top_p") if quick else tuple(FILTERS)
    layers = 2 if quick else None
    found = {
        shape: {
            **{name: count_step(shape, FILTERS[name], layers) for name in names},
            **{kind: count_step(shape, {}, layers, kind) for kind in WEIGHTS},
        }
        for shape in SHAPES
    }
    launches = {shape: {name: step.total for name, step in rows.items()} for shape, rows in found.items()}
    print("| shape | filters, or weights | launches | MB copied |\n|---|---|---|---|")
    for shape, rows in found.items():
        for name, step in rows.items():
            print(f"| {shape} | {name} | {step.total} | {step.copied_bytes / 1e6:.1f} |")
    print_result(
        {
            "benchmark": "decode_launches",
            "unit": "kernel launches per decoded token of all sequences",
            "launches": launches,
            "copied_bytes": {shape: rows["none"].copied_bytes for shape, rows in found.items()},
            "is_within_limits": None if quick else is_within_limits(launches),
            "versions": versions(),
        }
    )


def is_within_limits(launches: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether every shape keeps to its limits."""
    return all(rows[name] <= limit for shape, rows in launches.items() for name, limit in LIMITS[shape].items())


class CountLaunches(TorchDispatchMode):
    """Counts the operations that launch a kernel, and the bytes of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.copied_bytes = 0

    @property
    def total(self) -> int:
        return self.launches.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if not func.is_view and name not in _NO_KERNEL_OPERATIONS:
            self.launches[name] += 1
            self.copied_bytes += out.nbytes if name == "clone" else 0
        return out


class OneKernelAttention(TorchFunctionMode):
    """Attention by the memory-efficient kernel, which takes masks: without a GPU torch chooses none for fake tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        (query, key, value), mask = args[:3], kwargs.get("attn_mask")
        if mask is not None:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, mask, False, 0.0, kwargs.get("is_causal", False))[0]


class EndlessOutput(OutputBuffer):
    """An output whose sequences never end: nothing is read from the device."""

    def add(self, rows_N: Tensor, draw: TokenDraw, num_computed: int) -> list[bool]:
        self.write(rows_N, draw.tokens_N, draw.logprobs_N)
        return [False] * len(rows_N)


def count_step(
    shape: str, filters: Mapping[str, Any], num_layers: int | None = None, weights: str = "bf16"
) -> CountLaunches:
    """The launches of a decode step, after those that come first."""
    settings = SHAPES[shape] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    device = torch.device("cuda:0" if torch.version.cuda else "cpu")
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings, max_position_embeddings=32_768)).eval()
    model.to(torch.bfloat16 if "bf16" in weights else torch.float32)
    compute = torch.autocast(device.type, torch.bfloat16, enabled="fp32" in weights, cache_enabled=False)
    graphs = DecodeGraphs(lambda: lambda run: lambda: None) if "graph" in weights else None
    sampling = Sampling(num_generations=_GENERATIONS, max_new_tokens=1024, **filters)
    with FakeTensorMode(allow_non_fake_inputs=True), rehearse_device("cuda"), torch.no_grad(), OneKernelAttention():
        model.to_empty(device=device)
        install_head(model)
        install_attention(model)
        with compute, weight_copies(model, torch.bfloat16, (1 << 50) * ("copied" in weights)):
            return _count_last_step(model, sampling, device, graphs)


def _count_last_step(
    model: torch.nn.Module, sampling: Sampling, device: torch.device, graphs: DecodeGraphs | None
) -> CountLaunches:
    prompts: Sequence[Prompt] = [Prompt(i, (5,) * _PROMPT, "") for i in range(_PROMPTS)]
    num_rows = _PROMPTS * _GENERATIONS
    output = EndlessOutput(num_rows, sampling.max_new_tokens, frozenset((0,)), StopStrings(None, ()), None, device)
    queue = PromptQueue([_PROMPT] * _PROMPTS, _GENERATIONS, sampling.max_new_tokens, lambda tokens: (1 << 30) // tokens)
    loop = DecodeLoop(model, queue, 1 << 40, prompts, sampling, output, graphs)
    loop._admit()
    with patch.object(torch, "equal", return_value=True):  # of a graph's logits, which fake tensors do not have
        for _ in range(2):
            loop._step()
    with CountLaunches() as counted:
        loop._step()
    return counted


if __name__ == "__main__":
    main()
