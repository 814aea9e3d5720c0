"""A model in the Hugging Face layout, written slice by slice: what is alive beyond the shards is one slice.

Names are those of the model's checkpoint on the hub. Where transformers joins a checkpoint's tensors on loading (the experts of
MoE models), its own reverse mapping cuts them again; such a tensor is put together on rank 0, in host memory, one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from lowpeak.checkpoint.tensor_file import Layout, TensorFiles
from lowpeak.critic import is_critics
from lowpeak.errors import CheckpointError
from lowpeak.records import WeightSlice
from lowpeak.strategies.outgoing import parts_tied, plain_name

SLICE_BYTES = 8 << 20
FILE_BYTES = 50 * 10**9  # transformers' own


def write_weights(
    folder: Path | None, model: Any, layout: Layout, slices: Iterable[WeightSlice], file_bytes: int = FILE_BYTES
) -> None:
    """Write the slices of `layout` into `folder` as `from_pretrained` reads them; without a folder, take them and drop them.

    Every rank calls it, because slices are broadcast: an error in writing is raised when all slices have come.
    """
    failed: Exception | None = None
    writer: Writer | None = None
    try:
        writer = None if folder is None else Writer(folder, model, layout, file_bytes)
    except Exception as error:
        failed = error
    for piece in slices:
        try:
            if writer is not None and failed is None:
                writer.take(piece)
        except Exception as error:
            failed = error
    if writer is not None:
        writer.close()
    if failed is not None:
        raise failed


class Writer:
    """Takes slices of a model's parameters and writes them under the names of its checkpoint."""

    def __init__(self, folder: Path, model: Any, layout: Layout, file_bytes: int) -> None:
        self._model = model
        self._layout = layout
        self._names: dict[str, str] = {}
        self._joined = _joined(model, layout)
        self._parts: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        buffers = _buffers(model)
        self._files = TensorFiles(folder, self._file_layout(buffers), file_bytes)
        for name, buffer in buffers.items():
            self._files.write(name, 0, buffer)

    def take(self, piece: WeightSlice) -> None:
        """Write one slice, or keep it until its tensor, and those that are cut with it, are whole."""
        if piece.name not in self._joined:
            self._files.write(self._names[piece.name], piece.start, piece.values)
            return
        if piece.name not in self._parts:
            self._parts[piece.name] = torch.empty(torch.Size(piece.shape).numel(), dtype=piece.dtype)
            self._missing[piece.name] = torch.Size(piece.shape).numel()
        self._parts[piece.name][piece.start : piece.start + len(piece.values)] = piece.values
        self._missing[piece.name] -= len(piece.values)
        together = self._joined[piece.name]
        if all(self._missing.get(name) == 0 for name in together):
            whole = {name: self._parts.pop(name).view(self._layout[name][0]) for name in together}
            for name, tensor in revert_weight_conversion(self._model, whole).items():
                self._files.write(name, 0, tensor)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _file_layout(self, buffers: Mapping[str, Tensor]) -> Layout:
        """Names, shapes and dtypes as the files have them."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in self._layout:
            group = self._joined.get(name, (name,))
            if name == group[0]:
                for new, tensor in revert_weight_conversion(self._model, _meta(self._layout, group)).items():
                    found[new] = (tuple(tensor.shape), tensor.dtype)
                    self._names[name] = new
        return found | {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}


def _joined(model: Any, layout: Layout) -> dict[str, tuple[str, ...]]:
    """The parameters that are not a checkpoint's tensors as they are, each with those that it has to be cut with.

    As few as possible together: each alone, else those of a layer, as long as this gives what all at once give.
    """
    changed = [name for name in layout if not _is_renamed_only(model, layout, name)]
    if not changed:
        return {}
    everything = _shapes(revert_weight_conversion(model, _meta(layout, changed)))
    for groups in ([(name,) for name in changed], _by_layer(changed), [tuple(changed)]):
        found: dict[str, tuple[int, ...]] = {}
        for group in groups:
            found |= _shapes(revert_weight_conversion(model, _meta(layout, group)))
        if found == everything:
            return {name: group for group in groups for name in group}
    raise CheckpointError("transformers' conversion of the weights' names cannot be reversed for this model.")


def _is_renamed_only(model: Any, layout: Layout, name: str) -> bool:
    before = _meta(layout, (name,))
    after = revert_weight_conversion(model, before)
    return len(after) == 1 and next(iter(after.values())) is before[name]


def _by_layer(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names that agree up to their first number."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
        groups.setdefault(tuple(parts[: number + 1]), []).append(name)
    return [tuple(group) for group in groups.values()]


def _meta(layout: Layout, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.empty(layout[name][0], dtype=layout[name][1], device="meta") for name in names}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, which every rank has whole."""
    return dict(_persistent(model))


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if is_critics(prefix):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer


def write_settings(folder: Path, model: Any, layout: Layout) -> None:
    """Write config and generation config for these weights, and the code of a model that brings its own."""
    config = copy.deepcopy(model.config)
    if parts_tied(model, layout):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    dtype = next(dtype for _, dtype in layout.values() if dtype.is_floating_point)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
