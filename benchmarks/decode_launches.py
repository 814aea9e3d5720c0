"""Kernel launches per decoded token of the native engine: `python -m benchmarks.decode_launches [--quick]`.

One step of the decode loop on fake tensors, in bf16, of Qwen2.5's 0.5B and 7B shapes with 64 sequences: the operations that
launch a kernel on CUDA, and the bytes that they copy. Views, allocations and scalars launch none; attention counts as one.
A CUDA build of torch takes fake CUDA tensors, another one fake CPU tensors with CUDA's code. No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.report import print_result, versions
from lowpeak.arguments.rollout import Sampling
from lowpeak.attention.install import install_attention
from lowpeak.device_kind import rehearse_device
from lowpeak.heads.lm_head import install_head
from lowpeak.records import Prompt
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
LIMITS = {"0.5B": 1088, "7B": 1251}  # without filters
EXTRA_OF_TOP_P = 0
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
    found = {
        shape: {name: count_step(shape, FILTERS[name], 2 if quick else None) for name in names} for shape in SHAPES
    }
    print("| shape | filters | launches | MB copied |\n|---|---|---|---|")
    for shape, rows in found.items():
        for name, step in rows.items():
            print(f"| {shape} | {name} | {step.total} | {step.copied_bytes / 1e6:.1f} |")
    print_result(
        {
            "benchmark": "decode_launches",
            "unit": "kernel launches per decoded token of all sequences",
            "launches": {shape: {name: step.total for name, step in rows.items()} for shape, rows in found.items()},
            "copied_bytes": {shape: rows["none"].copied_bytes for shape, rows in found.items()},
            "is_within_limits": None
            if quick
            else is_within_limits({shape: {k: v.total for k, v in rows.items()} for shape, rows in found.items()}),
            "versions": versions(),
        }
    )


def is_within_limits(launches: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether every shape keeps to its limits."""
    return all(
        rows["none"] <= LIMITS[shape] and rows["top_p"] <= rows["none"] + EXTRA_OF_TOP_P
        for shape, rows in launches.items()
    )


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


def count_step(shape: str, filters: Mapping[str, Any], num_layers: int | None = None) -> CountLaunches:
    """The launches of a decode step, after a first one."""
    settings = SHAPES[shape] | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    device = torch.device("cuda:0" if torch.version.cuda else "cpu")
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings, max_position_embeddings=32_768)).to(torch.bfloat16).eval()
    sampling = Sampling(num_generations=_GENERATIONS, max_new_tokens=1024, **filters)
    with FakeTensorMode(allow_non_fake_inputs=True), rehearse_device("cuda"), torch.no_grad(), OneKernelAttention():
        model.to_empty(device=device)
        install_head(model)
        install_attention(model)
        return _count_last_step(model, sampling, device)


def _count_last_step(model: torch.nn.Module, sampling: Sampling, device: torch.device) -> CountLaunches:
    prompts: Sequence[Prompt] = [Prompt(i, (5,) * _PROMPT, "") for i in range(_PROMPTS)]
    num_rows = _PROMPTS * _GENERATIONS
    output = EndlessOutput(num_rows, sampling.max_new_tokens, frozenset((0,)), StopStrings(None, ()), None, device)
    queue = PromptQueue([_PROMPT] * _PROMPTS, _GENERATIONS, sampling.max_new_tokens, 1 << 30)
    loop = DecodeLoop(model, queue, 1 << 40, prompts, sampling, output)
    loop._admit()
    loop._step()
    with CountLaunches() as counted:
        loop._step()
    return counted


if __name__ == "__main__":
    main()
