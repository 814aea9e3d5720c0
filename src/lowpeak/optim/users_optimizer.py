"""Optimizers that the user chose, on bf16 weights: the share of updates that they round away, and states in their dtypes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowpeak.optim.gradient_sums import flat_part

logger = logging.getLogger(__name__)

_SAMPLE = 1 << 20  # weights
_NEGLIGIBLE = 0.01  # share of updates
# Mean magnitude of AdamW's updates over the learning rate, measured over GRPO runs of the learning task. Normal numbers have this
# mean if their standard deviation is sqrt(pi / 2) times as large.
_UPDATE_SIZE = 0.27 * math.sqrt(math.pi / 2)


@torch.no_grad()
def lost_share(weights: Iterable[tuple[Tensor, float]]) -> float | None:
    """Return the share of updates that nearest rounding of bf16 weights loses; None without such weights.

    `weights` are tensors with their learning rates. For up to 2**20 weights w, evenly over all tensors, and updates u of AdamW's
    size: 1 - sum(u * (bf16(w + u) - w)) / sum(u * u). Tensors of other dtypes are skipped, and shards count alone.
    """
    flat = [(flat_part(tensor), rate) for tensor, rate in weights if tensor.dtype == torch.bfloat16]
    stride = max(1, -(-sum(values.numel() for values, _ in flat) // _SAMPLE))
    generator, first = torch.Generator().manual_seed(0), 0
    applied = exact = 0.0
    for values, rate in flat:
        sample = values[first::stride].float().cpu()
        first = (first - values.numel()) % stride
        updates = torch.randn(len(sample), generator=generator) * (_UPDATE_SIZE * rate)
        moved = (sample + updates).bfloat16().float() - sample
        applied += float(updates.double() @ moved.double())
        exact += float(updates.double().square().sum())
    return max(0.0, 1 - applied / exact) if exact else None


def _rate(group: Mapping[str, Any]) -> float:
    # A schedule may start at a rate of 0; `initial_lr` is the one that it scales.
    return float(group.get("initial_lr") or group["lr"] or 0)


def warn_of_lost_updates(optimizer: Any) -> None:
    """Warn of updates that a torch optimizer will lose, from 1 % on.

    None are lost by an optimizer that trains no bf16 weights, or does not round to nearest.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if getattr(inner, "bf16_stochastic_round", False):  # torchao's optimizers
        return
    groups = [(group, _rate(group)) for group in inner.param_groups if not _sums_exactly(group)]
    trained = [(parameter, rate) for group, rate in groups for parameter in group["params"]]
    share = lost_share(trained)
    if share is None or share < _NEGLIGIBLE:
        return
    rates = " and ".join(f"{rate:g}" for rate in sorted({rate for _, rate in trained}))
    logger.warning(
        "%s rounds bf16 weights to nearest: of updates as large as AdamW's, %.1f %% are lost at learning rate %s. Train without "
        "optim and without an optimizer of your own: AdamW with weight_bits=32 keeps the bf16 weights and loses nothing.",
        type(inner).__name__,
        100 * share,
        rates,
    )


@contextmanager
def loading_states(optimizer: Any) -> Iterator[None]:
    """Keep the dtypes of the states that the block loads; ValueError for parameter groups of another optimizer.

    torch would convert fp32 states to the dtype of bf16 weights, and fail at its first step with other groups.
    """
    inner, saved = getattr(optimizer, "optimizer", optimizer), dict[Any, Mapping[str, Any]]()
    # DeepSpeed's optimizers have no hooks, and convert nothing.
    hooks = (
        []
        if not isinstance(inner, torch.optim.Optimizer)
        else [
            inner.register_load_state_dict_pre_hook(partial(_remember_states, saved)),
            inner.register_load_state_dict_post_hook(partial(_restore_dtypes, saved)),
        ]
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    # Loading makes torch add "differentiable" to the defaults, also of optimizers without it, such as Adafactor.
    names = [name for name in optimizer.defaults if name != "differentiable"]
    missing = [name for group in optimizer.param_groups for name in names if name not in group]
    if missing:
        raise ValueError(f"they have no {missing[0]}")


def _remember_states(saved: dict[Any, Mapping[str, Any]], optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Fill `saved` with the states that are about to be loaded, by parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved.update({p: state_dict["state"].get(number, {}) for p, number in zip(parameters, numbers, strict=False)})


def _restore_dtypes(saved: Mapping[Any, Mapping[str, Any]], optimizer: Any) -> None:
    """Replace each loaded state that torch has converted by the saved one."""
    for parameter, states in saved.items():
        for key, value in states.items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device)


def _sums_exactly(group: dict[str, Any]) -> bool:
    """Return whether a group has Kahan summation, which optimi's optimizers have for bf16 unless `kahan_sum` is False."""
    return bool(group.get("use_kahan_summation")) or group.get("kahan_sum", False) is not False
