"""Settings, records and token batches for the algorithms' tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowpeak.algorithms.algorithm import Algorithm, StepCounts
from lowpeak.arguments.rloo import RLOOSettings
from lowpeak.records import Completion, FinishReason, Record, TokenBatch
from lowpeak.training.step import weighted_loss
from naive_losses import Row
from step_settings import GRPO, OF_LOSS_TYPE

SETTINGS = {name: replace(GRPO, loss_type=name, **changes) for name, changes in OF_LOSS_TYPE.items()}
CISPO, VESPO = SETTINGS["cispo"], SETTINGS["vespo"]
RLOO = RLOOSettings(
    clip_low=0.2,
    clip_high=0.2,
    beta=0.0,
    kl_estimator="k1",
    normalize_advantages=False,
    reward_clip=None,
    drop_equal_groups=False,
    score_old=True,
)


def record(
    group: int,
    rewards: float | tuple[float, ...],
    weights: tuple[float, ...] | None = None,
    length: int = 2,
    finish_reason: FinishReason = "stop",
) -> Record:
    """Return a record of a group with its rewards; `reward` is their weighted sum, NaN without any."""
    columns = rewards if isinstance(rewards, tuple) else (rewards,)
    pairs = [(w, r) for w, r in zip(weights or (1.0,) * len(columns), columns, strict=True) if not math.isnan(r)]
    completion = Completion(
        torch.zeros(length, dtype=torch.int32), torch.zeros(length), torch.ones(length, dtype=torch.bool), finish_reason
    )
    return Record(group, (1,), completion, columns, sum(w * r for w, r in pairs) if pairs else math.nan)


def ragged_rows(lengths: Sequence[int] = (3, 1, 6, 2, 0, 4), seed: int = 0) -> list[Row]:
    """Return sequences with ratios below, inside and above every bound, and both signs of advantage."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    rows = []
    for i, n in enumerate(lengths):
        logprobs = draw(n) - 2.0
        shift = (-1.0) ** (i // 2) * 0.3
        rows.append(
            Row(
                logprobs.requires_grad_(),
                draw(n).abs().requires_grad_(),
                logprobs.detach() + shift + 0.5 * draw(n),
                logprobs.detach() + 0.7 * draw(n),
                (draw(n) > 0).double(),
                (-1.0) ** i * (0.5 + i),
            )
        )
    return rows


def token_batch(rows: Sequence[Row], reduction: Callable[[int, StepCounts], float], unit: str, **changes) -> TokenBatch:
    """Return the sequences as the only micro-batch of a step; `changes` replace fields, None included."""
    counts = StepCounts(len(rows), sum(len(row.logprobs) for row in rows))
    lengths = [len(row.logprobs) for row in rows]
    weights = [reduction(n, counts) for n in lengths]
    per_unit = weights if unit == "sequence" else [w for w, n in zip(weights, lengths, strict=True) for _ in range(n)]
    batch = TokenBatch(
        sequences_T=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)),
        num_sequences=len(rows),
        weights_U=torch.tensor(per_unit, dtype=torch.float64),
        advantages_T=torch.cat([torch.full_like(row.old, row.advantage) for row in rows]),
        old_T=torch.cat([row.old for row in rows]),
        reference_T=torch.cat([row.reference for row in rows]),
        coefficients={"entropy_coef": 0.3},
        token_share=1.0 / counts.num_tokens,
        sequence_share=1.0 / counts.num_sequences,
        batch_share=1.0,
    )
    return replace(batch, **changes)


def trained_loss(algorithm: Algorithm, rows: Sequence[Row], **changes) -> Tensor:
    """Return the trained loss: `sum(weights_U * loss_U)`, less the entropy bonus."""
    tokens = token_batch(rows, algorithm.reduction, algorithm.unit, **changes)
    logprobs_T = torch.cat([row.logprobs for row in rows])
    assert algorithm.loss(logprobs_T, tokens).shape == tokens.weights_U.shape
    return weighted_loss(algorithm, tokens, logprobs_T, torch.cat([row.entropy for row in rows]))


def gradients(loss: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return the gradients in all sequences' log-probs and entropies as one vector; 0 if the loss does not depend on one."""
    inputs = [x for row in rows for x in (row.logprobs, row.entropy)]
    parts = torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True)
    return torch.cat([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, parts, strict=True)])


def assert_same(loss: Tensor, expected: Tensor, rows: Sequence[Row]) -> None:
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(loss, rows), gradients(expected, rows), rtol=1e-10, atol=1e-12)
