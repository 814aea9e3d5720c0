"""Tests of memory that is moved to the host: each offload against a run without it, and the optimizer's at 1B parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lowpeak.journal import read_steps
from lowpeak.selftest.models import make_model, mib
from lowpeak.selftest.runs import make_trainer, same_run
from lowpeak.selftest.table import Bench, row

_OFFLOADS: dict[str, dict[str, Any]] = {
    "activation_offloading": {"gradient_checkpointing": True},
    "offload_during_rollout": {},
    "offload_frozen_models": {"beta": 0.1},
    # Gradients of the embedding are added in another order, and their norm is computed on the host.
    "offload_optimizer": {"weight_bits": 32, "gradient_bits": 32, "tolerance": 1e-2},
}


def offloaded_run(bench: Bench, flag: str) -> str:
    """Compare a run that offloads with one that does not."""
    # Activations are a large part of the memory only in long sequences.
    longer = {"max_completion_length": bench.pick(256, 7)} if flag == "activation_offloading" else {}
    return same_run(bench, {flag: True}, **_OFFLOADS[flag], **longer)


for _flag in _OFFLOADS:
    row(_flag, seconds=120)(partial(offloaded_run, flag=_flag))


@row("offload_optimizer at 1B", seconds=300, in_default_run=False)
def large_optimizer(bench: Bench) -> str:
    """Time micro-batches and optimizer steps of a 1B model whose gradients and states are in host memory."""
    shape: dict[str, Any] = bench.pick(
        {"num_ids": 32_000, "hidden": 2048, "layers": 16, "heads": (16, 4)}, {"num_ids": 64, "hidden": 64}
    )
    with bench.device:
        model = make_model(**shape, context=512, dtype=torch.bfloat16)
    size = sum(parameter.numel() for parameter in model.parameters())
    changes = {"max_steps": 3, "weight_bits": 32, "offload_optimizer": True, "padding_free": False}
    trainer = make_trainer(bench, "large", model, _alternate, micro_batch_tokens=128, **changes)
    batches: list[None] = []
    model.model.layers[0].register_forward_pre_hook(
        lambda *_: batches.append(None) if torch.is_grad_enabled() else None
    )
    trainer.train()
    last = read_steps(bench.folder / "large" / "journal")[-1]
    train, optimizer = 3 * last["time/train"] / len(batches), last["time/optimizer"]
    threads, peak = torch.get_num_threads(), last["peak_memory/train"]
    bench.record(parameters=size, micro_batch_seconds=train, optimizer_seconds=optimizer, threads=threads)
    bench.record(train_peak_bytes=peak)
    return (
        f"{size / 1e9:.2f}B parameters: {train:.2f} s per micro-batch, {optimizer:.2f} s per optimizer step, "
        f"{threads} host threads, {mib(peak)} on the device"
    )


def _alternate(completion_ids: Any, **columns: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completion_ids))]
