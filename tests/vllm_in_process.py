"""vLLM itself, in this process: a small model of transformers, the engine made of it, and how far their log-probs are apart."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowpeak.records import WeightSlice
from lowpeak.vllm.protocol import EngineInfo, check_worker_answers
from tiny_models import tiny_model

PROMPTS = [[2, 3, 4, 5, 6], [7, 8, 9], [5] * 12]
TOLERANCE = 1e-5  # fp32: two implementations of the same sums, 1e-6 or 2e-6 apart right after loading
EXTENSION = "lowpeak.vllm.weight_sync.worker.Extension"


class InsideVllm:
    """As much of a `Vllm` as weights need, around `vllm.LLM`; with several workers these are processes of their own."""

    def __init__(self, llm: Any, num_workers: int = 1) -> None:
        self.llm = llm
        self.num_workers = num_workers

    def info(self, wait_seconds: float | None = None) -> EngineInfo:
        return EngineInfo("", "", "", "float32", 128, 8, 1000, in_process=self.num_workers == 1)

    def call(self, method: str, arguments: Mapping[str, Any], timeout: float | None = None) -> list[Any]:
        return check_worker_answers(self.llm.collective_rpc(method, timeout, kwargs=dict(arguments)))

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.model_runner

    @property
    def model(self) -> Any:
        return self.runner.get_model()


@contextmanager
def engine(model: Any, folder: Path, **options: Any) -> Iterator[InsideVllm]:
    """vLLM with the weights that `model` has now; freed afterwards."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    importlib.import_module(EXTENSION.rpartition(".")[0])  # before the model is loaded

    model.save_pretrained(folder)
    given = {
        "skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20,
        "max_num_seqs": 8, "max_model_len": 128, "worker_extension_cls": EXTENSION, "disable_log_stats": True,
    }  # fmt: skip
    llm = LLM(str(folder), **(given | options))
    try:
        yield InsideVllm(llm, options.get("tensor_parallel_size", 1))
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()  # the next model may need other groups
        gc.unfreeze()
        gc.collect()


def slices(model: torch.nn.Module, count: int = 3000) -> Iterable[WeightSlice]:
    """The parameters of a model on one device, in ranges of `count` elements."""
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        for start in range(0, len(flat), count):
            yield WeightSlice(name, tuple(parameter.shape), parameter.dtype, start, flat[start : start + count])


def perturb(model: torch.nn.Module, seed: int, scale: float = 0.02) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


@torch.no_grad()
def logprobs_of(model: Any, prompt_ids: Sequence[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return each token's log-prob by the model's full softmax at the temperature."""
    logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def gap(vllm: InsideVllm, model: Any, request: Any = None, **params: Any) -> float:
    """The largest difference between the log-probs of what the engine samples and the model's full softmax at the temperature.

    With several temperatures each prompt has its own.
    """
    from vllm import SamplingParams

    given = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0} | params
    temperatures = given.pop("temperature", (0.0,))
    temperatures = temperatures if isinstance(temperatures, tuple) else (temperatures,)
    temperatures *= len(PROMPTS) // len(temperatures)
    sampling = [SamplingParams(**given, temperature=each) for each in temperatures]
    vllm.llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = vllm.llm.generate(prompts, sampling, use_tqdm=False, lora_request=request)
    worst = 0.0
    for prompt, output, temperature in zip(PROMPTS, outputs, temperatures, strict=True):
        ids = list(output.outputs[0].token_ids)
        found = [each[token].logprob for token, each in zip(ids, output.outputs[0].logprobs, strict=True)]
        expected = logprobs_of(model, prompt, ids, temperature or 1.0)
        worst = max(worst, float((torch.tensor(found) - expected).abs().max()))
    return worst


def policy_of(seed: int = 0, *, tied: bool = True, hidden: int = 128, layers: int = 2) -> Any:
    """Heads of 32, the smallest of vLLM's CPU attention; no parameter is zero, and logits are of a usual size."""
    policy = tiny_model(vocab_size=300, seed=seed, tied=tied, hidden=hidden, layers=layers)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(0.5 if parameter.dim() > 1 else 1.0)
    perturb(policy, seed)
    return policy
