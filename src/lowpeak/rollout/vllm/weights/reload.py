"""Engines whose parameters are not the checkpoint's values: quantised weights, or layouts that a kernel wants.

There a plain `load_weights` would write into what is no weight any more. vLLM's layerwise reload makes each layer anew, processes
it and copies it where it was: beyond the model a layer is alive, and vLLM keeps every tensor until its layer is whole, so they
are copied first. What arrived is proved by each tensor's checksum; what stands in the parameters afterwards is another thing,
and is summed to prove later that it did not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.buckets import read_sums
from lowpeak.rollout.vllm.weights.checksum import checksum


def rewrites_parameters(model: Any, vllm_config: Any) -> bool:
    """Whether loading is more than copying: a quantised model, or parameters that lost their loader when they were processed.

    Seen from the model itself: quantisation says so in the config, and a kernel's layout (oneDNN's on CPUs) shows in a parameter
    that is empty, or was replaced and so has no `weight_loader`. Experts on devices other than CPUs are always reloaded: which
    kernels reorder them in place is not told anywhere.
    """
    if vllm_config.quant_config is not None:
        return True
    lost = any(
        parameter.numel() == 0 or (parameter.dim() > 1 and not hasattr(parameter, "weight_loader"))
        for module in model.modules()
        if hasattr(module, "quant_method")
        for parameter in module.parameters(recurse=False)
    )
    device = next(model.parameters()).device
    has_experts = any(hasattr(module, "w13_weight") for module in model.modules())
    return lost or (has_experts and device.type != "cpu")


class Reloading:
    """The loader of such models."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._received: dict[str, Tensor] = {}
        self._held: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._open = False

    def begin(self, summing: bool) -> None:
        """Make every layer ready to be made anew."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.finish()
        self._summing = summing
        self._received, self._counts = {}, {}
        initialize_layerwise_reload(self._model)
        self._open = True

    def load(self, name: str, tensor: Tensor) -> None:
        """Hand a copy of one tensor over, on the device of the model."""
        try:
            own = tensor.to(next(iter(self._model.buffers()), tensor).device, copy=True)
            self._model.load_weights([(name, own)])
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            raise EngineError(f"vLLM's model does not take the tensor {name} ({said}).") from error
        self._counts[name] = tensor.numel()
        if self._summing:
            self._received[name] = checksum(tensor)

    def finish(self) -> None:
        """Process what is left, and go back to how the model was."""
        if self._open:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self._model, self._model_config)
            self._open = False

    def wrong(self, sent: Mapping[str, str]) -> list[str]:
        """Tensors that did not arrive as they were sent; the parameters' sums are kept."""
        self._held = self._sums()
        found = read_sums(self._received)
        return sorted(name for name, value in sent.items() if found.get(name) != value)

    def missing(self, sent: Mapping[str, str]) -> list[str]:
        """Nothing: vLLM puts back what was there where a layer got no values, and does not tell."""
        return []

    def num_placed(self, names: Mapping[str, Any]) -> dict[str, int]:
        """All that came."""
        return {name: self._counts.get(name, 0) for name in names}

    def changed(self) -> list[str]:
        """Parameters that changed since they were summed."""
        return sorted(name for name, value in self._sums().items() if self._held.get(name) != value)

    def _sums(self) -> dict[str, str]:
        with torch.no_grad():
            return read_sums({name: checksum(p.data) for name, p in self._model.named_parameters() if p.numel()})
