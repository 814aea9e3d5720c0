"""Modules whose parameters are not the checkpoint's values: quantised weights, experts in a kernel's layout, absorbed projections.

There a plain `load_weights` would write into what is no weight any more (vLLM's CPU kernel for experts keeps the parameter's
name, shape and loader, and packs what is in it). vLLM's layerwise reload makes such a module anew, processes it and copies it
where it was. Beyond the model one module is alive, and every tensor is kept until its module is whole, so they are copied first.
What arrived is proved by each tensor's checksum; what stands in the parameters afterwards is another thing, and is summed to
prove later that it did not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.vllm.weight_sync.checksum import tensor_checksum

AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}  # once oneDNN's format is off, see extension.py
PLAIN_ATTENTION = {"Attention", "MMEncoderAttention"}  # MLAAttention absorbs a projection


def modules_to_reload(model: nn.Module, vllm_config: Any) -> list[nn.Module]:
    """The topmost modules that vLLM processes after loading; the whole model where it is quantised.

    Seen from the modules: a `quant_method` that is not one of those that leave weights as they are, or processing of their
    own. What is not known to be plain is reloaded, as vLLM itself does for all.
    """
    if vllm_config.quant_config is not None or hasattr(model, "process_weights_after_loading"):
        return [model]
    return _processed_modules(model)


def _processed_modules(module: nn.Module) -> list[nn.Module]:
    if not _is_plain(module):
        return [module]
    return [found for child in module.children() for found in _processed_modules(child)]


def _is_plain(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if hasattr(module, "process_weights_after_loading"):
        return bool(PLAIN_ATTENTION & {kind.__name__ for kind in type(module).__mro__})
    processed = hasattr(method, "process_weights_after_loading")
    return not processed or type(method).__name__ in AS_LOADED


class ReloadedModules:
    """The modules of one model that are made anew in each update."""

    def __init__(self, modules: Sequence[nn.Module], names: Mapping[nn.Module, str], model_config: Any) -> None:
        self._modules = modules
        self._names = names
        self._model_config = model_config
        self._open = False

    def __bool__(self) -> bool:
        return bool(self._modules)

    def parameters(self) -> dict[str, Tensor]:
        return {
            f"{self._names[module]}.{name}".lstrip("."): parameter
            for module in self._modules
            for name, parameter in module.named_parameters()
        }

    def begin(self) -> None:
        """Make them ready to be made anew; those of an update that was given up are finished first."""
        self.finish()
        for module in self._modules:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(module)
        self._open = True

    def missing(self) -> list[str]:
        """Parameters that nothing was loaded into, while the update is open."""
        return sorted(
            name for module in self._modules if self._open for name in _unloaded_parameters(module, self._names[module])
        )

    def finish(self) -> None:
        """Process what is left, and go back to how the modules were."""
        for module in self._modules if self._open else ():
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            loaded = [layer for layer in module.modules() if _was_loaded(layer)]
            finalize_layerwise_reload(module, self._model_config)
            for layer in loaded:
                _pack_experts(layer)
        self._open = False

    def sums(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {
                name: tensor_checksum(parameter.data)
                for name, parameter in self.parameters().items()
                if parameter.numel()
            }


def _unloaded_parameters(module: nn.Module, prefix: str) -> Iterator[str]:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for name, layer in module.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and not hasattr(
            layer, "process_weights_after_loading"
        ):  # else it is whole, or has no weights
            loaded = {parameter for parameter, _ in info.loaded_weights}
            for parameter, _ in layer.named_parameters(recurse=False):
                if parameter not in loaded:
                    yield ".".join(part for part in (prefix, name, parameter) if part)


def _was_loaded(layer: nn.Module) -> bool:
    """Whether an open reload has values for a layer, or has already made it anew."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(layer)
    return not info.can_load() or info.load_numel > 0


def _pack_experts(layer: nn.Module) -> None:
    """Pack a CPU's experts again: vLLM 0.32 does it at the first load alone, and a reload leaves them as the kernel cannot read."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if experts is not None and next(layer.parameters()).device.type == "cpu":
        experts.process_weights_after_loading(layer)
