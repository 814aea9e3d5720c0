"""A LoRA adapter alone: each worker collects its tensors, and writes them where vLLM reads adapters; it replaces the former one.

vLLM takes adapters from folders (`adapter_config.json` and a safetensors file under peft's names). What arrived is proved by
each tensor's checksum; what vLLM made of it (scaled, joined, cut) is summed then, to prove later that it did not change.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import Adapter
from lowpeak.vllm.weight_sync.buckets import Piece, read_checksums, shorten_names
from lowpeak.vllm.weight_sync.checksum import tensor_checksum


def adapter_config(model: Any) -> dict[str, Any]:
    """The configuration of a peft model's active adapter, as its file has it."""
    config = model.peft_config[model.active_adapters[0]].to_dict()
    return {name: _to_json(value) for name, value in config.items()}


def _to_json(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value


@dataclass
class AdapterReceiver:
    """Takes the adapters of one worker of vLLM, one after the other."""

    worker: Any
    policy_version: int | None = None
    _given: Mapping[str, Any] = field(default_factory=dict)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)
    _held: _LoadedAdapter | None = None
    _next: _LoadedAdapter | None = None

    def begin(self, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Forget the version; `given` has the adapter's configuration and number. Everything comes again."""
        if self.worker.vllm_config.lora_config is None:
            raise EngineError(
                "vLLM was started without adapters: start it with enable_lora, or set vllm_adapters=False."
            )
        self.abort()
        self._given = given
        return ()

    def take(self, pieces: Iterable[Piece], bucket: Tensor) -> None:
        for piece in pieces:
            if piece.name not in self._tensors:
                self._tensors[piece.name] = torch.empty(piece.shape, dtype=piece.dtype)
                self._left[piece.name] = piece.numel
            flat = self._tensors[piece.name].view(-1)
            flat[piece.start : piece.start + piece.count] = piece.values_in(bucket)
            self._left[piece.name] -= piece.count

    def verify(self, sent: Mapping[str, str], counts: Mapping[str, int]) -> dict[str, int]:
        """EngineError with names where the tensors are not what was sent, or vLLM does not take the adapter."""
        lost = sorted(name for name in sent if self._left.get(name) != 0)
        if lost:
            raise EngineError(f"These tensors of the adapter did not come whole: {shorten_names(lost)}.")
        found = read_checksums({name: tensor_checksum(tensor) for name, tensor in self._tensors.items()})
        wrong = sorted(name for name, value in sent.items() if value and found.get(name) != value)
        if wrong:
            raise EngineError(f"The adapter is not the policy's: {shorten_names(wrong)}.")
        self._next = _LoadedAdapter.of(self.worker, self._given, self._tensors)
        self._drop_tensors()
        return {}

    def commit(self, policy_version: int) -> None:
        if self._held is not None:
            self._held.remove(self.worker)
        self._held, self._next = self._next, None
        self.policy_version = policy_version

    def abort(self) -> None:
        """Give the update up; the former adapter stays until another comes, of no version."""
        self.policy_version = None
        self._drop_tensors()
        if self._next is not None:
            self._next.remove(self.worker)
            self._next = None

    def prove(self) -> None:
        """EngineError, and no version any more, where vLLM holds the adapter no longer, or another one."""
        if self.policy_version is None or self._held is None:
            raise EngineError("vLLM holds the adapter of no version.")
        if _adapter_checksums(self.worker, self._held.adapter.number) != self._held.sums:
            self.policy_version = None
            raise EngineError(f"vLLM's adapter {self._held.adapter.name} is no longer the policy's.")

    def adapter(self) -> dict[str, Any] | None:
        return None if self._held is None else asdict(self._held.adapter)

    def _drop_tensors(self) -> None:
        self._tensors.clear()
        self._left.clear()


@dataclass(frozen=True)
class _LoadedAdapter:
    """An adapter that vLLM has loaded, and what its tensors summed to then."""

    adapter: Adapter
    folder: tempfile.TemporaryDirectory[str]
    sums: dict[str, str]

    @staticmethod
    def of(worker: Any, given: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> _LoadedAdapter:
        from vllm.lora.request import LoRARequest

        number, name = int(given["number"]), f"lowpeak-{given['number']}"
        folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
        save_file(dict(tensors), Path(folder.name) / "adapter_model.safetensors")
        (Path(folder.name) / "adapter_config.json").write_text(json.dumps(given["config"]), encoding="utf-8")
        try:
            worker.add_lora(LoRARequest(name, number, folder.name))
        except Exception as error:
            folder.cleanup()
            raise EngineError(f"vLLM does not take the adapter ({type(error).__name__}: {error}).") from error
        return _LoadedAdapter(Adapter(name, number, folder.name), folder, _adapter_checksums(worker, number))

    def remove(self, worker: Any) -> None:
        worker.remove_lora(self.adapter.number)
        self.folder.cleanup()


def _adapter_checksums(worker: Any, number: int) -> dict[str, str]:
    """The checksums of what vLLM keeps of an adapter; nothing when it keeps it no longer."""
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
