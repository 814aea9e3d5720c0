"""A model in the Hugging Face layout, written slice by slice: what is alive beyond the shards is one slice.

Names are those of the model's checkpoint on the hub. Where transformers joins a checkpoint's tensors on loading (the experts of
MoE models), its own reverse mapping cuts them again; such a tensor is put together on rank 0, in host memory, one at a time.
"""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from lowpeak.errors import CheckpointError
from lowpeak.models import is_critics
from lowpeak.parallel import parts_tied, plain_name
from lowpeak.records import Layout, WeightSlice

SLICE_BYTES = 8 << 20
FILE_BYTES = 50 * 10**9  # transformers' own
_ALIGNMENT = 8
_DTYPE_NAMES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}


def write_weights(
    folder: Path | None, model: Any, layout: Layout, slices: Iterable[WeightSlice], file_bytes: int = FILE_BYTES
) -> None:
    """Write the slices of `layout` into `folder` as `from_pretrained` reads them; without a folder, take them and drop them.

    Every rank calls it, because slices are broadcast: an error in writing is raised when all slices have come.
    """
    pieces = iter(slices)
    try:
        if folder is not None:
            writer = _Writer(folder, model, layout, file_bytes)
            for piece in pieces:
                writer.take(piece)
    finally:
        deque(pieces, maxlen=0)


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


class TensorFiles:
    """`model.safetensors`, or several files of at most `max_bytes` (or one tensor) with their index, written range by range.

    Each file's header is written first, so that a range can go straight to its place. Until its last range has come a file
    holds zeros, so the folder is a stage. Neither safetensors nor torch's distributed checkpoint writes a tensor in ranges.
    """

    def __init__(self, folder: Path, layout: Layout, max_bytes: int) -> None:
        self._places: dict[str, tuple[Path, int]] = {}  # file and offset
        split = split_state_dict_into_shards_factory(
            dict(layout),
            get_storage_size=_nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_bytes,
        )
        for file, names in split.filename_to_tensors.items():
            self._begin(folder / file, layout, names)
        if split.is_sharded:
            numbers = sum(torch.Size(shape).numel() for shape, _ in layout.values())
            metadata = {"total_parameters": numbers, **split.metadata}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write values [start, start + len(values)) of the tensor laid out flat."""
        file, offset = self._places[name]
        data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        offset += start * values.element_size()
        with file.open("r+b") as stream:
            while data:
                written = os.pwrite(stream.fileno(), data, offset)
                data, offset = data[written:], offset + written

    def _begin(self, file: Path, layout: Layout, names: Sequence[str]) -> None:
        """Write a file's header and reserve its tensors' places: wide dtypes come first, so that each is aligned.

        The header is its length in 8 bytes, then JSON (github.com/huggingface/safetensors, "Format").
        """
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        size = 0
        for name in sorted(names, key=lambda name: -layout[name][1].itemsize):
            shape, dtype = layout[name]
            start, size = size, size + _nbytes(layout[name])
            entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, size]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        with file.open("wb") as stream:
            stream.write(header)
            stream.truncate(len(header) + size)
        for name in names:
            self._places[name] = file, len(header) + entries[name]["data_offsets"][0]


class _Writer:
    """Writes slices of a model's parameters under the names of its checkpoint."""

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
            self._missing[piece.name] = torch.Size(piece.shape).numel()
            self._parts[piece.name] = torch.empty(self._missing[piece.name], dtype=piece.dtype)
        self._parts[piece.name][piece.start : piece.start + len(piece.values)] = piece.values
        self._missing[piece.name] -= len(piece.values)
        together = self._joined[piece.name]
        if all(self._missing.get(name) == 0 for name in together):
            whole = {name: self._parts.pop(name).view(self._layout[name][0]) for name in together}
            for name, tensor in revert_weight_conversion(self._model, whole).items():
                self._files.write(name, 0, tensor)

    def _file_layout(self, buffers: Mapping[str, Tensor]) -> Layout:
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in self._layout:
            group = self._joined.get(name, (name,))
            if name == group[0]:
                made = _reverted(self._model, self._layout, group)
                found |= made
                self._names[name] = next(iter(made))  # of one that is renamed only
        return found | {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}


def _joined(model: Any, layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return the parameters that are not a checkpoint's tensors as they are, each with those that it has to be cut with.

    As few as possible together: each alone, else those of a layer, as long as this gives what all at once give.
    """
    changed = [name for name in layout if not _is_renamed_only(model, layout, name)]
    if not changed:
        return {}
    everything = _reverted(model, layout, changed)
    for groups in ([(name,) for name in changed], _by_layer(changed), [tuple(changed)]):
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for group in groups:
            found |= _reverted(model, layout, group)
        if found == everything:
            return {name: group for group in groups for name in group}
    raise CheckpointError("transformers' conversion of the weights' names cannot be reversed for this model.")


def _is_renamed_only(model: Any, layout: Layout, name: str) -> bool:
    before = _meta(layout, (name,))
    after = revert_weight_conversion(model, before)
    return len(after) == 1 and next(iter(after.values())) is before[name]


def _by_layer(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return names that agree up to their first number together."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
        groups.setdefault(tuple(parts[: number + 1]), []).append(name)
    return [tuple(group) for group in groups.values()]


def _meta(layout: Layout, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.empty(layout[name][0], dtype=layout[name][1], device="meta") for name in names}


def _reverted(model: Any, layout: Layout, names: Iterable[str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    reverted = revert_weight_conversion(model, _meta(layout, names))
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in reverted.items()}


def _nbytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = entry
    return torch.Size(shape).numel() * dtype.itemsize


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, which every rank has whole."""
    return {
        plain_name(f"{prefix}.{name}".removeprefix(".")): buffer
        for prefix, module in model.named_modules()
        if not is_critics(prefix)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
