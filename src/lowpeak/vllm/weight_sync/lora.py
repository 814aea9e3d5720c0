"""Update of a LoRA adapter alone, without its base model.

Each worker collects the adapter's tensors and writes them to a folder, because vLLM loads adapters from folders
(`adapter_config.json` and a safetensors file with peft's names). The received tensors are verified by their
checksums; the tensors that vLLM derives from them (scaled, joined, sharded) are summed then, to detect later changes.
An update removes the earlier adapters that no request needs, and touches no others.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from lowpeak.errors import EngineError, shorten_names
from lowpeak.records import TensorAssembler
from lowpeak.vllm.protocol import Adapter
from lowpeak.vllm.weight_sync.buckets import Piece
from lowpeak.vllm.weight_sync.verification import read_checksums, tensor_checksum


def adapter_config(model: Any) -> dict[str, Any]:
    """Return the configuration of a peft model's active adapter, as in its file."""
    config = model.peft_config[model.active_adapters[0]].to_dict()
    return {name: _to_json(value) for name, value in config.items()}


def _to_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value


@dataclass
class AdapterReceiver:
    """Receiver of one worker's adapter updates; `incarnation` is the worker's."""

    worker: Any
    incarnation: str
    policy_version: int | None = None
    _update: Mapping[str, Any] = field(default_factory=dict)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _assembler: TensorAssembler = field(default_factory=TensorAssembler)
    _loaded: dict[int, _LoadedAdapter] = field(default_factory=dict)  # by their numbers
    _current: _LoadedAdapter | None = None
    _next: _LoadedAdapter | None = None

    def begin(self, update: Mapping[str, Any]) -> tuple[str, ...]:
        """Drop the version, and the adapters that are not `in_use`; all tensors must be sent again.

        `update` has the adapter's configuration and number, and the numbers of those in use.
        """
        if self.worker.vllm_config.lora_config is None:
            raise EngineError("vLLM was started without LoRA: start it with enable_lora, or set vllm_adapters=False.")
        self.abort()
        self._current = None
        for number in self._loaded.keys() - set(update["in_use"]):
            self._loaded.pop(number).remove(self.worker)
        self._update = update
        return ()

    def receive(self, pieces: Iterable[Piece], bucket: Tensor) -> None:
        for piece in pieces:
            complete = self._assembler.add(piece.name, piece.shape, piece.start, piece.values_in(bucket))
            if complete is not None:
                self._tensors[piece.name] = complete

    def verify(self, sent: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, int]:
        """Raise EngineError with names if tensors differ from what was sent or vLLM rejects the adapter."""
        incomplete = sorted(sent.keys() - self._tensors.keys())
        if incomplete:
            raise EngineError(f"These tensors of the adapter are incomplete: {shorten_names(incomplete)}.")
        received = read_checksums({name: tensor_checksum(tensor) for name, tensor in self._tensors.items()})
        different = sorted(name for name, value in sent.items() if value and received.get(name) != value)
        if different:
            raise EngineError(f"The adapter differs from the policy's: {shorten_names(different)}.")
        self._next = _LoadedAdapter.load(self.worker, self._update, self._tensors, self.incarnation)
        self._drop_tensors()
        return {}

    def commit(self, policy_version: int) -> None:
        assert self._next is not None, "verify() comes first"
        self._loaded[self._next.adapter.number] = self._next
        self._current, self._next = self._next, None
        self.policy_version = policy_version

    def abort(self) -> None:
        """Abort the update: the last adapter has no version."""
        self.policy_version = None
        self._drop_tensors()
        if self._next is not None:
            self._next.remove(self.worker)
            self._next = None

    def verify_unchanged(self) -> None:
        """Raise EngineError, and drop the version, if vLLM no longer has the adapter, or it changed."""
        if self.policy_version is None or self._current is None:
            raise EngineError("vLLM has an adapter without a version.")
        if _adapter_checksums(self.worker, self._current.adapter.number) != self._current.sums:
            self.policy_version = None
            raise EngineError(f"vLLM's adapter {self._current.adapter.name} changed since it was verified.")

    def adapter(self) -> dict[str, Any] | None:
        return None if self._current is None else asdict(self._current.adapter)

    def _drop_tensors(self) -> None:
        self._tensors.clear()
        self._assembler.clear()


@dataclass(frozen=True)
class _LoadedAdapter:
    """Adapter that vLLM has loaded, its folder, and the checksums of its tensors at that time."""

    adapter: Adapter
    folder: tempfile.TemporaryDirectory[str]
    sums: dict[str, str]

    @staticmethod
    def load(worker: Any, update: Mapping[str, Any], tensors: Mapping[str, Tensor], incarnation: str) -> _LoadedAdapter:
        from vllm.lora.request import LoRARequest

        number, name = int(update["number"]), f"lowpeak-{update['number']}"
        folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
        save_file(dict(tensors), Path(folder.name) / "adapter_model.safetensors")
        (Path(folder.name) / "adapter_config.json").write_text(json.dumps(update["config"]), encoding="utf-8")
        try:
            worker.add_lora(LoRARequest(name, number, folder.name))
        except Exception as error:
            folder.cleanup()
            raise EngineError(f"vLLM does not load the adapter ({type(error).__name__}: {error}).") from error
        adapter = Adapter(name, number, folder.name, incarnation)
        return _LoadedAdapter(adapter, folder, _adapter_checksums(worker, number))

    def remove(self, worker: Any) -> None:
        worker.remove_lora(self.adapter.number)
        self.folder.cleanup()


def _adapter_checksums(worker: Any, number: int) -> dict[str, str]:
    """Return the checksums of vLLM's tensors of an adapter; empty if vLLM dropped it."""
    loaded = worker.model_runner.lora_manager._adapter_manager.get_adapter(number)
    layers = {} if loaded is None else loaded.loras
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for part in ("lora_a", "lora_b"):
            values = getattr(layer, part)
            for i, each in enumerate(values if isinstance(values, list | tuple) else [values]):
                if each is not None:
                    tensors[f"{name}.{part}.{i}"] = tensor_checksum(each)
    return read_checksums(tensors)
