"""The collectives that peers of tensor parallelism have within a forward, as steps of a `Match`.

A module that ends in one is its own idle step: called with zeros of the shape that it would have been given, it takes part in the
same collective, in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.strategies.matched import Match, replace_forward


@dataclass(frozen=True)
class Peers:
    """The modules whose forwards end in a collective of peers, and the peers' process group; by default there are none."""

    modules: Sequence[nn.Module] = ()
    group: Any = None

    def meet(self, stack: ExitStack, match: Match, part: nn.Module | None, is_head: bool = False) -> None:
        """Make those at or below `part` steps of the match, in the order in which they stand, and run."""
        for module in part.modules() if part is not None else ():
            if any(module is each for each in self.modules):
                nothing = _no_positions if is_head else _nothing
                idle = partial(_idle, match, module, module.forward, nothing)
                replace_forward(stack, module, match.step(module.forward, idle))


def _idle(match: Match, module: nn.Module, forward: Callable[..., Any], nothing: Callable[..., Any]) -> None:
    values, more = nothing(module, match.arguments)
    with torch.no_grad(), match.computing():
        forward(values, **more)


def _nothing(module: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Ids, or hidden states of all positions, as this forward would have given them to the module."""
    ids_BL = arguments["input_ids"]
    if isinstance(module, nn.Embedding):
        return torch.zeros_like(ids_BL), {}
    return _zeros(module, *ids_BL.shape), {}


def _no_positions(head: Any, arguments: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states of the positions whose logits this forward keeps, or of all and what is asked of them."""
    num_rows, length = arguments["input_ids"].shape
    if arguments.get("head_request") is not None:
        return _zeros(head, num_rows, length), {"head_request": arguments["head_request"]}
    kept = arguments.get("logits_to_keep", 0)
    return _zeros(head, num_rows, min(kept or length, length) if isinstance(kept, int) else len(kept)), {}


def _zeros(module: Any, num_rows: int, length: int) -> Tensor:
    weight = module.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.new_zeros(num_rows, length, local.shape[1])
