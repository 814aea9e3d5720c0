"""What the extension keeps beside one worker of vLLM: its receiver, and the end of the transport that is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.adapters import AdapterReceiver
from lowpeak.rollout.vllm.weights.loader import Loader
from lowpeak.rollout.vllm.weights.names import Names
from lowpeak.rollout.vllm.weights.receiver import Receiver
from lowpeak.rollout.vllm.weights.reload import Reloads, rewritten
from lowpeak.rollout.vllm.weights.transports.transport import Inlet


@dataclass
class Work:
    """One worker's part in updates; `rank` is its place among its engine's workers.

    `receiver` is that of the last update: of the model's weights, or of adapters beside the model that was loaded.
    """

    weights: Receiver
    adapters: AdapterReceiver
    receiver: Receiver | AdapterReceiver
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

    def begin(self, summing: bool, adapter: Mapping[str, Any] | None) -> tuple[str, ...]:
        """Begin an update of the weights, or of the adapter; the names of tensors that need not come again."""
        self.close_inlet()
        if adapter is None:
            self.receiver = self.weights
            return self.weights.begin(summing)
        if self.weights.is_broken:
            raise EngineError("The last update of vLLM's base weights failed: push them before an adapter.")
        self.receiver = self.adapters
        return self.adapters.begin(adapter)

    def prove(self) -> None:
        """EngineError, and no version any more, where weights changed since they were verified: the adapter's base as well."""
        if self.receiver is self.adapters and self.weights.policy_version is not None:
            try:
                self.weights.prove()
            except EngineError:
                self.adapters.abort()
                raise
        self.receiver.prove()

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
    loader = Loader(model, Names(config.model_config.hf_config), reloads)
    weights = Receiver(loader)
    return Work(weights, AdapterReceiver(worker), weights, device, config.parallel_config.rank, incarnation)
