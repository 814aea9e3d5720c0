"""The training state of one rank: flat ranges of trained weights and optimizer states, and a few numbers.

A range stores its position in the unsharded tensor, and nothing about other ranks. So another strategy, on another number of
ranks, can read it (`checkpoint_shards.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lowpeak.errors import CheckpointError
from lowpeak.optim import MOMENTS, CompactAdamW, UpdatedShard, find_compact
from lowpeak.parallel.parameters import clean_parameter_name

WEIGHT = "weight"  # the key of weights, next to the optimizer's keys of states (exp_avg, ...)


@dataclass(frozen=True)
class DecodedValues:
    """fp32 values [start, stop) of a tensor that is stored in another format; `decode(start, stop)` returns them."""

    decode: Callable[[int, int], Tensor]
    start: int
    stop: int
    dtype: torch.dtype = torch.float32

    def numel(self) -> int:
        return self.stop - self.start

    def element_size(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, piece: slice) -> DecodedValues:
        start, stop, _ = piece.indices(self.numel())
        return replace(self, start=self.start + start, stop=self.start + stop)

    def tensor(self) -> Tensor:
        return self.decode(self.start, self.stop)


@dataclass(frozen=True)
class Fragment:
    """Values [start, start + len(values)) of a tensor of `numel` values; `values` is a view, or decoded piece by piece."""

    name: str
    numel: int
    start: int
    values: Tensor | DecodedValues


@dataclass(frozen=True)
class SavedState:
    """The contents of a checkpoint's training state.

    `sizes` maps full tensor names to their numbers of values. `states` maps each parameter to the dtypes of its optimizer states
    that have one value per weight; `others` are its remaining states, scalars or this rank's opaque ones. `options` are the
    parameter groups' options, `engine` the counters of DeepSpeed's engine.
    """

    sizes: Mapping[str, int]
    states: Mapping[str, Mapping[str, torch.dtype]]
    others: Mapping[str, Mapping[str, Any]]
    options: list[dict[str, Any]]
    engine: Mapping[str, Any]


@dataclass
class TrainingState:
    """This rank's part of a training state; `opaque` are states that cannot be resharded, such as block scales."""

    fragments: list[Fragment] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    opaque: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    row_copies: list[tuple[DTensor, DTensor]] = field(default_factory=list)

    def fragment_of_parameter(self, tensor: Any) -> Fragment:
        """Return this rank's range of a tensor; a tensor that tensor parallelism sharded by columns is resharded by rows.

        The resharded rows are a copy, made by the TP group together; `copy_back` copies loaded values to the tensor.
        """
        rows = row_sharded(tensor)
        if rows is not tensor:
            self.row_copies.append((tensor, rows))
        return local_fragment(rows)

    def copy_back(self) -> None:
        """Copy loaded rows to the tensors that are sharded by columns; all processes of a TP group call it together."""
        with torch.no_grad():
            for tensor, rows in self.row_copies:
                tensor.copy_(rows.redistribute(placements=tensor.placements))

    def add(
        self, name: str, states: Mapping[str, Any], like: Tensor, fragment_of: Callable[[Tensor], Fragment]
    ) -> None:
        """Add a parameter's states: those in the shape of `like` as ranges, by `fragment_of`; the others as scalars or opaque."""
        for key, value in states.items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                self.add_fragment(f"{key}/{name}", fragment_of(value))
            elif isinstance(value, Tensor) and value.numel() > 1:
                self.opaque.setdefault(name, {})[key] = value
            else:
                self.scalars.setdefault(name, {})[key] = value

    def add_fragment(self, name: str, fragment: Fragment) -> None:
        """Add a range under a name, unless it is empty: a rank may have no values of a small tensor."""
        if fragment.values.numel():
            self.fragments.append(replace(fragment, name=name))


def local_fragment(tensor: Any) -> Fragment:
    """Return this rank's range of a tensor: its rows under FSDP2, its values under ZeRO-3, else the whole tensor."""
    if hasattr(tensor, "ds_tensor"):
        local = tensor.ds_tensor.detach().view(-1)
        start = torch.distributed.get_rank(tensor.ds_process_group) * local.numel()
        return Fragment("", tensor.ds_numel, start, local[: max(0, tensor.ds_numel - start)])
    if not isinstance(tensor, DTensor):
        return Fragment("", tensor.numel(), 0, tensor.detach().view(-1))
    values = tensor.to_local().detach().view(-1)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert not any(offsets[1:]), "the tensor is sharded by rows"
    start = offsets[0] * (tensor.numel() // tensor.shape[0]) if offsets else 0
    return Fragment("", tensor.numel(), start, values)


def first_position(parameter: nn.Parameter) -> int:
    """Return the position in the unsharded parameter of this rank's first value."""
    if hasattr(parameter, "ds_tensor"):
        return local_fragment(parameter).start
    if not isinstance(parameter, DTensor):
        return 0
    return position_of_block(
        parameter.shape,
        *compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements),
    )


def position_of_block(shape: Sequence[int], block: Sequence[int], offsets: Sequence[int]) -> int:
    """Return the first position of a rank's block, such that the blocks of all ranks are disjoint ranges.

    Blocks of rows are in the parameter's order. Of blocks of columns, all rows of one come before the next.
    """
    if not shape:
        return 0
    columns = sum(offset * (math.prod(shape) // size) for offset, size in zip(offsets[1:], shape[1:], strict=True))
    return columns + offsets[0] * math.prod(block[1:])


def is_row_sharded(tensor: Tensor) -> bool:
    """Return whether a rank has whole rows of a tensor: tensor parallelism shards some by columns."""
    return not isinstance(tensor, DTensor) or all(getattr(each, "dim", 0) == 0 for each in tensor.placements)


def row_sharded(tensor: Any) -> Any:
    """Return a tensor sharded by rows: the tensor itself, or a copy of one that is sharded by columns."""
    if is_row_sharded(tensor):
        return tensor
    placements = [Shard(0) if getattr(placement, "dim", 0) else placement for placement in tensor.placements]
    detached: Any = tensor.detach()
    rows = detached.redistribute(placements=placements)
    if rows._local_tensor.untyped_storage().nbytes() > rows._local_tensor.nbytes:
        # gloo has no all-to-all: the rows are a view of the gathered tensor.
        rows._local_tensor = rows._local_tensor.clone()
    return rows


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by their names without wrappers."""
    return {
        clean_parameter_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def torch_training_state(named: Mapping[str, nn.Parameter], optimizer: Any | None) -> TrainingState:
    """Return the training state of parameters under a torch optimizer; without an optimizer, of the parameters alone."""
    state = TrainingState(options=[] if optimizer is None else group_options(optimizer))
    compact = find_compact(optimizer)
    if compact is not None:
        for name, parameter in named.items():
            _add_real_values(state, name, parameter, compact)
        return state
    for name, parameter in named.items():
        state.add_fragment(f"{WEIGHT}/{name}", state.fragment_of_parameter(parameter))
        if optimizer is not None:
            state.add(name, optimizer.state.get(parameter, {}), parameter, state.fragment_of_parameter)
    return state


def _add_real_values(state: TrainingState, name: str, parameter: nn.Parameter, optimizer: CompactAdamW) -> None:
    """Add the fp32 values of a parameter and its moments, decoded piece by piece as they are written."""
    by_rows, shard = is_row_sharded(parameter), optimizer.shard(parameter)
    for key in (WEIGHT, *MOMENTS) if optimizer.state.get(parameter) else (WEIGHT,):
        decode = partial(optimizer.read, parameter, key)
        if by_rows:
            fragment = _updated_fragment(parameter, shard, DecodedValues(decode, 0, shard.last - shard.first))
        else:
            fragment = state.fragment_of_parameter(_filled_like(parameter, decode))
        state.add_fragment(f"{key}/{name}", fragment)
    if optimizer.state.get(parameter):
        state.scalars[name] = {"step": torch.tensor(float(optimizer.state[parameter]["step"]))}


def _updated_fragment(parameter: nn.Parameter, shard: UpdatedShard, values: Tensor | DecodedValues) -> Fragment:
    """Return the range of a parameter that this rank updates, with these values."""
    stored = local_fragment(parameter)
    return replace(stored, start=stored.start + shard.first, values=values)


def _filled_like(parameter: nn.Parameter, decode: Callable[[int, int], Tensor] | None = None) -> Any:
    """Return an fp32 tensor with the parameter's shape and shards: its decoded values, or zeros."""
    filled: Any = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
    if decode is not None:
        local = filled.to_local() if isinstance(filled, DTensor) else filled
        local.view(-1).copy_(decode(0, local.numel()))
    return filled


def load_real_values(
    name: str,
    parameter: nn.Parameter,
    optimizer: CompactAdamW,
    saved: SavedState,
    load: Callable[[TrainingState], None],
) -> None:
    """Load a parameter's fp32 values and its moments, and store them in the optimizer's format."""
    state, values, shard = TrainingState(), dict[str, Any](), optimizer.shard(parameter)
    by_rows = is_row_sharded(parameter)
    for key in (WEIGHT, *(each for each in MOMENTS if each in saved.states.get(name, {}))):
        if by_rows:
            values[key] = torch.zeros(shard.last - shard.first)
            fragment = _updated_fragment(parameter, shard, values[key])
        else:
            values[key] = _filled_like(parameter)
            fragment = state.fragment_of_parameter(values[key])
        state.add_fragment(f"{key}/{name}", fragment)
    load(state)
    state.copy_back()
    local = {key: (each.to_local() if isinstance(each, DTensor) else each).view(-1) for key, each in values.items()}
    step = saved.others.get(name, {}).get("step")
    optimizer.write(parameter, local, step=None if step is None else int(step))
    shard.publish()


def allocate_torch_state(
    named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, saved: SavedState
) -> None:
    """Allocate the optimizer states that a checkpoint has; torch would create them only at the first step."""
    set_group_options(optimizer, saved.options)
    on_device = {id(p) for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, parameter in named.items():
        states = optimizer.state[parameter]
        for key, dtype in saved.states.get(name, {}).items():
            states[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        for key, value in saved.others.get(name, {}).items():
            moves = isinstance(value, Tensor) and (value.numel() > 1 or id(parameter) in on_device)
            states[key] = clone_if_tensor(value).to(parameter.device) if moves else clone_if_tensor(value)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that only the optimizer step reads: gradients and optimizer states."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [each for each in [*(p.grad for p in parameters), *states] if isinstance(each, Tensor)]


def clone_if_tensor(value: Any) -> Any:
    """Return a copy of a tensor; return any other value itself."""
    return value.clone() if isinstance(value, Tensor) else value


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_group_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set the parameter groups to a checkpoint's options; CheckpointError if these are another optimizer's.

    If the numbers of groups differ, neighbouring groups with equal options count as one group: transformers splits a group by
    the placements of tensor parallelism.
    """
    if len(options) != len(optimizer.param_groups):
        saved_kinds, kinds = _group_kinds(options), _group_kinds(group_options(optimizer))
        if max(saved_kinds) == max(kinds):
            options = [options[saved_kinds.index(kind)] for kind in kinds]
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(options)} parameter groups and this run's has {len(optimizer.param_groups)}: "
            "resume with the same optim and its arguments, or start a new run."
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        missing = [key for key in optimizer.defaults if key not in saved]
        if missing:
            raise CheckpointError(
                f"the checkpoint has another optimizer, without the option {missing[0]}: resume with the same optim and its "
                "arguments, or start a new run."
            )
        # CompactAdamW saves `fused` None; an AdamW that goes on with its states keeps its kernel.
        group.update({key: clone_if_tensor(value) for key, value in saved.items() if (key, value) != ("fused", None)})


def _group_kinds(options: list[dict[str, Any]]) -> list[int]:
    """Number the groups; neighbours with equal options have the same number."""
    return list(accumulate((int(before != after) for before, after in pairwise(options)), initial=0))
