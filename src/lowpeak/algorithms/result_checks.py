"""Checks of the results of a user's algorithm.

Only types, shapes and Python numbers are read on a device, so no check waits for one. Advantages are on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Advantages, Selection
from lowpeak.errors import ArgumentError
from lowpeak.records import Metric, MetricKind, Record

_LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "step")
_SCORES = ("old", "reference", "values", "entropy")


def check_losses(losses_U: Tensor, function: Callable[..., Any], weights_U: Tensor, inputs_T: Tensor) -> Tensor:
    """Return a loss function's result; raise ArgumentError unless it has one number per unit and a gradient.

    A result of another shape would broadcast, and a detached one would train nothing.
    """
    if not isinstance(losses_U, Tensor) or losses_U.shape != weights_U.shape:
        raise ArgumentError(
            f"the loss function {_name(function)} returned {_show(losses_U)}, and must return a tensor of shape "
            f"{list(weights_U.shape)}: one number for each unit (token, sequence or pair) of the algorithm."
        )
    if torch.is_grad_enabled() and inputs_T.requires_grad and not losses_U.requires_grad:
        raise ArgumentError(
            f"the loss function {_name(function)} returned a tensor without a gradient, which trains nothing. Compute it from "
            "its first argument, without .detach(), .item() or torch.no_grad(); a loss that is meant to be 0 is 0 times that "
            "argument."
        )
    return losses_U


def call_select(function: Callable[..., Any], records: Sequence[Record]) -> Selection:
    """Return the result of `Algorithm.select`; raise ArgumentError if it is no selection of these records."""
    selection, num_records = function(records), len(records)
    _require_type(selection, Selection, "select", function)
    for index in selection.indices:
        if not isinstance(index, int) or not 0 <= index < num_records:
            raise ArgumentError(
                f"select ({_name(function)}) returned the index {index!r}, and must return integers from 0 to {num_records - 1}."
            )
    check_metrics(selection.metrics, function)
    return selection


def call_advantages(
    function: Callable[..., Any], records: Sequence[Record], coefficients: Mapping[str, float]
) -> Advantages:
    """Return the result of `Algorithm.advantages`; raise ArgumentError unless each record has a finite float32 [C]."""
    advantages = function(records, coefficients)
    _require_type(advantages, Advantages, "advantages", function)
    columns = {"per_token": advantages.per_token}
    if advantages.returns is not None:
        columns["returns"] = advantages.returns
    for name, tensors in columns.items():
        if not isinstance(tensors, Sequence):
            raise ArgumentError(
                f"advantages ({_name(function)}) returned in {name} {_show(tensors)}, and must return a tuple."
            )
        if len(tensors) != len(records):
            raise ArgumentError(
                f"advantages ({_name(function)}) returned {len(tensors)} tensors in {name} for {len(records)} records, and must "
                "return one for each."
            )
        for index, (tensor, record) in enumerate(zip(tensors, records, strict=True)):
            problem = _problem(tensor, record)
            if problem is not None:
                raise ArgumentError(f"advantages ({_name(function)}) returned in {name}[{index}] {problem}.")
    check_metrics(advantages.metrics, function)
    return advantages


def check_metrics(metrics: Mapping[str, Metric], function: Callable[..., Any]) -> dict[str, Metric]:
    """Return a function's metrics; raise ArgumentError unless they are Metrics of single numbers, by name."""
    if not isinstance(metrics, Mapping):
        raise ArgumentError(
            f"{_name(function)} returned the metrics {_show(metrics)}, and must return a dict of lowpeak.Metric."
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or name in _LOGGED:
            raise ArgumentError(
                f"{_name(function)} returned a metric with the name {name!r}: use a string other than {', '.join(_LOGGED)}, which "
                "every step logs."
            )
        if not isinstance(metric, Metric):
            raise ArgumentError(
                f"{_name(function)} returned {_show(metric)} as the metric {name!r}: return lowpeak.Metric(total, count)."
            )
        if metric.kind not in get_args(MetricKind):
            kinds = ", ".join(get_args(MetricKind))
            raise ArgumentError(
                f"the metric {name!r} of {_name(function)} has kind={metric.kind!r}, which is none of {kinds}."
            )
        for part, value in (("total", metric.total), ("count", metric.count)):
            if not _is_number(value):
                raise ArgumentError(
                    f"the metric {name!r} of {_name(function)} has as {part} {_show(value)}: give a number or a 0-d tensor."
                )
    return dict(metrics)


def _problem(tensor: Tensor, record: Record) -> str | None:
    """Return how a record's advantages or returns differ from finite float32 [C] on the CPU; None if they do not."""
    length, expected = len(record.completion), f"and must return float32 of shape [{len(record.completion)}] on the CPU"
    if not isinstance(tensor, Tensor) or tensor.shape != (length,):
        return f"{_show(tensor)}, {expected}"
    if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
        return f"a tensor of {tensor.dtype} on {tensor.device}, {expected}"
    # What comes from scores that are not finite is the model's fault, and the step's error names its weights.
    if bool(tensor.isfinite().all()) or not _has_finite_scores(record):
        return None
    bad = tensor[record.completion.loss_mask & ~tensor.isfinite()].tolist()
    if not bad:
        return None
    reason = ": no function rewarded it, so give it 0" if math.isnan(record.reward) else ""
    return f"{bad[0]} for a completion with reward {record.reward}{reason}, {expected}, finite"


def _has_finite_scores(record: Record) -> bool:
    scores = [getattr(record, name) for name in _SCORES]
    return all(score is None or bool(score.isfinite().all()) for score in scores)


def _require_type(result: object, kind: type, field: str, function: Callable[..., Any]) -> None:
    if not isinstance(result, kind):
        raise ArgumentError(
            f"{field} ({_name(function)}) returned {_show(result)}, and must return lowpeak.{kind.__name__}."
        )


def _is_number(value: object) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, Real)


def _show(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a value of type {type(value).__name__}"


def _name(function: Callable[..., Any]) -> str:
    """Return a function's name for messages; that of the function inside for a partial."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
