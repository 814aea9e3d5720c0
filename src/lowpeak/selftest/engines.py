"""Rows about engines, and about what travels between processes: the native engine, transports, NCCL, vLLM."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowpeak.config.rollout import Sampling
from lowpeak.config.vllm import ColocateSettings, ServerSettings, VllmSettings
from lowpeak.ranks import Ranks
from lowpeak.records import Prompt, WeightSlice
from lowpeak.rollout.native.engine import NativeEngine
from lowpeak.rollout.vllm.colocated import Blueprint, ColocatedVllm
from lowpeak.rollout.vllm.command import CPU, Server
from lowpeak.rollout.vllm.ports import free_ports
from lowpeak.rollout.vllm.process import served
from lowpeak.rollout.vllm.server import ServerVllm
from lowpeak.rollout.vllm.vllm import Request, Vllm
from lowpeak.rollout.vllm.weights.buckets import Bucket, read_sums
from lowpeak.rollout.vllm.weights.checksum import Checksum
from lowpeak.rollout.vllm.weights.push import held_version, prove, push
from lowpeak.rollout.vllm.weights.transports.choose import open_inlet, reaching
from lowpeak.rollout.vllm.weights.transports.tcp import TcpSender
from lowpeak.rollout.vllm.weights.transports.transport import Inlet, Sender
from lowpeak.selftest.measure import mib
from lowpeak.selftest.models import make_model, make_tokenizer
from lowpeak.selftest.table import Bench, require, row

_CACHE = 64 << 20
_CONTEXT = 128
_NUM_IDS = 512
_SECONDS = 60.0  # for one answer of another process
# How far vLLM's log-probs may be from transformers' of the same weights, in nats: other kernels round otherwise.
_LOGPROBS_APART = {torch.float32: 1e-3, torch.bfloat16: 0.2}


@row("native engine", "a GPU", seconds=90)
def native_engine(bench: Bench) -> str:
    """Compare greedy tokens with a CPU's, and time sampling with a model of half a billion parameters."""
    model = make_model(_NUM_IDS, 256, 4, (4, 2), context=_CONTEXT, init=0.2).eval()
    prompts = [Prompt(i, tuple(range(3, 6 + i)), "") for i in range(16)]
    greedy = Sampling(num_generations=1, max_new_tokens=32, temperature=0.0)
    expected, _ = _generate(model, prompts, greedy)
    found, _ = _generate(model.to(bench.device), prompts, greedy)
    alike = sum(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Two logits may be so near to each other that a sum in another order swaps them.
    require(alike >= len(prompts) - 1, f"{len(prompts) - alike} of {len(prompts)} greedy completions are not a CPU's")
    num_ids, hidden, layers, heads = bench.pick((151_936, 896, 24, (14, 2)), (64, 64, 2, (4, 4)))
    with bench.device:
        large = make_model(num_ids, hidden, layers, heads, context=1024, dtype=torch.bfloat16)
    long = [Prompt(i, (3,) * bench.pick(256, 8), "") for i in range(bench.pick(8, 2))]
    sampling = Sampling(num_generations=8, max_new_tokens=bench.pick(128, 4))
    _generate(large.eval(), long, replace(sampling, max_new_tokens=2))
    tokens, seconds = _generate(large, long, sampling)
    speed = sum(len(ids) for ids in tokens) / seconds
    return f"{alike} of {len(prompts)} greedy completions are a CPU's; {len(tokens)} rows: {speed:,.0f} tokens/s"


def _generate(model: Any, prompts: list[Prompt], sampling: Sampling) -> tuple[list[Tensor], float]:
    """Return each completion's ids, on the host, and the seconds that they took."""
    engine = NativeEngine(lambda: nullcontext(model), make_tokenizer(), lambda: 1 << 32)
    engine.load([], 0)
    began = time.perf_counter()
    groups = engine.generate(prompts, sampling)
    return [each.ids for group in groups for each in group.completions], time.perf_counter() - began


@row("weight transports", "a GPU", seconds=90)
def weight_transports(bench: Bench) -> str:
    """Send bytes of the device's to another process over the transport that needs no vLLM, TCP."""
    size, makers = bench.pick(256 << 20, 1 << 20), dict[str, Callable[[], Sender]]()
    makers["tcp"] = lambda: TcpSender(size, loopback=True, timeout=_SECONDS)
    values = torch.randint(256, (size,), dtype=torch.uint8, device=bench.device)
    expected, speeds = _checksum(values), []
    with multiprocessing.get_context("spawn").Pool(1) as other:
        for name, make in makers.items():
            sums: list[str] = []
            with closing(make()) as sender:
                other.apply_async(_open, ({**sender.invitation(), "first_rank": 0}, bench.device)).get(_SECONDS)
                sender.joined()
                began = time.perf_counter()
                bucket = Bucket((), sender.buffer(bench.device).copy_(values))
                sender.deliver(bucket, partial(_ask, other, sums))
                speeds.append(f"{name} {size / (time.perf_counter() - began) / 1e9:.1f} GB/s")
            require(sums == [expected], f"other bytes arrived over {name}")
    return f"{mib(size)} arrived as they were: {', '.join(speeds)}"


def _ask(other: Any, sums: list[str], where: Mapping[str, Any]) -> None:
    """Let the other process read the bytes, and note their checksum."""
    sums.append(other.apply_async(_read, (dict(where),)).get(_SECONDS))


class _Other:
    """The other process's end of the transport that is open, and its device."""

    inlet: Inlet
    device: torch.device


def _open(invitation: Mapping[str, Any], device: torch.device) -> None:
    _Other.inlet, _Other.device = open_inlet(invitation, device, 0), device


def _read(where: Mapping[str, Any]) -> str:
    try:
        return _checksum(_Other.inlet.read(where).to(_Other.device))
    finally:
        _Other.inlet.close()


def _checksum(data: Tensor) -> str:
    total = Checksum(len(data), data.device)
    total.add(0, data)
    return read_sums({"": total.value()})[""]


@row("NCCL", "2 GPUs")
def collectives(bench: Bench) -> str:
    """Add up and gather a tensor over two GPUs, and time both."""
    port, count = free_ports(1)[0], bench.pick(64 << 20, 1 << 10)
    with multiprocessing.get_context("spawn").Pool(2) as ranks:
        told = ranks.starmap(_meet, [(rank, port, bench.device.type, count) for rank in range(2)], chunksize=1)
    require(all(right for right, _ in told), "a sum or a gathered tensor over two ranks is wrong")
    reduce, gather = (4 * count / seconds / 1e9 for seconds in told[0][1])
    return f"{mib(4 * count)} of each of 2 ranks: all-reduce {reduce:.1f} GB/s, all-gather {gather:.1f} GB/s"


def _meet(rank: int, port: int, kind: str, count: int) -> tuple[bool, tuple[float, float]]:
    """Be one of two ranks: whether both collectives gave what they must, and the seconds of each."""
    from accelerate import Accelerator

    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    accelerator = Accelerator(cpu=kind == "cpu")
    own = torch.full((count,), rank + 1.0, device=accelerator.device)
    seconds, results = [], []
    for call in (accelerator.reduce, accelerator.gather):
        call(own.clone())
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        results.append(call(own.clone()))
        float(results[-1][-1])  # waits for it
        seconds.append(time.perf_counter() - began)
    expected = torch.tensor([1.0, 2.0]).repeat_interleave(count)
    right = bool((results[0] == 3).all()) and torch.equal(results[1].cpu(), expected)
    accelerator.end_training()
    return right, (seconds[0], seconds[1])


@row("vLLM, colocated", "vLLM", seconds=240)
def colocated_vllm(bench: Bench) -> str:
    """Push weights to a vLLM of this process, compare log-probs; let it sleep and wake, and prove its weights."""
    model = _vllm_model(bench)
    on_gpu = bench.device.type == "cuda"
    where = ColocateSettings(gpu_memory_utilization=0.1, max_model_length=_CONTEXT, sleeps=on_gpu)
    dtype = str(model.dtype).removeprefix("torch.")
    made_for = model.config, make_tokenizer(_NUM_IDS), type(model).__name__, dtype, bench.device
    blueprint = Blueprint(*made_for, kv_cache_bytes=_CACHE, trust_remote_code=False, seed=0)
    before = _used_bytes(bench)
    with closing(ColocatedVllm(blueprint, VllmSettings(where), Ranks(bench.device))) as vllm:
        told = [_try(model, vllm, bench)]
        if on_gpu:
            awake, began = _used_bytes(bench), time.monotonic()
            vllm.sleep()
            asleep = _used_bytes(bench)
            vllm.wake()
            prove([vllm])
            told.append(
                f"awake {mib(awake - before)}, asleep {mib(asleep - before)} are left behind, slept, woken and proved in "
                f"{time.monotonic() - began:.1f} s"
            )
    return "; ".join(told)


@row("vLLM, server", "vLLM", seconds=240)
def vllm_server(bench: Bench) -> str:
    """Push weights to a vLLM server of the same device, and compare log-probs."""
    return _try_server(bench, ("0",) if bench.device.type == "cuda" else (CPU,))


@row("vLLM, server on another GPU", "2 GPUs", "vLLM", seconds=240)
def vllm_server_apart(bench: Bench) -> str:
    """Push weights to a vLLM server of the second GPU, by NCCL too, and compare log-probs."""
    return _try_server(bench, ("1",))


def _try_server(bench: Bench, devices: tuple[str, ...]) -> str:
    model, folder = _vllm_model(bench), bench.folder / "model"
    model.save_pretrained(folder)
    make_tokenizer(_NUM_IDS).save_pretrained(folder)
    sizes = ("--max-model-len", str(_CONTEXT), "--gpu-memory-utilization", "0.1")
    options = (*sizes, "--kv-cache-memory-bytes", str(_CACHE), "--enforce-eager")
    dtype = str(model.dtype).removeprefix("torch.")
    server = Server(str(folder), port=free_ports(1)[0], devices=devices, dtype=dtype, options=options)
    with served(server, bench.folder / "server.log"):
        return _try(model, ServerVllm(server.url, server.token), bench)


def _vllm_model(bench: Bench) -> Any:
    dtype = bench.pick(torch.bfloat16, torch.float32)
    model = make_model(_NUM_IDS, 256, 2, (4, 2), context=_CONTEXT, tied=False, dtype=dtype)
    return model.to(bench.device).eval()


def _try(model: Any, vllm: Vllm, bench: Bench) -> str:
    """Push weights over each transport, and compare the log-probs of what vLLM writes with the last ones."""
    vllm.facts()
    vllm.workers.call("lowpeak_score_at_temperature", {})
    pushed = push_over_each([vllm], lambda version: _slices(model, version), bench.device)
    return f"{pushed}; log-probs within {_logprobs_apart(model, vllm, bench):.0e} of the model's"


def push_over_each(
    vllms: Sequence[Vllm],
    slices: Callable[[int], Iterable[WeightSlice]],
    device: torch.device,
    timeout: float = _SECONDS,
) -> str:
    """Push `slices(version)` over each transport that reaches all workers, other values for each version, and prove them.

    `slices` gives all weights of the (small) model that the engines loaded, with values on `device`. All transports are tried
    before MismatchError names those that failed.
    """
    settings = VllmSettings(ServerSettings(()), bucket_bytes=1 << 20)
    worked, failed = [], []
    for version, transport in enumerate(reaching(vllms, device, timeout), 1):
        try:
            report = push(slices(version), vllms, replace(settings, transport=transport), version, timeout=timeout)
            prove(vllms, timeout)
            require(held_version(vllms, timeout) == version, "the engines do not hold the version that was pushed")
        except Exception as error:
            failed.append(f"{transport}: {type(error).__name__}: {error}")
        else:
            worked.append(f"{transport} {1000 * report.seconds:.0f} ms (proof {1000 * report.proof_seconds:.0f})")
    require(not failed, "; ".join(failed))
    return f"pushed and proved: {', '.join(worked)}"


def _slices(model: Any, version: int) -> Iterator[WeightSlice]:
    """Give the model's weights, other values for each version."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.mul_(1.0 + 0.01 * ((version + number) % 5))
            yield WeightSlice(name, tuple(parameter.shape), parameter.dtype, 0, parameter.detach().flatten())


def _logprobs_apart(model: Any, vllm: Vllm, bench: Bench) -> float:
    """Return the largest difference of log-probs of what vLLM writes; MismatchError if rounding does not explain it."""
    prompt = (3, 4, 5, 6)
    params = {"temperature": 0.0, "max_tokens": 16, "logprobs": 0, "ignore_eos": True}
    said = vllm.complete([Request(prompt, params)], timeout=2 * _SECONDS)[0]
    ids = torch.tensor([[*prompt, *said.ids]], device=bench.device)
    with torch.no_grad():
        logits_LV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    targets_L1 = torch.tensor(said.ids, device=bench.device)[:, None]
    logprobs_L = logits_LV.log_softmax(-1).gather(-1, targets_L1)[:, 0]
    apart = float((logprobs_L.cpu() - torch.tensor(said.logprobs)).abs().max())
    allowed = _LOGPROBS_APART[model.dtype]
    require(
        apart <= allowed,
        f"vLLM's log-probs are up to {apart:.1e} nats from the model's: its weights are not the model's",
    )
    return apart


def _used_bytes(bench: Bench) -> int:
    """Return the bytes in use on the device, by whichever process."""
    if bench.device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(bench.device)
    return total - free
