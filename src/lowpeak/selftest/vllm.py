"""Tests of vLLM: weights pushed over each transport, log-probs, sleep and wake-up, seconds of a start and a push."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lowpeak.arguments import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.memory import used_bytes
from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.selftest.models import HALF_BILLION, make_model, make_tokenizer, mib
from lowpeak.selftest.table import Bench, require, row
from lowpeak.vllm import ColocatedModelSpec, ColocatedVllm, Request, ServerVllm, Vllm
from lowpeak.vllm.serving import CPU, ServerSpec, free_ports, running_server
from lowpeak.vllm.weight_sync import available_transports, loaded_version, push_weights, verify_unchanged

_CACHE = 64 << 20
_CONTEXT = 128
_NUM_IDS = 512
_BUCKET = 64 << 20  # the default of vllm_bucket_size
_TIMEOUT_SECONDS = 60.0  # of one call of another process
_NUM_PROMPTS = 4
_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
}
# Largest difference, in nats, of vLLM's and transformers' log-probs of the same weights: their kernels round differently.
_LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}


@row("vLLM colocated", "vLLM", seconds=300, quick=True)
def colocated_vllm(bench: Bench) -> str:
    """Push weights to a vLLM in this process and compare log-probs; put it to sleep, wake it and verify its weights."""
    model, before = _vllm_model(bench), used_bytes(bench.device)
    began = time.monotonic()
    # Compiling takes most of a start: a quick test does without.
    with closing(_start(bench, model, sleeps=bench.on_gpu, eager=bench.quick)) as vllm:
        bench.record(start_seconds=time.monotonic() - began)
        results = [f"started in {time.monotonic() - began:.0f} s", _push_and_compare(model, vllm, bench)]
        if bench.on_gpu:
            awake, began = used_bytes(bench.device), time.monotonic()
            vllm.sleep()
            asleep = used_bytes(bench.device)
            vllm.wake()
            verify_unchanged([vllm])
            seconds = time.monotonic() - began
            bench.record(awake_bytes=awake - before, asleep_bytes=asleep - before, sleep_seconds=seconds)
            results.append(
                f"{mib(awake - before)} awake, {mib(asleep - before)} asleep, slept, woken and verified in {seconds:.1f} s"
            )
    return "; ".join(results)


@row("vLLM start", "vLLM", seconds=600, in_default_run=False)
def vllm_start(bench: Bench) -> str:
    """Start vLLM twice for a 0.5B model, and push the weights over each transport."""
    import vllm as _  # noqa: F401  # its import is not part of a start

    shape: dict[str, Any] = bench.pick(HALF_BILLION, {"num_ids": _NUM_IDS, "hidden": 256, "heads": (4, 2)})
    with bench.device:
        model = make_model(**shape, context=_CONTEXT, dtype=_dtype(bench)).eval()
    seconds, pushed = [], ""
    for _number in range(2):
        began = time.monotonic()
        with closing(_start(bench, model, sleeps=False, eager=False)) as vllm:
            seconds.append(time.monotonic() - began)
            pushed = push_over_each([vllm], lambda version: _slices(model, version), bench.device, _BUCKET, bench)
    bench.record(first_start_seconds=seconds[0], second_start_seconds=seconds[1])
    return f"started in {seconds[0]:.0f} s, a second time in {seconds[1]:.0f} s; {pushed}"


def _start(bench: Bench, model: Any, *, sleeps: bool, eager: bool) -> ColocatedVllm:
    kwargs = {"enforce_eager": True} if eager else {}
    where = ColocateSettings(gpu_memory_utilization=0.1, max_model_length=_CONTEXT, sleeps=sleeps, engine_kwargs=kwargs)
    dtype = str(model.dtype).removeprefix("torch.")
    model_spec = model.config, make_tokenizer(model.config.vocab_size), type(model).__name__, dtype, bench.device
    spec = ColocatedModelSpec(*model_spec, kv_cache_bytes=_CACHE, trust_remote_code=False, seed=0)
    return ColocatedVllm(spec, VllmSettings(where), Ranks(bench.device))


def vllm_server(bench: Bench, gpu: str) -> str:
    """Push weights to a vLLM server on a GPU (or the CPU) and compare log-probs."""
    model, folder = _vllm_model(bench), bench.folder / "model"
    model.save_pretrained(folder)
    make_tokenizer(_NUM_IDS).save_pretrained(folder)
    sizes = ("--max-model-len", str(_CONTEXT), "--gpu-memory-utilization", "0.1")
    options = (*sizes, "--kv-cache-memory-bytes", str(_CACHE), "--enforce-eager")
    dtype = str(model.dtype).removeprefix("torch.")
    devices = (bench.pick(gpu, CPU),)
    server = ServerSpec(str(folder), port=free_ports(1)[0], devices=devices, dtype=dtype, options=options)
    with running_server(server, bench.folder / "server.log"):
        return _push_and_compare(model, ServerVllm(server.url, server.token), bench)


row("vLLM server", "vLLM", seconds=300)(partial(vllm_server, gpu="0"))
row("vLLM server on another GPU", "2 GPUs", "vLLM", seconds=300)(partial(vllm_server, gpu="1"))


def _dtype(bench: Bench) -> torch.dtype:
    return bench.pick(torch.bfloat16, torch.float32)


def _vllm_model(bench: Bench) -> Any:
    model = make_model(_NUM_IDS, 256, 2, (4, 2), context=_CONTEXT, tied=False, dtype=_dtype(bench))
    return model.to(bench.device).eval()


def _push_and_compare(model: nn.Module, vllm: Vllm, bench: Bench) -> str:
    vllm.info()
    vllm.call("lowpeak_score_at_temperature", {}, _TIMEOUT_SECONDS)
    pushed = push_over_each([vllm], lambda version: _slices(model, version), bench.device, bench=bench)
    differences = {name: _logprob_difference(model, vllm, params, bench) for name, params in _SAMPLING.items()}
    bench.record(logprob_differences=differences)
    shown = ", ".join(f"{difference:.0e} ({name})" for name, difference in differences.items())
    return f"{pushed}; log-probs within {shown} of the model's"


def push_over_each(
    vllms: Sequence[Vllm],
    slices: Callable[[int], Iterable[WeightSlice]],
    device: torch.device,
    bucket_bytes: int = 1 << 20,
    bench: Bench | None = None,
) -> str:
    """Push `slices(version)` over each transport that reaches all workers, and verify the engines' weights.

    `slices` returns all weights of the (small) model that the engines loaded, on `device`, with other values for each version.
    MismatchError names the transports that failed, after all have been tried.
    """
    settings = VllmSettings(ServerSettings(()), bucket_bytes=bucket_bytes)
    passed, failed = [], []
    for version, transport in enumerate(available_transports(vllms, device, _TIMEOUT_SECONDS), 1):
        try:
            report = push_weights(
                slices(version), vllms, replace(settings, transport=transport), version, timeout=_TIMEOUT_SECONDS
            )
            verify_unchanged(vllms, _TIMEOUT_SECONDS)
            require(
                loaded_version(vllms, _TIMEOUT_SECONDS) == version,
                "the engines do not have the version that was pushed",
            )
        except Exception as error:
            failed.append(f"{transport}: {type(error).__name__}: {error}")
        else:
            rate = report.num_bytes / report.seconds
            cost = f"{1000 * report.seconds:.0f} ms (proof {1000 * report.proof_seconds:.0f}, {mib(rate)}/s)"
            passed.append(f"{transport} {cost}")
            if bench is not None:
                bench.record(**{f"{transport}_push_seconds": report.seconds, f"{transport}_bytes_per_second": rate})
    require(not failed, "; ".join(failed))
    return f"pushed and verified: {', '.join(passed)}"


def _slices(model: nn.Module, version: int) -> Iterator[WeightSlice]:
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.mul_(1.0 + 0.01 * ((version + number) % 5))
            yield WeightSlice(name, tuple(parameter.shape), parameter.dtype, 0, parameter.detach().flatten())


def _logprob_difference(model: Any, vllm: Vllm, params: Mapping[str, Any], bench: Bench) -> float:
    """Return the largest log-prob difference over completions; MismatchError if it exceeds rounding.

    Log-probs are of the full softmax at the sampling temperature, whatever top_p leaves out.
    """
    prompts = [(3 + i, 4, 5, 6) for i in range(_NUM_PROMPTS)]
    requests = [
        Request(prompt, {"max_tokens": 16, "logprobs": 0, "ignore_eos": True, "seed": seed, **params})
        for seed, prompt in enumerate(prompts)
    ]
    temperature = params["temperature"] or 1.0
    differences = []
    for prompt, completion in zip(prompts, vllm.complete(requests, timeout=2 * _TIMEOUT_SECONDS), strict=True):
        ids = torch.tensor([[*prompt, *completion.ids]], device=bench.device)
        with torch.no_grad():
            logits_LV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        targets_L1 = torch.tensor(completion.ids, device=bench.device)[:, None]
        logprobs_L = logits_LV.log_softmax(-1).gather(-1, targets_L1)[:, 0]
        differences.append(float((logprobs_L.cpu() - torch.tensor(completion.logprobs)).abs().max()))
    difference = max(differences)
    require(
        difference <= _LOGPROB_TOLERANCE[model.dtype] / temperature,
        f"vLLM's log-probs at temperature {params['temperature']} differ by up to {difference:.1e} nats from the model's: it has "
        "other weights, or scores at another temperature",
    )
    return difference
