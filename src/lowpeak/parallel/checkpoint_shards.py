"""Sharded checkpoints of the training state: each rank writes its ranges, and any number of ranks reads them.

torch.distributed.checkpoint writes and reads the files, from plans of flat ranges made here for every strategy; it finds the saved
ranges that cover a requested one. Nothing is gathered, and copies are pieces of at most `_PIECE_BYTES`. An error of one rank
while writing is raised on all ranks; each rank reads by itself.

`ranges.json` lists the files' ranges. torch's metadata file is a pickle, and unpickling can run code.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from lowpeak.errors import CheckpointError
from lowpeak.optim import find_compact
from lowpeak.parallel.checkpoint_state import (
    WEIGHT,
    DecodedValues,
    Fragment,
    SavedState,
    TrainingState,
    allocate_torch_state,
    load_real_values,
    set_group_options,
    torch_training_state,
    trained_parameters,
)
from lowpeak.ranks import Ranks

FOLDER = "shards"
_NUMBERS = "numbers.pt"
_RANGES = "ranges.json"
_PIECE_BYTES = 8 << 20


def has_shards(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a training state that several ranks wrote."""
    return (checkpoint / FOLDER).is_dir()


def save_shards(checkpoint: Path, state: TrainingState, ranks: Ranks, subfolder: str = FOLDER) -> None:
    """Write a training state into a (staged) checkpoint, on all ranks together; an error of one rank is raised on all."""
    folder = checkpoint / subfolder
    pieces = {(p.name, p.start): p for fragment in state.fragments for p in _pieces(fragment)}
    scalars = ranks.gather(_to_cpu(state.scalars))
    with _raise_first_error():
        dcp.save(
            dict.fromkeys((name for name, _ in pieces), None),
            # The staged folder is synced at its commit. No piece is copied ahead: the planner has one copy at a time.
            storage_writer=_Writer(folder, sync_files=False, per_thread_copy_ahead=0),
            planner=_SavePlanner(pieces),
            no_dist=ranks.world_size == 1,
        )
    if ranks.rank == 0:
        merged = {name: values for of_rank in scalars for name, values in of_rank.items()}
        numbers = {"options": state.options, "scalars": merged, "engine": state.engine, "ranks": ranks.world_size}
        _write_torch_file(folder / _NUMBERS, numbers)
    if state.opaque:
        _write_torch_file(_opaque_file(folder, ranks.rank), state.opaque)


def read_saved_state(checkpoint: Path, ranks: Ranks, subfolder: str = FOLDER) -> SavedState:
    """Read which tensors a checkpoint's training state has, and its numbers."""
    folder = checkpoint / subfolder
    metadata = _Reader(folder).read_metadata()
    sizes: dict[str, int] = {}
    states: dict[str, dict[str, torch.dtype]] = {}
    for full_name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        key, _, name = full_name.partition("/")
        sizes[full_name] = tensor.size.numel()
        if key != WEIGHT:
            states.setdefault(name, {})[key] = tensor.properties.dtype
    numbers = torch.load(folder / _NUMBERS, map_location="cpu", weights_only=True)
    others: dict[str, dict[str, Any]] = numbers["scalars"]
    for name, opaque in _read_opaque(folder, numbers["ranks"], ranks).items():
        others.setdefault(name, {}).update(opaque)
    return SavedState(sizes, states, others, numbers["options"], numbers["engine"])


def load_shards(checkpoint: Path, saved: SavedState, fragments: Sequence[Fragment], subfolder: str = FOLDER) -> None:
    """Fill this rank's ranges from a checkpoint of any number of ranks; CheckpointError if sizes differ."""
    _check_fit(checkpoint, saved, fragments)
    by_offset = {(fragment.name, fragment.start): fragment for fragment in fragments}
    with _raise_first_error():
        dcp.load(
            dict.fromkeys((name for name, _ in by_offset), None),
            storage_reader=_Reader(checkpoint / subfolder),
            planner=_LoadPlanner(by_offset),
            no_dist=True,
        )


def load_torch_state(checkpoint: Path, model: nn.Module, optimizer: Any | None, ranks: Ranks) -> None:
    """Load parameters and the states of their torch optimizer; without an optimizer, the parameters alone."""
    params, saved = trained_parameters(model), read_saved_state(checkpoint, ranks)
    compact = find_compact(optimizer)
    if compact is not None:
        set_group_options(compact, saved.options)
        for name, parameter in params.items():
            load_real_values(name, parameter, compact, saved, lambda one: load_shards(checkpoint, saved, one.fragments))
        return
    if optimizer is not None:
        allocate_torch_state(params, optimizer, saved)
    state = torch_training_state(params, optimizer)
    load_shards(checkpoint, saved, state.fragments)
    state.copy_back()


def _check_fit(checkpoint: Path, saved: SavedState, fragments: Sequence[Fragment]) -> None:
    for fragment in fragments:
        numel = saved.sizes.get(fragment.name)
        if numel != fragment.numel:
            kind, _, name = fragment.name.partition("/")
            saved_values = "none" if numel is None else f"{numel} values"
            raise CheckpointError(
                f"{checkpoint} does not fit this run: for {kind} of {name} it has {saved_values}, and the run needs "
                f"{fragment.numel} values: resume with the same model, optim and trained parameters, or start a new run."
            )


def _read_opaque(folder: Path, num_ranks: int, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Read this rank's states that cannot be resharded; CheckpointError on another number of ranks."""
    if not any(folder.glob("opaque_*.pt")):
        return {}
    if num_ranks != ranks.world_size:
        raise CheckpointError(
            f"{folder} was written on {num_ranks} ranks with an optimizer whose states cannot be resharded for "
            f"{ranks.world_size} ranks (they have block scales): resume on {num_ranks} ranks, or train with another optim."
        )
    return torch.load(_opaque_file(folder, ranks.rank), map_location="cpu", weights_only=True)


class _Writer(dcp.FileSystemWriter):
    """A writer whose index is JSON: [start, values, file, offset, bytes] of each piece, by tensor."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        locations = {written.index: written.storage_data for of_rank in results for written in of_rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = []
            for chunk in tensor.chunks:
                at = locations[MetadataIndex(name, chunk.offsets)]
                pieces.append([chunk.offsets[0], chunk.sizes[0], at.relative_path, at.offset, at.length])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "numel": tensor.size.numel(), "pieces": pieces}
        Path(self.path, _RANGES).write_text(json.dumps(tensors), encoding="utf-8")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path, _RANGES)
        if not file.exists():
            raise CheckpointError(
                f"{self.path} has no {_RANGES}, the index of its tensors: remove the folder if the run did not write it, "
                "resume from another checkpoint, or start a new run from the weights (model=that folder)."
            )
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))
        for name, tensor in json.loads(file.read_text(encoding="utf-8")).items():
            chunks = []
            for start, values, path, offset, length in tensor["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size([start]), torch.Size([values])))
                metadata.storage_data[MetadataIndex(name, [start])] = _StorageInfo(Path(path).name, offset, length)
            properties = TensorProperties(dtype=getattr(torch, tensor["dtype"]))
            metadata.state_dict_metadata[name] = TensorStorageMetadata(
                properties, torch.Size([tensor["numel"]]), chunks
            )
        return metadata


class _SavePlanner(DefaultSavePlanner):
    """A plan to write flat ranges; a range that several ranks have is written by one of them."""

    def __init__(self, pieces: Mapping[tuple[str, int], Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._copy: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return a piece's values. A copy is freed when the next piece is written: torch refers to all of a file's tensors."""
        if self._copy is not None:
            self._copy.untyped_storage().resize_(0)
        values = self._pieces[_tensor_offset(write_item.index)].values
        tensor = values.tensor().cpu() if isinstance(values, DecodedValues) else values.cpu()
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch would copy it
            tensor = tensor.clone()
        is_copy = isinstance(values, DecodedValues) or tensor.data_ptr() != values.data_ptr()
        self._copy = tensor if is_copy else None
        return tensor


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, fragments: Mapping[tuple[str, int], Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._fragments = fragments

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for (name, _), fragment in self._fragments.items():
            tensor = self.metadata.state_dict_metadata[name]
            assert isinstance(tensor, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, tensor, [_chunk(fragment)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self._fragments[_tensor_offset(read_item.dest_index)].values
        assert isinstance(values, Tensor)
        return values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])


def _pieces(fragment: Fragment) -> Iterator[Fragment]:
    count = max(1, _PIECE_BYTES // fragment.values.element_size())
    for first in range(0, fragment.values.numel(), count):
        yield Fragment(fragment.name, fragment.numel, fragment.start + first, fragment.values[first : first + count])


def _write_item(piece: Fragment) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(piece), properties=TensorProperties(dtype=piece.values.dtype), size=torch.Size([piece.numel])
    )
    return WriteItem(MetadataIndex(piece.name, [piece.start]), WriteItemType.SHARD, tensor_data=data)


def _chunk(fragment: Fragment) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([fragment.start]), torch.Size([fragment.values.numel()]))


def _tensor_offset(index: MetadataIndex) -> tuple[str, int]:
    assert index.offset is not None
    return index.fqn, index.offset[0]


def _to_cpu(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in scalars.items()
    }


def _write_torch_file(file: Path, data: Any) -> None:
    # torch.save to a full disk raises a RuntimeError; writing through Python raises a plain OSError.
    buffer = io.BytesIO()
    torch.save(data, buffer)
    file.write_bytes(buffer.getvalue())


def _opaque_file(folder: Path, rank: int) -> Path:
    return folder / f"opaque_{rank}.pt"


@contextmanager
def _raise_first_error() -> Iterator[None]:
    """Raise the first failed rank's error instead of torch's collection; silence torch's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        try:
            yield
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
            if isinstance(reason, OSError) and dist.is_initialized() and rank != dist.get_rank():
                reason = type(reason)(reason.errno, f"{reason.strerror} (on rank {rank})")
            raise reason from error
