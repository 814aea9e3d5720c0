"""Export of a model in the Hugging Face layout, slice by slice.

Beyond the shards only one slice is in memory. Tensors have their names in the model's checkpoint on the hub.
transformers merges some of a checkpoint's tensors when it loads them (the experts of MoE models); its reverse mapping
splits them again. For that, rank 0 assembles such tensors in host memory, as few at a time as the mapping allows.
"""

from __future__ import annotations

import copy
import json
import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from lowpeak.errors import CheckpointError
from lowpeak.parallel import unties_head
from lowpeak.records import TensorAssembler, WeightLayout, WeightSlice

FILE_BYTES = 50 * 10**9  # transformers' default
_ALIGNMENT = 8
_DTYPE_NAMES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}


def write_weights(
    folder: Path | None,
    model: nn.Module,
    layout: WeightLayout,
    slices: Iterable[WeightSlice],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the slices of `layout` into `folder`, as `from_pretrained` reads them; without a folder, discard them.

    All ranks must call it, because producing a slice runs collectives.
    """
    remaining = iter(slices)
    try:
        if folder is not None:
            writer = _Writer(folder, model, layout, file_bytes)
            for piece in remaining:
                writer.write(piece)
    finally:
        # Also after an error consume all slices: the other ranks wait in their collectives.
        deque(remaining, maxlen=0)


def write_configs(folder: Path, model: Any, layout: WeightLayout) -> None:
    """Write config and generation config for these weights, and a model's custom code."""
    config = copy.deepcopy(model.config)
    if unties_head(model, layout):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    dtype = next(dtype for _, dtype in layout.values() if dtype.is_floating_point)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


class SafetensorsWriter:
    """A safetensors writer for ranges of tensors, which neither safetensors nor torch's distributed checkpoint offers.

    It writes `model.safetensors`, or several files of at most `max_bytes` (or one tensor) with their index. Each file's header
    comes first, so that a range is written directly to its offset. Missing ranges are zeros: write into a staged folder.
    """

    def __init__(self, folder: Path, layout: WeightLayout, max_bytes: int) -> None:
        self._offsets: dict[str, tuple[Path, int]] = {}  # each tensor's file and offset
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
        """Write elements [start, start + len(values)) of a flattened tensor."""
        file, offset = self._offsets[name]
        data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        offset += start * values.element_size()
        with file.open("r+b") as stream:
            while data:
                written = os.pwrite(stream.fileno(), data, offset)
                data, offset = data[written:], offset + written

    def _begin(self, file: Path, layout: WeightLayout, names: Sequence[str]) -> None:
        """Write a file's header, and extend the file to its full size.

        The header is its length in 8 bytes, then JSON (github.com/huggingface/safetensors, "Format"). Wide dtypes come first, so
        that every tensor is aligned.
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
            self._offsets[name] = file, len(header) + entries[name]["data_offsets"][0]


class _Writer:
    """Writes slices of a model's tensors under the names of its checkpoint."""

    def __init__(self, folder: Path, model: nn.Module, layout: WeightLayout, file_bytes: int) -> None:
        self._model = model
        self._layout = layout
        self._names: dict[str, str] = {}  # of parameters that the checkpoint only renames
        self._groups = _conversion_groups(model, layout)
        self._assembler = TensorAssembler()
        self._complete: dict[str, Tensor] = {}  # tensors that wait for others of their group
        self._files = SafetensorsWriter(folder, self._file_layout(), file_bytes)

    def write(self, piece: WeightSlice) -> None:
        """Write one slice, or keep it until all tensors of its group are complete, and write their conversion."""
        if piece.name not in self._groups:
            self._files.write(self._names[piece.name], piece.start, piece.values)
            return
        complete = self._assembler.add(piece.name, piece.shape, piece.start, piece.values)
        if complete is None:
            return
        self._complete[piece.name] = complete
        names = self._groups[piece.name]
        if self._complete.keys() >= set(names):
            group = {name: self._complete.pop(name) for name in names}
            for name, tensor in revert_weight_conversion(self._model, group).items():
                self._files.write(name, 0, tensor)

    def _file_layout(self) -> WeightLayout:
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in self._layout:
            group = self._groups.get(name, (name,))
            if name == group[0]:
                converted = _converted_layout(self._model, self._layout, group)
                layout |= converted
                self._names[name] = next(iter(converted))
        return layout


def converts_weights(model: nn.Module, layout: WeightLayout) -> bool:
    """Return whether a checkpoint's tensors have other names or shapes than the model's, such as experts one by one."""
    return _converted_layout(model, layout, layout).keys() != layout.keys()


def _conversion_groups(model: nn.Module, layout: WeightLayout) -> dict[str, tuple[str, ...]]:
    """Return the parameters whose tensors differ from the checkpoint's, each with the group it must be converted with.

    Groups are as small as possible: single parameters, else those of a layer, else all. A grouping is right if it converts to
    the same tensors as all parameters at once.
    """
    changed = [name for name in layout if not _is_renamed_only(model, layout, name)]
    if not changed:
        return {}
    expected = _converted_layout(model, layout, changed)
    for groups in ([(name,) for name in changed], _by_layer(changed), [tuple(changed)]):
        converted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for group in groups:
            converted |= _converted_layout(model, layout, group)
        if converted == expected:
            return {name: group for group in groups for name in group}
    raise CheckpointError(
        "transformers cannot reverse its conversion of this model's weights, so the model cannot be exported."
    )


def _is_renamed_only(model: nn.Module, layout: WeightLayout, name: str) -> bool:
    before = _meta(layout, (name,))
    after = revert_weight_conversion(model, before)
    return len(after) == 1 and next(iter(after.values())) is before[name]


def _by_layer(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group names that are equal up to their first number."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), -1)
        groups.setdefault(tuple(parts[: number + 1]), []).append(name)
    return [tuple(group) for group in groups.values()]


def _meta(layout: WeightLayout, names: Iterable[str]) -> dict[str, Tensor]:
    return {name: torch.empty(layout[name][0], dtype=layout[name][1], device="meta") for name in names}


def _converted_layout(
    model: nn.Module, layout: WeightLayout, names: Iterable[str]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    reverted = revert_weight_conversion(model, _meta(layout, names))
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in reverted.items()}


def _nbytes(entry: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = entry
    return torch.Size(shape).numel() * dtype.itemsize
