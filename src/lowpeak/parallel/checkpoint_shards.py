"""A training state on the disk: each rank writes its ranges, and any number of ranks reads them again.

torch.distributed.checkpoint carries them: its planners' write and read items are made of flat ranges here, whoever cut
them, and it finds out which saved ranges cover a wanted one. Nothing is gathered, and what is copied at a time is a piece
of at most `_PIECE_BYTES`. Errors of one rank reach all of them in writing; reading is each rank's own.

Which ranges lie where is in `ranges.json`. torch's own file of them is a pickle, and unpickling runs what it says.
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
from lowpeak.parallel.checkpoint_state import (
    WEIGHT,
    Fragment,
    Saved,
    TrainingState,
    make_torch_state,
    torch_state,
    trained,
)
from lowpeak.ranks import Ranks

FOLDER = "shards"
_NUMBERS = "numbers.pt"
_RANGES = "ranges.json"
_PIECE_BYTES = 8 << 20


def has_shards(checkpoint: Path) -> bool:
    """Whether a checkpoint holds a training state of several ranks."""
    return (checkpoint / FOLDER).is_dir()


def save_shards(checkpoint: Path, state: TrainingState, ranks: Ranks, inside: str = FOLDER) -> None:
    """Write a training state into a (staged) checkpoint, on all ranks together; all raise what one of them met."""
    folder = checkpoint / inside
    pieces = {(p.name, p.start): p for fragment in state.fragments for p in _pieces(fragment)}
    scalars = ranks.gather(_on_cpu(state.scalars))
    with _raising_the_first():
        dcp.save(
            dict.fromkeys((name for name, _ in pieces), None),
            storage_writer=_Writer(folder, sync_files=False),  # the staged folder is synced as a whole
            planner=_SavePlanner(pieces),
            no_dist=ranks.world_size == 1,
        )
    if ranks.rank == 0:
        merged = {name: values for found in scalars for name, values in found.items()}
        numbers = {"options": state.options, "scalars": merged, "engine": state.engine, "ranks": ranks.world_size}
        _save(folder / _NUMBERS, numbers)
    if state.opaque:
        _save(_opaque_file(folder, ranks.rank), state.opaque)


def read_saved(checkpoint: Path, ranks: Ranks, inside: str = FOLDER) -> Saved:
    """Return what a checkpoint's training state consists of."""
    folder = checkpoint / inside
    metadata = _Reader(folder).read_metadata()
    sizes: dict[str, int] = {}
    states: dict[str, dict[str, torch.dtype]] = {}
    for full, found in metadata.state_dict_metadata.items():
        assert isinstance(found, TensorStorageMetadata)
        key, _, name = full.partition("/")
        sizes[full] = found.size.numel()
        if key != WEIGHT:
            states.setdefault(name, {})[key] = found.properties.dtype
    numbers = torch.load(folder / _NUMBERS, map_location="cpu", weights_only=True)
    others: dict[str, dict[str, Any]] = numbers["scalars"]
    for name, opaque in _read_opaque(folder, numbers["ranks"], ranks).items():
        others.setdefault(name, {}).update(opaque)
    return Saved(sizes, states, others, numbers["options"], numbers["engine"])


def load_shards(checkpoint: Path, saved: Saved, wanted: Sequence[Fragment], inside: str = FOLDER) -> None:
    """Fill this rank's ranges from a checkpoint, whatever ranks wrote it; CheckpointError where they do not fit."""
    _check_fit(checkpoint, saved, wanted)
    fragments = {(fragment.name, fragment.start): fragment for fragment in wanted}
    with _raising_the_first():
        dcp.load(
            dict.fromkeys((name for name, _ in fragments), None),
            storage_reader=_Reader(checkpoint / inside),
            planner=_LoadPlanner(fragments),
            no_dist=True,
        )


def load_torch_state(checkpoint: Path, model: nn.Module, optimizer: Any | None, ranks: Ranks) -> None:
    """Fill parameters that a torch optimizer steps itself, and its states; without an optimizer, the parameters alone."""
    named, saved = trained(model), read_saved(checkpoint, ranks)
    if optimizer is not None:
        make_torch_state(named, optimizer, saved)
    state = torch_state(named, optimizer)
    load_shards(checkpoint, saved, state.fragments)
    state.put_back()


def _check_fit(checkpoint: Path, saved: Saved, fragments: Sequence[Fragment]) -> None:
    for fragment in fragments:
        numel = saved.sizes.get(fragment.name)
        if numel != fragment.numel:
            kind, _, name = fragment.name.partition("/")
            found = "none" if numel is None else f"{numel} values"
            raise CheckpointError(
                f"{checkpoint} does not fit this run: of {kind} of {name} it holds {found}, and {fragment.numel} are needed; "
                "resume with the same model, optim and trained parameters, or start a new run."
            )


def _read_opaque(folder: Path, num_ranks: int, ranks: Ranks) -> dict[str, dict[str, Tensor]]:
    """Return states that cannot be cut anew, on the ranks that they were of."""
    if not any(folder.glob("opaque_*.pt")):
        return {}
    if num_ranks != ranks.world_size:
        raise CheckpointError(
            f"{folder} was written on {num_ranks} ranks with an optimizer whose states cannot be cut for "
            f"{ranks.world_size} (they have scales of blocks): resume on {num_ranks} ranks, or train with another optim."
        )
    return torch.load(_opaque_file(folder, ranks.rank), map_location="cpu", weights_only=True)


class _Writer(dcp.FileSystemWriter):
    """Writes the ranges' places as JSON: [start, values, file, offset, bytes] of each piece, by tensor."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {written.index: written.storage_data for each in results for written in each}
        tensors = {}
        for name, found in metadata.state_dict_metadata.items():
            assert isinstance(found, TensorStorageMetadata)
            pieces = []
            for chunk in found.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                pieces.append([chunk.offsets[0], chunk.sizes[0], place.relative_path, place.offset, place.length])
            dtype = str(found.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "numel": found.size.numel(), "pieces": pieces}
        Path(self.path, _RANGES).write_text(json.dumps(tensors), encoding="utf-8")


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path, _RANGES)
        if not file.exists():
            raise CheckpointError(
                f"{self.path} has no {_RANGES}, so nothing tells where its tensors lie: remove the folder if the run did not write "
                "it, resume from another checkpoint, or start a new run from the weights (model=that folder)."
            )
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))
        for name, found in json.loads(file.read_text(encoding="utf-8")).items():
            chunks = []
            for start, values, path, offset, length in found["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size([start]), torch.Size([values])))
                metadata.storage_data[MetadataIndex(name, [start])] = _StorageInfo(Path(path).name, offset, length)
            properties = TensorProperties(dtype=getattr(torch, found["dtype"]))
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, torch.Size([found["numel"]]), chunks)
        return metadata


class _SavePlanner(DefaultSavePlanner):
    """Writes pieces of flat ranges; ranges that several ranks have are written by one of them."""

    def __init__(self, pieces: Mapping[tuple[str, int], Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._pieces[_place(write_item.index)].values


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, fragments: Mapping[tuple[str, int], Fragment]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._fragments = fragments

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for (name, _), fragment in self._fragments.items():
            found = self.metadata.state_dict_metadata[name]
            assert isinstance(found, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, found, [_chunk(fragment)])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        values = self._fragments[_place(read_item.dest_index)].values
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


def _place(index: MetadataIndex) -> tuple[str, int]:
    assert index.offset is not None
    return index.fqn, index.offset[0]


def _on_cpu(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in scalars.items()
    }


def _save(file: Path, data: Any) -> None:
    """Made in memory and written by Python, so that a full disk is a plain OSError."""
    buffer = io.BytesIO()
    torch.save(data, buffer)
    file.write_bytes(buffer.getvalue())


def _opaque_file(folder: Path, rank: int) -> Path:
    return folder / f"opaque_{rank}.pt"


@contextmanager
def _raising_the_first() -> Iterator[None]:
    """Raise what the first rank met for which torch failed; without the warning that a process is alone, where that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to")
        try:
            yield
        except CheckpointException as error:
            rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
            if isinstance(reason, OSError) and dist.is_initialized() and rank != dist.get_rank():
                reason = type(reason)(reason.errno, f"{reason.strerror} (on rank {rank})")
            raise reason from error
