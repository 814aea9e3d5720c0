"""Tests of memory on one device: a step against its rehearsal, loading, and a run within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import torch

from lowpeak.algorithms import make_supervised
from lowpeak.attention import install_attention
from lowpeak.batching import TokenBudget, pack
from lowpeak.heads import install_head
from lowpeak.journal import read_steps
from lowpeak.models import load_policy
from lowpeak.parallel import Strategy
from lowpeak.plan import RehearsalInputs, rehearse
from lowpeak.plan.rehearsal import FakeStrategy
from lowpeak.records import Completion, MicroBatch, Record
from lowpeak.selftest.models import even_share, make_model, mib
from lowpeak.selftest.runs import make_trainer
from lowpeak.selftest.table import Bench, require, row
from lowpeak.training import LogprobSettings, run_step

# Relative to the plan: operations allocate scratch memory, and a GPU's kernels differ from the rehearsed ones. The model is large
# enough that a further workspace of cuBLAS, 32 MiB, is within it.
_MEMORY_TOLERANCE = 0.15


@row("memory of a step", seconds=120)
def step_memory(bench: Bench) -> str:
    """Compare a step's peak memory with its rehearsal on fake tensors."""
    batches = _micro_batches(*bench.pick((256, 128, 8), (8, 8, 4)))
    core = LogprobSettings(1.0, bench.pick(256, 8), bench.device, log_entropy=False)
    on_cpu = replace(core, device=torch.device("cpu"))
    planned = rehearse(RehearsalInputs(partial(_policy, bench), batches, make_supervised(), on_cpu))
    # Without the weights and AdamW's states, which are not part of the measured peak.
    expected = planned.peak("forward", "backward") - 3 * planned.peak("load")
    model = _policy(bench).to(bench.device)
    run = partial(run_step, model, batches, make_supervised(), core, cast(Strategy, FakeStrategy()), {})
    run()  # allocates cuBLAS's workspaces (32 MiB per handle on Hopper), which stay
    model.zero_grad()
    measured = peak_of(run, bench)
    numbers = f"{mib(measured)} above the weights ({mib(expected)} planned)"
    bench.record(measured_bytes=measured, planned_bytes=expected)
    require(abs(measured - expected) <= _MEMORY_TOLERANCE * expected, f"a step takes {numbers}")
    return numbers


def _policy(bench: Bench) -> Any:
    """Return an fp32 model with head, attention and activation checkpointing as in a trainer."""
    model = make_model(*bench.pick((64_000, 1024, 12, (16, 4)), (64, 64, 2, (4, 2))), context=1024)
    install_head(model)
    install_attention(model)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def _micro_batches(prompt: int, tokens: int, count: int) -> list[MicroBatch]:
    """Pack one group with its prompt once, as a run does."""
    ids, mask = torch.full((tokens,), 3, dtype=torch.int32), torch.ones(tokens, dtype=torch.bool)
    completion = Completion(ids, torch.zeros(tokens), mask, "length")
    record = Record(0, (2,) * prompt, completion, (1.0,), 1.0, advantages=torch.ones(tokens))
    return pack([record] * count, range(count), TokenBudget(4096, layout="shared"), lambda num_tokens: 1.0 / num_tokens)


@row("loading")
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


@row("memory_budget", seconds=300, quick=True)
def memory_budget(bench: Bench) -> str:
    """Run two steps within a budget and compare the peaks; on a GPU, try to allocate more."""
    budget = bench.pick(8 << 30, psutil.Process().memory_info().rss + (2 << 30))
    model = make_model(*bench.pick((32_000, 512, 8, (8, 2)), (13, 32, 2, (4, 2))))
    # Sizes that are left out take a plan several times as long.
    sizes: dict[str, int | None] = bench.pick(
        {"kv_cache_bytes": None}, {"micro_batch_tokens": 512, "logprob_chunk_size": 64}
    )
    trainer = make_trainer(
        bench, "budget", model, even_share, max_steps=2, padding_free=False, memory_budget=budget, **sizes
    )
    planned = trainer.run.sizes.memory_budget
    require(planned == budget, f"sizes were planned for {planned} bytes, and the budget is {budget}")
    trainer.train()
    steps = read_steps(bench.folder / "budget" / "journal")
    peak = max(value for each in steps for name, value in each.items() if name.startswith("peak_memory/"))
    chosen = trainer.run.sizes
    bench.record(budget_bytes=budget, peak_bytes=peak, micro_batch_tokens=chosen.micro_batch_tokens)
    bench.record(kv_cache_bytes=chosen.kv_cache_bytes)
    require(peak <= budget, f"phases took up to {mib(peak)}, and the budget is {mib(budget)}")
    if bench.on_gpu:
        require(_is_refused(budget, bench.device), f"torch allocated the whole budget of {mib(budget)} a second time")
    return (
        f"at most {mib(peak)} of {mib(budget)}, with micro_batch_tokens {chosen.micro_batch_tokens} and "
        f"kv_cache_bytes {chosen.kv_cache_bytes}"
    )


def _is_refused(num_bytes: int, device: torch.device) -> bool:
    """Return whether torch raises an out-of-memory error for another tensor of this size."""
    try:
        torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return True
    return False


def peak_of(call: Callable[[], object], bench: Bench) -> int:
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
