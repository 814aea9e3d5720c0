"""Rows about memory: a step's peak beside its plan, what waits in host memory, where weights are read to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowpeak.algorithms.supervised import make_supervised
from lowpeak.attention.install import install_attention
from lowpeak.batching.packing import Budget, pack
from lowpeak.logprobs.head import install_head
from lowpeak.memory.offload import LEAST_BYTES, ActivationOffload, DeviceMover, Mover
from lowpeak.memory.rehearsal import rehearse
from lowpeak.records import Completion, MicroBatch, Record
from lowpeak.selftest.measure import distance, mib, milliseconds, peak_of
from lowpeak.selftest.models import make_model
from lowpeak.selftest.table import Bench, require, row
from lowpeak.strategies.pretended import Pretended
from lowpeak.strategies.strategy import Strategy
from lowpeak.training.models import load_policy
from lowpeak.training.step import Core, run_step

_PLAN_APART = 0.15  # of the plan: operations take scratch inside, and a GPU's kernels are others than those rehearsed
_SLACK = 64 << 20  # bytes of the host that a library may take at any time
_GRADIENTS_APART = 1e-5  # of their norm: a GPU may add in another order each time


@row("memory of a step", "a GPU", seconds=120)
def step_memory(bench: Bench) -> str:
    """Compare a step's peak with its rehearsal on fake tensors, and with whole logits of rows side by side."""
    batches, core = _micro_batches(bench), _core(bench)
    planned = rehearse(partial(_policy, bench), batches, make_supervised(), replace(core, device=torch.device("cpu")))
    model = _policy(bench).to(bench.device)
    states = 2 * planned.loaded  # AdamW's, which the rehearsal has and this model has not
    expected = planned.train - planned.loaded - states
    measured, naive = (
        _warm_peak(call, model, bench)
        for call in (lambda: _run_step(model, batches, core), lambda: _plain_step(model, bench))
    )
    told = f"{mib(measured)} above the weights ({mib(expected)} planned, {mib(naive)} with whole logits)"
    require(abs(measured - expected) <= _PLAN_APART * expected, f"a step takes {told}")
    return told


def _warm_peak(call: Callable[[], object], model: nn.Module, bench: Bench) -> int:
    """Return the most bytes that a second call takes, without gradients before it."""
    call()
    model.zero_grad()
    peak = peak_of(call, bench.device)[1]
    model.zero_grad()
    return peak


@row("activation offload", "a GPU", seconds=90)
def activation_offload(bench: Bench, mover: Mover | None = None) -> str:
    """Compare a step whose activations wait in host memory with one whose activations stay: gradients, peak, time."""
    batches, core = _micro_batches(bench), _core(bench)
    model = _policy(bench).to(bench.device)
    offload = ActivationOffload(model, mover or DeviceMover(bench.device), bench.pick(LEAST_BYTES, 1))
    cores = core, replace(core, saving=offload.saving)
    stays, leaves = (_warm_peak(partial(_run_step, model, batches, each), model, bench) for each in cores)
    gradients, times = [], []
    for each in cores:
        _run_step(model, batches, each)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        times.append(milliseconds(partial(_run_step, model, batches, each), bench.pick(5, 1)))
        model.zero_grad()
    offload.bytes_away = 0
    _run_step(model, batches, cores[1])
    apart = distance(gradients[1], gradients[0])
    require(offload.bytes_away > 0, "nothing left the device")
    require(apart <= _GRADIENTS_APART, f"gradients are {apart:.1e} of their size apart")
    return (
        f"{mib(offload.bytes_away)} left and came back, gradients {apart:.0e} apart, peak {mib(leaves)} ({mib(stays)} "
        f"without), {times[1]:.0f} ms ({times[0]:.0f})"
    )


@row("loading", "a GPU")
def loading(bench: Bench) -> str:
    """Read a policy from a folder into the device's memory, and watch the host's."""
    saved = make_model(*bench.pick((64_000, 1024, 8), (64, 64, 2)), dtype=torch.bfloat16)
    saved.save_pretrained(bench.folder / "model")
    for _ in range(2):  # the first takes what every later one finds: libraries, the device's context
        before, peak, policy, seconds = _watched(lambda: _read_policy(bench))
    read = sum(p.numel() * p.element_size() for p in policy.parameters())
    found = [p.device.type == bench.device.type for p in policy.parameters()]
    require(all(found), f"{found.count(False)} of {len(found)} weights are not on the device")
    same = all(torch.equal(a.cpu(), b) for a, b in zip(policy.parameters(), saved.parameters(), strict=True))
    require(same, "the weights are not those of the file")
    require(peak - before <= read / 2 + _SLACK, f"the host's own memory grew by {mib(peak - before)} for {mib(read)}")
    return f"{mib(read)} in {seconds:.1f} s, the host's own memory grew by {mib(peak - before)} at most"


def _read_policy(bench: Bench) -> nn.Module:
    return load_policy(str(bench.folder / "model"), None, trust_remote_code=False, device=bench.device)


def _watched(call: Callable[[], nn.Module]) -> tuple[int, int, nn.Module, float]:
    """Call; return the process's anonymous bytes before it, the most during it, the result and the seconds."""
    seen, over = [_anonymous_bytes()], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            seen.append(_anonymous_bytes())

    watch, began = threading.Thread(target=look, daemon=True), time.perf_counter()
    watch.start()
    try:
        result = call()
    finally:
        over.set()
        watch.join()
    return seen[0], max(seen), result, time.perf_counter() - began


def _anonymous_bytes() -> int:
    """Return the resident bytes of this process that are no file's pages."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _core(bench: Bench) -> Core:
    return Core(1.0, bench.pick(256, 8), bench.device, log_entropy=False)


def _policy(bench: Bench) -> Any:
    """Make a model in fp32 with head, attention and activation checkpointing as a trainer leaves it."""
    model = make_model(*bench.pick((32_000, 512, 8, (8, 2)), (64, 64, 2, (4, 2))), context=1024)
    install_head(model)
    install_attention(model)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def _sizes(bench: Bench) -> tuple[int, int, int]:
    """Return the tokens of a prompt, those of a completion, and the completions."""
    return bench.pick((256, 128, 8), (8, 8, 4))


def _micro_batches(bench: Bench) -> list[MicroBatch]:
    """Pack one group, its prompt once, as a run packs it."""
    prompt, tokens, count = _sizes(bench)
    ids, mask = torch.full((tokens,), 3, dtype=torch.int32), torch.ones(tokens, dtype=torch.bool)
    completion = Completion(ids, torch.zeros(tokens), mask, "length")
    record = Record(0, (2,) * prompt, completion, (1.0,), 1.0, advantages=torch.ones(tokens))
    return pack([record] * count, range(count), Budget(4096, layout="shared"), lambda num_tokens: 1.0 / num_tokens)


def _run_step(model: Any, batches: list[MicroBatch], core: Core) -> None:
    """Run station 11 on one device."""
    run_step(model, batches, make_supervised(), core, cast(Strategy, Pretended()), {})


def _plain_step(model: Any, bench: Bench) -> None:
    """Run the same rows side by side through transformers' own loss."""
    prompt, tokens, count = _sizes(bench)
    ids = torch.full((count, prompt + tokens), 3, device=bench.device)
    labels: Tensor = ids.clone()
    labels[:, :prompt] = -100
    model(input_ids=ids, labels=labels).loss.backward()
