"""Memory that rollouts leave reserved in torch's caching allocator: `python -m benchmarks.rollout_allocator [--quick]`.

Three rollouts with prompts of different lengths, a training step between them, on fake tensors in bf16: a model of the allocator
gets each storage that the native engine and the step make and free. Reserved at the end of a rollout, over the weights and
`slots x (longest prompt + max_completion_length)` of the largest rollout so far. No GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.decode_launches import SHAPES, EndlessOutput, OneKernelAttention
from benchmarks.harness.caching_allocator import AllocatedFakes, CachingAllocator
from benchmarks.harness.report import print_result, versions
from lowpeak.arguments.sampling import Sampling
from lowpeak.attention.install import install_attention
from lowpeak.device_kind import rehearse_device
from lowpeak.heads.lm_head import install_head
from lowpeak.plan.rehearsal.storage_meter import run_methods_inside
from lowpeak.records import Prompt
from lowpeak.rollout.native.cache import SlotCache, bucket_size
from lowpeak.rollout.native.cache_bytes import bytes_per_token
from lowpeak.rollout.native.decode_loop import DecodeLoop
from lowpeak.rollout.native.output import StopStrings
from lowpeak.rollout.native.scheduler import PromptQueue

_AIM, _GROUP, _SHARES = 1.10, 8, (0.8, 1.0, 0.9)  # of the longest prompt, by rollout
_TRAINED_TOKENS = 4_096


@dataclass(frozen=True)
class Case:
    """Sequences of a rollout: all of them run at once."""

    shape: str
    slots: int
    prompt: int
    completion: int

    def __str__(self) -> str:
        return f"{self.shape}, {self.slots} x ({self.prompt} + {self.completion:,})"


CASES = (
    Case("7B", 64, 256, 1024),
    Case("7B", 128, 512, 2048),
    Case("7B", 64, 1024, 8192),
    Case("0.5B", 512, 256, 1024),
)


def measure(case: Case, layers: int | None = None) -> list[dict[str, Any]]:
    """Return what is reserved and mallocs after each rollout."""
    settings = SHAPES[case.shape] | ({} if layers is None else {"num_hidden_layers": layers})
    allocator, found = CachingAllocator(), list[dict[str, Any]]()
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**settings, max_position_embeddings=32_768)).to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), rehearse_device("cuda"), AllocatedFakes(allocator):
        model.to_empty(device="cpu")
        install_head(model)
        install_attention(model)
        weights, needed = allocator.allocated, 0
        for share in _SHARES:  # the cache is allocated after cached blocks are returned
            tokens = int(share * case.prompt) + case.completion
            needed = max(needed, case.slots * tokens * bytes_per_token(model))
            _generate(model.eval(), case, int(share * case.prompt), allocator)
            found.append(
                {
                    "reserved": allocator.reserved,
                    "ratio": allocator.reserved / (weights + needed),
                    "mallocs": allocator.mallocs,
                }
            )
            allocator.empty_cache()  # the engine sleeps
            _train(model.train())
    return found


def _generate(model: Any, case: Case, prompt_tokens: int, allocator: CachingAllocator) -> None:
    """Generate with all slots; of the decode steps those run in which the bucket of the columns is another one."""
    prompts = [Prompt(i, (5,) * prompt_tokens, "") for i in range(case.slots // _GROUP)]
    sampling = Sampling(num_generations=_GROUP, max_new_tokens=case.completion)
    output = EndlessOutput(
        case.slots, case.completion, frozenset((0,)), StopStrings(None, ()), None, torch.device("cpu")
    )
    budget = case.slots * (case.prompt + case.completion)
    queue = PromptQueue([prompt_tokens] * len(prompts), _GROUP, case.completion, lambda tokens: budget // tokens)
    returning = run_methods_inside(SlotCache, {"allocate": partial(_returned, allocator)})
    with torch.no_grad(), OneKernelAttention(), returning:
        loop = DecodeLoop(model, queue, budget * bytes_per_token(model), prompts, sampling, output)
        loop._admit()
        last_bucket = 0
        for step in range(case.completion - 1):
            bucket = bucket_size(prompt_tokens + step + 1)
            if bucket != last_bucket:
                loop._num_steps = step
                loop._step()
                last_bucket = bucket


@contextmanager
def _returned(allocator: CachingAllocator) -> Iterator[None]:
    """Return cached blocks, as the cache lets torch do on a device."""
    allocator.empty_cache()
    yield


def _train(model: Any) -> None:
    """One forward and backward of a micro-batch, with checkpointing."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids_BL = torch.ones(1, _TRAINED_TOKENS, dtype=torch.int64)
    model.model(input_ids=ids_BL, use_cache=False).last_hidden_state.float().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    model.gradient_checkpointing_disable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two layers")
    options = parser.parse_args()
    found = {str(case): measure(case, 2 if options.quick else None) for case in CASES}
    print("| rollouts | reserved after each, GiB | of weights and cache | cudaMallocs |\n|---|---|---|---|")
    for name, rollouts in found.items():
        reserved = ", ".join(f"{each['reserved'] / 2**30:.1f}" for each in rollouts)
        ratios = ", ".join(f"{each['ratio']:.3f}" for each in rollouts)
        print(f"| {name} | {reserved} | {ratios} | {', '.join(str(each['mallocs']) for each in rollouts)} |")
    print_result({"benchmark": "rollout_allocator", "aim": _AIM, "found": found, "versions": versions()})


if __name__ == "__main__":
    main()
