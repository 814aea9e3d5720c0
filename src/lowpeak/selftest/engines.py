"""Tests of vLLM: weights pushed over each transport, log-probs, sleep and wake-up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowpeak.arguments import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.ranks import Ranks
from lowpeak.records import WeightSlice
from lowpeak.selftest.models import make_model, make_tokenizer, mib
from lowpeak.selftest.table import Bench, require, row
from lowpeak.vllm import ColocatedModelSpec, ColocatedVllm, Request, ServerVllm, Vllm
from lowpeak.vllm.serving import CPU, ServerSpec, free_ports, running_server
from lowpeak.vllm.weight_sync import available_transports, loaded_version, push_weights, verify_unchanged

_CACHE = 64 << 20
_CONTEXT = 128
_NUM_IDS = 512
_TIMEOUT_SECONDS = 60.0  # of one call of another process
# Largest difference, in nats, of vLLM's and transformers' log-probs of the same weights: their kernels round differently.
_LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}


@row("vLLM, colocated", "vLLM", seconds=240)
def colocated_vllm(bench: Bench) -> str:
    """Push weights to a vLLM in this process and compare log-probs; put it to sleep, wake it and verify its weights."""
    model = _vllm_model(bench)
    on_gpu = bench.device.type == "cuda"
    where = ColocateSettings(gpu_memory_utilization=0.1, max_model_length=_CONTEXT, sleeps=on_gpu)
    dtype = str(model.dtype).removeprefix("torch.")
    model_spec = model.config, make_tokenizer(_NUM_IDS), type(model).__name__, dtype, bench.device
    spec = ColocatedModelSpec(*model_spec, kv_cache_bytes=_CACHE, trust_remote_code=False, seed=0)
    before = _used_bytes(bench)
    with closing(ColocatedVllm(spec, VllmSettings(where), Ranks(bench.device))) as vllm:
        results = [_push_and_compare(model, vllm, bench)]
        if on_gpu:
            awake, began = _used_bytes(bench), time.monotonic()
            vllm.sleep()
            asleep = _used_bytes(bench)
            vllm.wake()
            verify_unchanged([vllm])
            results.append(
                f"{mib(awake - before)} awake, {mib(asleep - before)} asleep, slept, woken and verified in "
                f"{time.monotonic() - began:.1f} s"
            )
    return "; ".join(results)


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


row("vLLM, server", "vLLM", seconds=240)(partial(vllm_server, gpu="0"))
row("vLLM, server on another GPU", "2 GPUs", "vLLM", seconds=240)(partial(vllm_server, gpu="1"))


def _vllm_model(bench: Bench) -> Any:
    dtype = bench.pick(torch.bfloat16, torch.float32)
    model = make_model(_NUM_IDS, 256, 2, (4, 2), context=_CONTEXT, tied=False, dtype=dtype)
    return model.to(bench.device).eval()


def _push_and_compare(model: Any, vllm: Vllm, bench: Bench) -> str:
    vllm.engine_info()
    vllm.call("lowpeak_score_at_temperature", {}, _TIMEOUT_SECONDS)
    pushed = push_over_each([vllm], lambda version: _slices(model, version), bench.device)
    return f"{pushed}; log-probs within {_logprob_difference(model, vllm, bench):.0e} of the model's"


def push_over_each(
    vllms: Sequence[Vllm],
    slices: Callable[[int], Iterable[WeightSlice]],
    device: torch.device,
) -> str:
    """Push `slices(version)` over each transport that reaches all workers, and verify the engines' weights.

    `slices` returns all weights of the (small) model that the engines loaded, on `device`, with other values for each version.
    MismatchError names the transports that failed, after all have been tried.
    """
    settings = VllmSettings(ServerSettings(()), bucket_bytes=1 << 20)
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
            passed.append(f"{transport} {1000 * report.seconds:.0f} ms (proof {1000 * report.proof_seconds:.0f})")
    require(not failed, "; ".join(failed))
    return f"pushed and verified: {', '.join(passed)}"


def _slices(model: Any, version: int) -> Iterator[WeightSlice]:
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.mul_(1.0 + 0.01 * ((version + number) % 5))
            yield WeightSlice(name, tuple(parameter.shape), parameter.dtype, 0, parameter.detach().flatten())


def _logprob_difference(model: Any, vllm: Vllm, bench: Bench) -> float:
    """Return the largest log-prob difference over a greedy completion; MismatchError if it exceeds rounding."""
    prompt = (3, 4, 5, 6)
    params = {"temperature": 0.0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True}
    completion = vllm.complete([Request(prompt, params)], timeout=2 * _TIMEOUT_SECONDS)[0]
    ids = torch.tensor([[*prompt, *completion.ids]], device=bench.device)
    with torch.no_grad():
        logits_LV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    targets_L1 = torch.tensor(completion.ids, device=bench.device)[:, None]
    logprobs_L = logits_LV.log_softmax(-1).gather(-1, targets_L1)[:, 0]
    difference = float((logprobs_L.cpu() - torch.tensor(completion.logprobs)).abs().max())
    require(
        difference <= _LOGPROB_TOLERANCE[model.dtype],
        f"vLLM's log-probs differ by up to {difference:.1e} nats from the model's, so its weights are not the model's",
    )
    return difference


def _used_bytes(bench: Bench) -> int:
    if bench.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(bench.device)
    return total - free
