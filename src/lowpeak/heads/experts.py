"""Mixture of experts: Switch Transformer's load-balancing loss (arXiv 2101.03961, equations 4 to 6) over a whole step.

    loss = E * sum over experts e of f_e * P_e

`f_e` is the fraction of tokens that a router sends to e (times k, as each token has k experts), without a gradient; `P_e` is the
routers' mean probability of e. Both are means over all layers and over the tokens of the step's sequences, on all ranks: a
product of means over one micro-batch would depend on how the step is split (arXiv 2501.11873). A prompt that several completions
share counts once for each; padding and tokens from which nothing is predicted do not count.

Shapes: E experts, N = B*L tokens of a micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowpeak.batching import token_ends
from lowpeak.errors import ArgumentError
from lowpeak.records import MicroBatch


@dataclass(frozen=True)
class LoadBalance:
    """The weight of the load-balancing loss, and the number of experts per token."""

    coefficient: float
    top_k: int


@dataclass(frozen=True)
class RoutingRequest:
    """A forward's request for `routing_sums`; `sequences_N` is the number of sequences that contain each token."""

    sequences_N: Tensor  # float32 [N]
    top_k: int


def load_balance_of(causal: Any, coefficient: float | None) -> LoadBalance | None:
    """Return the load-balancing loss of a model, weighted by `coefficient` (None: by the config's); None if it is off.

    Raises ArgumentError if a coefficient is given for a model that reports no router logits.
    """
    config = causal.config.get_text_config()
    # Some multimodal classes add the loss and have no `num_experts_per_tok`; classifiers never add it.
    balances = causal.can_generate() and hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func")
    top_k = getattr(causal, "num_experts_per_tok", None)
    if top_k is None and balances:
        top_k = config.num_experts_per_tok
    if not hasattr(config, "output_router_logits") or top_k is None:
        if coefficient:
            raise ArgumentError(
                f"router_aux_loss_coef={coefficient} has no effect: {type(causal).__name__} is not a mixture of experts with a "
                "load-balancing loss. Remove it."
            )
        return None
    weight = getattr(config, "router_aux_loss_coef", 0.0) if coefficient is None else coefficient
    return LoadBalance(float(weight), int(top_k)) if weight else None


@contextmanager
def rehearse_experts() -> Iterator[None]:
    """Let transformers multiply experts in the block by its operators for any dtype, which fake tensors can run.

    They take the memory of torch's grouped product, whose fake accepts bf16 alone.
    """
    from transformers.integrations import moe

    can_use = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = can_use


def sequences_per_token(batch: MicroBatch) -> Tensor:
    """Count the sequences that contain each token of a micro-batch: float32 [N], 0 for padding and tokens without a prediction."""
    with unset_fake_temporarily():  # a rehearsal's micro-batches are real, and are read here
        return _sequences_per_token(batch)


def _sequences_per_token(batch: MicroBatch) -> Tensor:
    length = batch.input_ids_BL.numel()
    counts_N = torch.zeros(length)
    if not batch.record_indices:  # a dummy micro-batch, whose tokens are masked
        return counts_N
    if batch.forest is None:
        ends_N = torch.arange(1, len(batch.input_ids_BL) + 1).repeat_interleave(batch.input_ids_BL.shape[1])
        ends_N = ends_N * batch.input_ids_BL.shape[1]
    else:
        ends_N = token_ends(batch.forest.nodes, length).long()
    for positions in batch.positions_T.split(batch.tokens.counts()):
        # A sequence contains a token that has one of its positions in the token's subtree.
        predicts_N = torch.zeros(length + 1, dtype=torch.int64)
        predicts_N[positions + 1] = 1
        before_N = predicts_N.cumsum(0)
        counts_N += before_N[ends_N] > before_N[:-1]
    for row_L, repeated in zip(counts_N.view(batch.input_ids_BL.shape), batch.repeated, strict=False):
        row_L[:repeated] = 0.0  # counted in an earlier row
    return counts_N


def routing_sums(router_logits: Sequence[Tensor], request: RoutingRequest) -> Tensor:
    """Return each expert's number of choices and sum of probabilities, over layers and sequences' tokens: float32 [2, E].

    The probabilities are differentiable, the choices are not.
    """
    choices_E = probabilities_E = torch.zeros((), device=request.sequences_N.device)
    for logits in router_logits:
        probabilities_NE = logits.flatten(0, -2).float().softmax(-1)
        chosen_NK = probabilities_NE.detach().topk(request.top_k, dim=-1).indices
        chosen_NE = torch.zeros_like(probabilities_NE).scatter(1, chosen_NK, 1.0)
        choices_E = choices_E + request.sequences_N @ chosen_NE
        probabilities_E = probabilities_E + request.sequences_N @ probabilities_NE
    return torch.stack([choices_E, probabilities_E])


def balance_loss(choices_E: Tensor, probabilities_E: Tensor, top_k: int) -> Tensor:
    """Return the scalar `E * sum(f * P)`; `choices_E` are the whole step's, `probabilities_E` those of a part of it or of all."""
    num_tokens = (choices_E.sum() / top_k).clamp(min=1.0)  # over all layers
    return len(choices_E) * (choices_E / num_tokens * (probabilities_E / num_tokens)).sum()
