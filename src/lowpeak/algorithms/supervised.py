"""Supervised training as an algorithm: maximum likelihood of given completions, each token of the step alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lowpeak.algorithms.algorithm import Advantages, Algorithm
from lowpeak.algorithms.group_filter import select_all
from lowpeak.algorithms.losses import dft_loss, supervised_loss
from lowpeak.algorithms.metrics import measure_supervised
from lowpeak.algorithms.reduction import token_mean
from lowpeak.arguments import SupervisedLossType
from lowpeak.records import Record


def make_supervised(loss_type: SupervisedLossType = "nll") -> Algorithm:
    """Cross-entropy over the step's counted tokens, or DFT's; no row is idle, whatever its advantages."""
    return Algorithm(
        name="sft",
        unit="token",
        needs=frozenset(),
        select=select_all,
        advantages=_no_advantages,
        reduction=token_mean,
        loss=dft_loss if loss_type == "dft" else supervised_loss,
        measure=measure_supervised,
        idle=False,
        top1=True,
    )


def _no_advantages(records: Sequence[Record], state: Mapping[str, float]) -> Advantages:
    return Advantages(tuple(torch.zeros(len(record.completion)) for record in records), {})
