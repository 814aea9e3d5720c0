"""Tests of memory that is moved to the host: each offload against a run without it, and two of them at 1B parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowpeak.journal import read_steps
from lowpeak.memory import AsyncHostMover, has_device_memory, offload_frozen
from lowpeak.parallel import decoder_layers
from lowpeak.selftest.kernels import milliseconds
from lowpeak.selftest.memory import peak_of
from lowpeak.selftest.models import make_model, mib
from lowpeak.selftest.runs import make_trainer, same_run
from lowpeak.selftest.table import Bench, require, row

_OFFLOADS: dict[str, dict[str, Any]] = {
    "activation_offloading": {"gradient_checkpointing": True},
    "offload_during_rollout": {},
    "offload_frozen_models": {"beta": 0.1},
    # Gradients of the embedding are added in another order, and their norm is computed on the host.
    "offload_optimizer": {"weight_bits": 32, "gradient_bits": 32, "tolerance": 1e-2},
}

_LARGE = {"num_ids": 32_000, "hidden": 2048, "layers": 16, "heads": (16, 4)}
_SMALL = {"num_ids": 64, "hidden": 64}


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
    shape: dict[str, Any] = bench.pick(_LARGE, _SMALL)
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


@row("offload_frozen_models at 1B", seconds=300, in_default_run=False)
def large_frozen(bench: Bench) -> str:
    """Time forwards of a 1B model on the device, and with its weights in host memory."""
    shape: dict[str, Any] = bench.pick(_LARGE, _SMALL)
    tokens = bench.pick(8192, 16)
    with bench.device:
        model = make_model(**shape, context=tokens, dtype=torch.bfloat16).requires_grad_(False).eval()
        ids_BL = torch.arange(tokens)[None] % shape["num_ids"]

    def forward() -> Tensor:
        logits: Tensor = model(input_ids=ids_BL, use_cache=False, logits_to_keep=1).logits
        return logits

    expected, resident_ms = forward(), milliseconds(forward, bench)
    weights = sum(p.nbytes for p in model.parameters())
    if has_device_memory(bench.device):
        offload_frozen(model, decoder_layers(model), AsyncHostMover(bench.device))
    require(forward().equal(expected), "a model in host memory computes other logits than on the device")
    offloaded_ms, peak = milliseconds(forward, bench), peak_of(forward, bench)
    bench.record(resident_ms=resident_ms, offloaded_ms=offloaded_ms, weight_bytes=weights, peak_bytes=peak)
    return (
        f"a forward of {tokens} tokens takes {offloaded_ms:.1f} ms ({resident_ms:.1f} ms with its {mib(weights)} on the "
        f"device), at most {mib(peak)} of the device"
    )


def _alternate(completion_ids: Any, **columns: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completion_ids))]
