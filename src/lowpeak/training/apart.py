"""Weights that a checkpoint holds beside the model's own, each rank's ranges, nothing gathered: a reference's average, a critic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from lowpeak.errors import CheckpointError
from lowpeak.ranks import Ranks
from lowpeak.strategies.outgoing import plain_name
from lowpeak.strategies.shards import load_shards, read_saved, save_shards
from lowpeak.strategies.states import WEIGHT, TrainingState

REFERENCE_FOLDER = "reference"
CRITIC_FOLDER = "critic"
_WITHOUT = {
    REFERENCE_FOLDER: "the checkpoint was written without sync_ref_model; resume without it.",
    CRITIC_FOLDER: "the checkpoint holds no critic; resume from one that PPO wrote.",
}


def save_apart(checkpoint: Path, folder: str, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Write each rank's ranges into a folder of a (staged) checkpoint, on all ranks together."""
    save_shards(checkpoint, _state(parameters), ranks.processes, folder)


def load_apart(checkpoint: Path, folder: str, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Copy what `save_apart` wrote into this rank's ranges; CheckpointError where it is missing or of another model."""
    if not (checkpoint / folder).is_dir():
        raise CheckpointError(f"{checkpoint / folder} is missing: {_WITHOUT[folder]}")
    state = _state(parameters)
    saved = read_saved(checkpoint, ranks.processes, folder)
    load_shards(checkpoint, saved, state.fragments, folder)
    state.put_back()


def _state(parameters: Mapping[str, nn.Parameter]) -> TrainingState:
    state = TrainingState()
    for name, parameter in parameters.items():
        state.add_range(f"{WEIGHT}/{plain_name(name)}", state.range_of(parameter))
    return state
