"""What the extension keeps beside one worker of vLLM: its receiver, and the end of the transport that is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.receiver import InPlace, Loader, Receiver
from lowpeak.rollout.vllm.weights.reload import Reloading, rewrites_parameters
from lowpeak.rollout.vllm.weights.transports.transport import Inlet


@dataclass
class Work:
    """One worker's part in updates; `rank` is its place among its engine's workers."""

    receiver: Receiver
    device: torch.device
    rank: int
    incarnation: str
    inlet: Inlet | None = None

    def open_inlet(self) -> Inlet:
        """The open end of the transport; EngineError outside of an update."""
        if self.inlet is None:
            raise EngineError("No update of vLLM's weights is under way.")
        return self.inlet

    def close_inlet(self) -> None:
        """Close what is open."""
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def open_work(worker: Any, incarnation: str) -> Work:
    """The work of a worker whose model is loaded."""
    model = worker.model_runner.get_model()
    device = next(model.parameters()).device
    loader: Loader
    if rewrites_parameters(model, worker.vllm_config):
        loader = Reloading(model, worker.vllm_config.model_config)
    else:
        loader = InPlace(model, Names(model))
    return Work(Receiver(loader), device, worker.vllm_config.parallel_config.rank, incarnation)


class Names:
    """A checkpoint's name of a tensor as the engine's model has it: layers that serve adapters keep theirs in `base_layer`."""

    def __init__(self, model: nn.Module) -> None:
        self._wrapped = {name for name, module in model.named_modules() if hasattr(module, "base_layer")}
        packed = getattr(model, "packed_modules_mapping", {})
        self._packed = {part: whole for whole, parts in packed.items() for part in parts}

    def __call__(self, name: str) -> str:
        """The name with `.base_layer` where its layer is wrapped."""
        layer, _, parameter = name.rpartition(".")
        above, _, last = layer.rpartition(".")
        joined = f"{above}.{self._packed.get(last, last)}".lstrip(".")
        return f"{layer}.base_layer.{parameter}" if {layer, joined} & self._wrapped else name
