"""Tests of one device: kernels against fp64 references, a step's memory against its rehearsal, loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from lowpeak.algorithms import make_supervised
from lowpeak.attention import attention_mismatch, install_attention
from lowpeak.batching import Budget, pack
from lowpeak.logprobs import ChunkSettings, HeadScale, fused_loss, install_head, naive_logprobs, triton_mismatch
from lowpeak.memory import rehearse
from lowpeak.models import load_policy
from lowpeak.parallel import FakeStrategy, Strategy
from lowpeak.records import Completion, MicroBatch, Record
from lowpeak.selftest.models import make_model, mib
from lowpeak.selftest.table import Bench, require, row
from lowpeak.training import LogprobSettings, run_step

_PLAIN = ChunkSettings(256)
_FULL = ChunkSettings(256, 0.7, HeadScale(0.8, 25.0), entropy=True, entropy_grad=True)
_CASES = {
    "fp32": (torch.float32, _PLAIN),
    "bf16": (torch.bfloat16, _PLAIN),
    "bf16, soft-cap and entropy": (torch.bfloat16, _FULL),
}
_GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative to their norm
_LOGPROB_TOLERANCE = 1e-3  # in nats; sums are fp32 in both dtypes
# Relative to the plan: operations allocate scratch memory, and a GPU's kernels differ from the rehearsed ones.
_MEMORY_TOLERANCE = 0.15

Head = tuple[Tensor, Tensor, Tensor]  # hidden [T, D], weight [V, D], targets [T]
Way = Callable[[Tensor, Tensor, Tensor, ChunkSettings], tuple[Tensor, Tensor]]


@row("log-prob kernels", "a GPU", "Triton")
def logprob_kernels(bench: Bench) -> str:
    """Compare the Triton kernels with torch operations."""
    reason = triton_mismatch(bench.device)
    require(reason is None, f"the kernels cannot be used: {reason}")
    return "statistics and gradients equal those of torch operations"


@row("log-prob core", "a GPU", seconds=90)
def logprob_core(bench: Bench) -> str:
    """Compare the fused head's log-probs and gradients with fp64, and its time and peak memory with full logits."""
    torch.manual_seed(0)
    return "; ".join(f"{name}: {_compare_head(bench, *case)}" for name, case in _CASES.items())


def _compare_head(bench: Bench, dtype: torch.dtype, settings: ChunkSettings) -> str:
    width, num_ids = bench.pick((1024, 151_936), (32, 5_003))
    num_tokens = bench.pick(1024, 16)
    hidden_TD = torch.randn(num_tokens, width, device=bench.device).to(dtype)
    weight_VD = (torch.randn(num_ids, width, device=bench.device) * 3 / width**0.5).to(dtype)
    targets_T = torch.randint(num_ids, (num_tokens,), device=bench.device)
    logprobs, gradients = _gradients(_fused, (hidden_TD[:64], weight_VD, targets_T[:64]), settings)
    wide = (hidden_TD[:64].double(), weight_VD.double(), targets_T[:64])
    exact, expected = _gradients(_full_logits, wide, settings)
    logprob_error = float((logprobs - exact).abs().max())
    gradient_error = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, expected, strict=True))
    require(logprob_error <= _LOGPROB_TOLERANCE, f"log-probs in {dtype} have an error of {logprob_error:.1e} nats")
    require(
        gradient_error <= _GRADIENT_TOLERANCE[dtype],
        f"gradients in {dtype} have a relative error of {gradient_error:.1e}",
    )
    del wide, exact, expected, gradients
    inputs = (hidden_TD, weight_VD, targets_T)
    calls = [partial(_gradients, way, inputs, settings) for way in (_fused, _full_logits)]
    costs = [f"{_milliseconds(call, bench):.1f} ms and {mib(_peak_of(call, bench))}" for call in calls]
    return f"log-probs within {logprob_error:.0e}, gradients {gradient_error:.0e}, {costs[0]} (full logits {costs[1]})"


def _gradients(way: Way, head: Head, settings: ChunkSettings) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probs of an implementation, and its gradients by hidden states and weight."""
    leaves = [x.detach().requires_grad_() for x in head[:2]]
    loss, logprobs_T = way(leaves[0], leaves[1], head[2], settings)
    return logprobs_T.detach(), list(torch.autograd.grad(loss, leaves))


def _fused(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkSettings) -> tuple[Tensor, Tensor]:
    def loss_of(*values: Any) -> Tensor:
        return _loss(values[0], values[1], settings)

    loss, logprobs_T, _ = fused_loss(hidden_TD, weight_VD, None, targets_T, loss_of, settings)
    return loss, logprobs_T


def _full_logits(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, settings: ChunkSettings
) -> tuple[Tensor, Tensor]:
    logprobs_T, entropy_T = naive_logprobs(hidden_TD, weight_VD, None, targets_T, settings.temperature, settings.scale)
    return _loss(logprobs_T, entropy_T, settings), logprobs_T


def _loss(logprobs_T: Tensor, entropy_T: Tensor | None, settings: ChunkSettings) -> Tensor:
    loss = -logprobs_T.sum()
    return loss - entropy_T.sum() if settings.entropy_grad and entropy_T is not None else loss


@row("FlexAttention", "a GPU", seconds=180)
def forest_attention(bench: Bench) -> str:
    """Compare attention over sequences with shared prompts with a dense mask in fp64, forward and backward."""
    cases = ((torch.bfloat16, 128, 7), (torch.float32, 64, 2))
    for case in cases:
        reason = attention_mismatch(case[0], bench.device, *case[1:])
        require(reason is None, str(reason))
    return "values and gradients equal those of a dense mask in bf16 (head size 128) and fp32 (head size 64)"


@row("memory of a step", "a GPU", seconds=120)
def step_memory(bench: Bench) -> str:
    """Compare a step's peak memory with its rehearsal on fake tensors."""
    batches = _micro_batches(*bench.pick((256, 128, 8), (8, 8, 4)))
    core = LogprobSettings(1.0, bench.pick(256, 8), bench.device, log_entropy=False)
    planned = rehearse(partial(_policy, bench), batches, make_supervised(), replace(core, device=torch.device("cpu")))
    # Without the weights and AdamW's states, which are not part of the measured peak.
    expected = planned.peak("forward", "backward") - 3 * planned.peak("load")
    model = _policy(bench).to(bench.device)
    run = partial(run_step, model, batches, make_supervised(), core, cast(Strategy, FakeStrategy()), {})
    run()
    model.zero_grad()
    measured = _peak_of(run, bench)
    numbers = f"{mib(measured)} above the weights ({mib(expected)} planned)"
    require(abs(measured - expected) <= _MEMORY_TOLERANCE * expected, f"a step takes {numbers}")
    return numbers


def _policy(bench: Bench) -> Any:
    """Return an fp32 model with head, attention and activation checkpointing as in a trainer."""
    model = make_model(*bench.pick((32_000, 512, 8, (8, 2)), (64, 64, 2, (4, 2))), context=1024)
    install_head(model)
    install_attention(model)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def _micro_batches(prompt: int, tokens: int, count: int) -> list[MicroBatch]:
    """Pack one group with its prompt once, as a run does."""
    ids, mask = torch.full((tokens,), 3, dtype=torch.int32), torch.ones(tokens, dtype=torch.bool)
    completion = Completion(ids, torch.zeros(tokens), mask, "length")
    record = Record(0, (2,) * prompt, completion, (1.0,), 1.0, advantages=torch.ones(tokens))
    return pack([record] * count, range(count), Budget(4096, layout="shared"), lambda num_tokens: 1.0 / num_tokens)


@row("loading", "a GPU")
def loading(bench: Bench) -> str:
    """Load a policy from a folder into the device's memory."""
    saved = make_model(*bench.pick((64_000, 1024, 8), (64, 64, 2)), dtype=torch.bfloat16)
    saved.save_pretrained(bench.folder / "model")
    policy = load_policy(str(bench.folder / "model"), device=bench.device)
    on_device = [p.device.type == bench.device.type for p in policy.parameters()]
    require(all(on_device), f"{on_device.count(False)} of {len(on_device)} weights are not on the device")
    same = all(torch.equal(a.cpu(), b) for a, b in zip(policy.parameters(), saved.parameters(), strict=True))
    require(same, "the weights differ from those of the file")
    return f"{mib(sum(p.nbytes for p in policy.parameters()))} on the device, equal to the file"


def _milliseconds(call: Callable[[], object], bench: Bench) -> float:
    """Return the mean time of a synchronised call in ms, after two warm-up calls."""
    timer = Timer("call()", globals={"call": call})
    timer.timeit(2)
    return 1000 * timer.timeit(bench.pick(10, 1)).mean


def _peak_of(call: Callable[[], object], bench: Bench) -> int:
    """Return the peak bytes of tensors during a call, above those allocated before."""
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
        before = torch.cuda.memory_allocated(bench.device)
        call()
        return torch.cuda.max_memory_allocated(bench.device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events: Any = profile.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change.start_ns())
    return max(accumulate((change.nbytes() for change in changes), initial=0))
