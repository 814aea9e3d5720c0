"""What the extension keeps beside one worker of vLLM: its receiver, and the end of the transport that is open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.loader import Loader
from lowpeak.rollout.vllm.weights.names import Names
from lowpeak.rollout.vllm.weights.receiver import Receiver
from lowpeak.rollout.vllm.weights.reload import Reloads, rewritten
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
    config = worker.vllm_config
    paths = {module: name for name, module in model.named_modules()}
    reloads = Reloads(rewritten(model, config), paths, config.model_config)
    loader = Loader(model, Names(model, config.model_config.hf_config), reloads)
    return Work(Receiver(loader), device, config.parallel_config.rank, incarnation)
