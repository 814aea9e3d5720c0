"""The reference's average on its way to a checkpoint and back: each rank's ranges, nothing gathered."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks
from lowpeak.strategies.outgoing import plain_name
from lowpeak.strategies.shards import load_shards, read_saved, save_shards
from lowpeak.strategies.states import WEIGHT, TrainingState

REFERENCE_FOLDER = "reference"


def save_average(checkpoint: Path, reference: nn.Module, ranks: Ranks) -> None:
    """Write each rank's ranges into a (staged) checkpoint, on all ranks together."""
    save_shards(checkpoint, _state(reference), ranks.processes, REFERENCE_FOLDER)


def load_average(checkpoint: Path, reference: nn.Module, ranks: Ranks) -> None:
    """Copy what `save_average` wrote into this rank's ranges; CheckpointError where it is missing or of another model."""
    if not (checkpoint / REFERENCE_FOLDER).is_dir():
        raise CheckpointError(
            f"{checkpoint / REFERENCE_FOLDER} is missing: the checkpoint was written without sync_ref_model; resume without it."
        )
    saved = read_saved(checkpoint, ranks.processes, REFERENCE_FOLDER)
    state = _state(reference)
    load_shards(checkpoint, saved, state.fragments, REFERENCE_FOLDER)
    state.put_back()


def _state(reference: nn.Module) -> TrainingState:
    state = TrainingState()
    for name, parameter in reference.named_parameters():
        state.add_range(f"{WEIGHT}/{plain_name(name)}", state.range_of(parameter))
    return state
