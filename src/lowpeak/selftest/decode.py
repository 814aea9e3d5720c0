"""Decoding by the native engine at the shape of a real model: time per token, beside the plan's, and the allocator's memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from lowpeak.arguments import Sampling
from lowpeak.plan import Machine, Work, card_of, measure_cpu, step_seconds
from lowpeak.records import Prompt
from lowpeak.rollout.native import CudaCapture, DecodeGraphs, bytes_per_token
from lowpeak.selftest.models import HALF_BILLION, even_share, make_model, mib
from lowpeak.selftest.runs import make_trainer
from lowpeak.selftest.table import Bench, require, row

_NUM_PROMPTS, _GROUP = 8, 8
# A kernel library that plans anew for each length of the cache makes the first rollout many times slower than the next.
_MAX_FIRST_RATIO = 3.0


@row("decode", seconds=180, quick=True)
def decoding(bench: Bench) -> str:
    """Time 64 sequences of a 0.5B model twice, with top_p, by CUDA graphs, and by the plan; read reserved memory and backends."""
    prompt, completion = bench.pick((256, 64 if bench.quick else 256), (8, 4))
    shape: dict[str, Any] = bench.pick(HALF_BILLION, {"num_ids": 600, "hidden": 32, "layers": 2, "heads": (4, 2)})
    with bench.device:
        model = make_model(**shape, context=1024, dtype=torch.bfloat16)
    cache_bytes = _NUM_PROMPTS * _GROUP * (prompt + completion) * bytes_per_token(model)
    sizes = {"per_device_train_batch_size": _NUM_PROMPTS * _GROUP, "kv_cache_bytes": cache_bytes}
    trainer = make_trainer(bench, "decode", model, even_share, weight_bits=32, padding_free=False, **sizes)
    sampling = Sampling(_GROUP, completion)
    warm_up = replace(sampling, max_new_tokens=2)
    _generate(trainer, prompt, warm_up, bench)
    first, allocated, reserved = _generate(trainer, prompt, sampling, bench)
    again = _generate(trainer, prompt, sampling, bench)[0]
    filtered = _generate(trainer, prompt, replace(sampling, top_p=0.95), bench)[0]
    planned = _planned_seconds(bench, model, prompt, completion) / completion
    steps = {"first": first, "again": again, "top_p": filtered, "planned": planned}
    if bench.on_gpu:
        # A graph is compared with the forward that it repeats, bit for bit, when it is captured.
        engine: Any = trainer.collector.engine
        graphs = engine.graphs = DecodeGraphs(CudaCapture)
        steps["graphs"] = _generate(trainer, prompt, sampling, bench)[0]
        require(
            graphs.is_enabled, "a CUDA graph of the decode step failed, or its logits differ: see the warning above"
        )
    ms = {name: 1000 * seconds for name, seconds in steps.items()}
    rate = _NUM_PROMPTS * _GROUP / again
    kinds = ("cudnn", "flash", "mem_efficient", "math")
    backends = [name for name in kinds if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
    bench.record(**{f"{name}_ms_per_step": value for name, value in ms.items()}, tokens_per_second=rate)
    bench.record(allocated_bytes=allocated, reserved_bytes=reserved, sdpa_backends=backends)
    held = f"{mib(reserved)} reserved for {mib(allocated)} ({reserved / max(1, allocated):.1f} times)"
    require(
        not bench.on_gpu or first <= _MAX_FIRST_RATIO * again,
        f"the first rollout takes {ms['first']:.1f} ms per step and the next {ms['again']:.1f}: a plan for each length? "
        f"(SDPA backends: {', '.join(backends)})",
    )
    others = ", ".join(f"{name} {value:.1f}" for name, value in ms.items() if name != "again")
    return (
        f"{ms['again']:.1f} ms per step ({others}), {rate:,.0f} tokens/s, {held}, SDPA backends: {', '.join(backends)}"
    )


def _generate(trainer: Any, prompt_tokens: int, sampling: Sampling, bench: Bench) -> tuple[float, int, int]:
    """Return the seconds per step of one rollout, and the peaks of memory that is allocated and reserved."""
    engine, num_ids = trainer.collector.engine, trainer.model.config.vocab_size
    prompts = [
        Prompt(n, tuple((n + 7 * i) % (num_ids - 2) + 2 for i in range(prompt_tokens)), "") for n in range(_NUM_PROMPTS)
    ]
    engine.load((), 0)
    if bench.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    began = time.perf_counter()
    groups = engine.generate(prompts, sampling)
    if bench.on_gpu:
        torch.cuda.synchronize(bench.device)
    seconds = time.perf_counter() - began
    longest = max(len(completion) for group in groups for completion in group.completions)
    if not bench.on_gpu:
        return seconds / longest, 0, 0
    return (
        seconds / longest,
        torch.cuda.max_memory_allocated(bench.device),
        torch.cuda.max_memory_reserved(bench.device),
    )


def _planned_seconds(bench: Bench, model: Any, prompt: int, completion: int) -> float:
    """Return the seconds that the plan's cost model gives for the rollout on this device."""
    config, size = model.config, sum(parameter.numel() for parameter in model.parameters())
    card = card_of(torch.cuda.get_device_name(bench.device)) if bench.on_gpu else measure_cpu()
    work = Work(
        parameters=size,
        trained=size,
        active_parameters=size,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_bytes=bytes_per_token(model),
        prompt=prompt,
        completion=completion,
        train_tokens=0,
        score_tokens=0,
        score_passes=0,
        sequences=_NUM_PROMPTS * _GROUP,
        prompts=_NUM_PROMPTS,
        slots=_NUM_PROMPTS * _GROUP,
        num_batches=1,
        steps=1,
        checkpointing=False,
    )
    return step_seconds(work, Machine(1, card.memory, card=card, device=bench.pick("cuda", "cpu")))["rollout"]
