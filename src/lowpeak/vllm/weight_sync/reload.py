"""Reload of modules whose parameters differ from the checkpoint: quantised weights, kernel layouts of experts,
absorbed projections.

There a plain `load_weights` would write into packed data (vLLM's CPU kernel for experts keeps the parameter's name,
shape and loader, but packs its contents). vLLM's layerwise reload constructs such a module anew, processes it and
copies it into place. It needs memory for one module besides the model, and keeps every tensor until its module is
complete, so the tensors are copied first. Each received tensor is verified by its checksum; the processed parameters
are summed to detect later changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.vllm.weight_sync.verification import tensor_checksum

AS_LOADED = {
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
}  # without oneDNN's format, see `disable_cpu_repacking`
PLAIN_ATTENTION = {"Attention", "MMEncoderAttention"}  # MLAAttention absorbs a projection


def modules_to_reload(model: nn.Module, vllm_config: Any) -> list[nn.Module]:
    """Return the topmost modules that vLLM processes after loading; the whole model if it is quantised."""
    # A module counts as processed if its `quant_method` is not known to keep weights as loaded, or if it has a processing method.
    # Modules that are not known to be plain are reloaded, as vLLM does with all modules.
    if vllm_config.quant_config is not None or hasattr(model, "process_weights_after_loading"):
        return [model]
    return _processed_modules(model)


def _processed_modules(module: nn.Module) -> list[nn.Module]:
    if not _is_plain(module):
        return [module]
    return [processed for child in module.children() for processed in _processed_modules(child)]


def _is_plain(module: nn.Module) -> bool:
    method = getattr(module, "quant_method", None)
    if hasattr(module, "process_weights_after_loading"):
        return bool(PLAIN_ATTENTION & {kind.__name__ for kind in type(module).__mro__})
    processed = hasattr(method, "process_weights_after_loading")
    return not processed or type(method).__name__ in AS_LOADED


class ReloadedModules:
    """Modules of one model that each update constructs anew."""

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
        """Prepare the modules for loading; finish those of an aborted update first."""
        self.finish()
        for module in self._modules:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(module)
        self._open = True

    def missing(self) -> list[str]:
        """Return the parameters that received nothing, while the update is open."""
        return sorted(
            name for module in self._modules if self._open for name in _unloaded_parameters(module, self._names[module])
        )

    def finish(self) -> None:
        """Process the remaining modules and restore their normal state."""
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
        # Other layers are complete, or have no weights.
        if info.can_load() and not hasattr(layer, "process_weights_after_loading"):
            loaded = {parameter for parameter, _ in info.loaded_weights}
            for parameter, _ in layer.named_parameters(recurse=False):
                if parameter not in loaded:
                    yield ".".join(part for part in (prefix, name, parameter) if part)


def _was_loaded(layer: nn.Module) -> bool:
    """Return whether an open reload has values for a layer or has already rebuilt it."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(layer)
    return not info.can_load() or info.load_numel > 0


def _pack_experts(layer: nn.Module) -> None:
    """Pack a CPU layer's experts again.

    vLLM 0.32 packs them only at the first load; after a reload the kernel cannot read them.
    """
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if experts is not None and next(layer.parameters()).device.type == "cpu":
        experts.process_weights_after_loading(layer)
