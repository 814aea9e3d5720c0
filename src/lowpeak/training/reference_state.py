"""The reference's average on its way to a checkpoint and back: this rank's shards, nothing gathered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from lowpeak.errors import CheckpointError

REFERENCE_FILE = "lowpeak_reference.safetensors"


def save_average(folder: Path, shards: Mapping[str, Tensor]) -> None:
    """Write the shards into a (staged) checkpoint."""
    data = safetensors.torch.save({name: shard.detach().cpu().contiguous() for name, shard in shards.items()})
    (folder / REFERENCE_FILE).write_bytes(data)


def load_average(folder: Path, shards: Mapping[str, Tensor]) -> None:
    """Copy what `save_average` wrote into the shards; CheckpointError where it is missing or of another model."""
    file = folder / REFERENCE_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing: the checkpoint was written without sync_ref_model; resume without it."
        )
    saved = safetensors.torch.load_file(file)
    if saved.keys() != shards.keys():
        raise CheckpointError(f"{file} belongs to another model: its weights have other names.")
    with torch.no_grad():
        for name, shard in shards.items():
            shard.copy_(saved[name])
