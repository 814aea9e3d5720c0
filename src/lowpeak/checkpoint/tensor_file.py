"""safetensors files written as their values come: header first, then any range of any tensor at its place.

The format is public (huggingface/safetensors): 8 bytes with the header's length, the header as JSON with each tensor's dtype,
shape and place, and then the tensors' bytes, one after another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # names, shapes, dtypes

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class _Place:
    file: int
    offset: int
    itemsize: int


class TensorFiles:
    """`model.safetensors`, or `model-00001-of-0000N.safetensors` with their index where tensors need several.

    No file but one tensor's own exceeds `max_bytes`. Tensors of wider dtypes come first, so that each is aligned. Until its last
    value has come a file holds zeros, so the folder is a stage.
    """

    def __init__(self, folder: Path, layout: Layout, max_bytes: int) -> None:
        self._places: dict[str, _Place] = {}
        self._files: list[int] = []
        groups = _split(layout, max_bytes)
        names = [_file_name(number, len(groups)) for number in range(1, len(groups) + 1)]
        try:
            for name, group in zip(names, groups, strict=True):
                self._open(folder / name, group)
        except BaseException:
            self.close()
            raise
        if len(groups) > 1:
            _write_index(folder, layout, dict(zip(names, groups, strict=True)))

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Write values [start, start + len(values)) of the tensor laid out flat."""
        place = self._places[name]
        data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        offset = place.offset + start * place.itemsize
        while data:
            written = os.pwrite(self._files[place.file], data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path, layout: Layout) -> None:
        header, offsets, size = _header(layout)
        number = len(self._files)
        self._files.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        os.write(self._files[number], header)
        os.truncate(self._files[number], len(header) + size)
        for name, offset in offsets.items():
            self._places[name] = _Place(number, len(header) + offset, layout[name][1].itemsize)


def _header(layout: Layout) -> tuple[bytes, dict[str, int], int]:
    """A file's first bytes, each tensor's place behind them, and the size of all tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    size = 0
    for name in sorted(layout, key=lambda name: -layout[name][1].itemsize):
        shape, dtype = layout[name]
        offsets[name], end = size, size + _nbytes(shape, dtype)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets, size


def _nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _split(layout: Layout, max_bytes: int) -> list[Layout]:
    """The tensors in order, cut into files."""
    groups: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{}]
    size = 0
    for name, (shape, dtype) in layout.items():
        nbytes = _nbytes(shape, dtype)
        if groups[-1] and size + nbytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = (shape, dtype)
        size += nbytes
    return list(groups)


def _file_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def _write_index(folder: Path, layout: Layout, files: Mapping[str, Layout]) -> None:
    sizes = {name: _nbytes(shape, dtype) for name, (shape, dtype) in layout.items()}
    numbers = sum(torch.Size(shape).numel() for shape, _ in layout.values())
    index = {
        "metadata": {"total_parameters": numbers, "total_size": sum(sizes.values())},
        "weight_map": {name: file for file, group in files.items() for name in group},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
