"""Names of tensors: those of the trainer's model, and those under which vLLM's model accepts them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class CheckpointNames:
    """Names under which vLLM's model accepts the tensors of a model with the transformers `config`."""

    def __init__(self, config: Any = None) -> None:
        self._config = config

    def candidates(self, name: str, tensor: Tensor) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the tensors to load for a parameter: the tensor itself, then its form in a checkpoint if that differs.

        transformers renames (Mixtral's `block_sparse_moe` is its `mlp`) and joins experts; vLLM loads most models in
        both forms, some only in the checkpoint's. The second form is computed after vLLM refused the first.
        """
        yield [(name, tensor)]
        if self._skeleton is not None:
            from transformers.core_model_loading import revert_weight_conversion

            reverted = list(revert_weight_conversion(self._skeleton, {name: tensor}).items())
            if [other for other, _ in reverted] != [name]:
                yield reverted

    def is_optional(self, name: str) -> bool:
        """Return whether vLLM's model may lack a tensor: a buffer, or weights for images and sound.

        vLLM computes some buffers, and leaves out the parts for inputs that its arguments exclude.
        """
        return name in self._buffers or not self._used_for_text.get(name, True)

    def missing(self, sent: Collection[str]) -> list[str]:
        """Return the parameters of transformers' model that were not sent; none if unknown tensors were sent too."""
        # A missing tensor may show nowhere else: an expert among many in one parameter of vLLM's, or values that are all zero.
        is_known = self._used_for_text.keys() | self._buffers >= set(sent)
        return sorted(self._used_for_text.keys() - sent) if is_known else []

    @cached_property
    def _used_for_text(self) -> dict[str, bool]:
        """Return whether each parameter of transformers' model is used for text."""
        named = () if self._skeleton is None else self._skeleton.named_parameters()
        return {name: parameter.requires_grad for name, parameter in named}

    @cached_property
    def _buffers(self) -> set[str]:
        return set() if self._skeleton is None else {name for name, _ in self._skeleton.named_buffers()}

    @cached_property
    def _skeleton(self) -> Any:
        """Return transformers' model of the config on the meta device; None if transformers has none."""
        from transformers import AutoModelForCausalLM

        from lowpeak.models import auto_class, freeze_other_modalities, make_whole_models

        if self._config is None:
            return None
        try:
            with torch.device("meta"), make_whole_models():
                skeleton = auto_class(AutoModelForCausalLM, self._config).from_config(self._config)
            skeleton.tie_weights()
            freeze_other_modalities(skeleton)
        except Exception:
            # A model that only vLLM implements uses the checkpoint's names.
            return None
        return skeleton
