"""A tensor as vLLM's model takes it: under its parameter's name in transformers, or as the checkpoint on the hub has it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class Names:
    """The names that a model of vLLM takes whose configuration is transformers' `config`."""

    def __init__(self, config: Any = None) -> None:
        self._config = config

    def candidates(self, name: str, tensor: Tensor) -> Iterator[list[tuple[str, Tensor]]]:
        """What to load for a parameter: itself, then what transformers makes of it in a checkpoint, where that is another thing.

        transformers renames (Mixtral's `block_sparse_moe` is its `mlp`) and joins experts; vLLM knows most models both ways, and
        some by the checkpoint alone. The second is made when the first was refused.
        """
        yield [(name, tensor)]
        reverted = self._in_checkpoint(name, tensor)
        if [other for other, _ in reverted] != [name]:
            yield reverted

    def lacking(self, sent: Collection[str]) -> list[str]:
        """The parameters of transformers' model that did not come, where all that came are its parameters; else none is known.

        What lacks may show nowhere else: an expert among many that vLLM keeps in one parameter, or values that would all be zero.
        """
        own = self._own
        return sorted(own.difference(sent)) if own.issuperset(sent) else []

    @cached_property
    def _own(self) -> frozenset[str]:
        return (
            frozenset() if self._skeleton is None else frozenset(name for name, _ in self._skeleton.named_parameters())
        )

    def _in_checkpoint(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if self._skeleton is None:
            return [(name, tensor)]
        from transformers.core_model_loading import revert_weight_conversion

        return list(revert_weight_conversion(self._skeleton, {name: tensor}).items())

    @cached_property
    def _skeleton(self) -> Any:
        """transformers' model of the same config, without weights; None where it has none."""
        from transformers import AutoModelForCausalLM

        if self._config is None:
            return None
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                return AutoModelForCausalLM.from_config(self._config)
        except Exception:  # a model that only vLLM has: its names are the checkpoint's
            return None
