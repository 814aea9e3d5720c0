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
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lowpeak.errors import ArgumentError
from lowpeak.records import MicroBatch, Tree


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
    counts_N = torch.zeros(batch.input_ids_BL.numel())
    if not batch.record_indices:  # a dummy micro-batch, whose tokens are masked
        return counts_N
    ends = torch.zeros(batch.tokens.num_sequences, dtype=torch.int64)  # packed sequences have loss tokens
    ends = ends.scatter_reduce(0, batch.tokens.sequences_T, batch.positions_T, "amax")
    starts = range(0, counts_N.numel(), batch.input_ids_BL.shape[1])
    trees = [Tree(start, 0, (0,)) for start in starts] if batch.forest is None else batch.forest.trees
    for end in ends.tolist():  # the position that predicts the sequence's last counted token
        tree = trees[bisect_right(trees, end, key=lambda tree: tree.start) - 1]
        for start, stop in _spans(tree, end):
            counts_N[start:stop] += 1.0
    return counts_N


def _spans(tree: Tree, end: int) -> list[tuple[int, int]]:
    """Return the spans of the sequence that ends at position `end`: its prompt's, and its completion's."""
    prompt_end = tree.start + tree.prompt
    if end < prompt_end or tree.prompt == 0:
        return [(tree.start, end + 1)]
    starts = list(accumulate(tree.completions, initial=prompt_end))
    return [(tree.start, prompt_end), (starts[bisect_right(starts, end) - 1], end + 1)]


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
