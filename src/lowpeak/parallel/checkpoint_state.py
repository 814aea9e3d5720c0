"""What training changes, as one rank has it: flat ranges of weights and optimizer states, and a few numbers.

A range says where it lies in its whole tensor, and no more about who has the rest. So what one strategy wrote on some
ranks, another may read on others (`shards.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lowpeak.errors import CheckpointError
from lowpeak.parallel.export_params import plain_name

WEIGHT = "weight"  # beside the optimizer's own names of states (exp_avg, ...)


@dataclass(frozen=True)
class Fragment:
    """Values [start, start + len(values)) of a tensor of `numel` values; `values` are the ones in use, not a copy."""

    name: str
    numel: int
    start: int
    values: Tensor


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds of a training state.

    `sizes` are of its tensors by their full names. `states` are each parameter's optimizer states of one value per weight,
    by name, with their dtypes; `others` those that are numbers or this rank's alone. `options` are each parameter group's,
    `engine` what a strategy counts itself.
    """

    sizes: Mapping[str, int]
    states: Mapping[str, Mapping[str, torch.dtype]]
    others: Mapping[str, Mapping[str, Any]]
    options: list[dict[str, Any]]
    engine: Mapping[str, Any]


@dataclass
class TrainingState:
    """This rank's part. `opaque` are states that are not one value per weight (block scales): this rank's alone."""

    fragments: list[Fragment] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    opaque: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    turned: list[tuple[DTensor, DTensor]] = field(default_factory=list)

    def range_of(self, tensor: Any) -> Fragment:
        """Return the range that this rank has of a tensor; of one that peers have cut between columns, rows in their place.

        Such rows are a copy, which peers make together, and `put_back` brings back what was read into it.
        """
        rows = in_rows(tensor)
        if rows is not tensor:
            self.turned.append((tensor, rows))
        return own_range(rows)

    def put_back(self) -> None:
        """Let tensors that are cut between columns have what their rows were filled with; peers do it together."""
        with torch.no_grad():
            for tensor, rows in self.turned:
                tensor.copy_(rows.redistribute(placements=tensor.placements))

    def add(self, name: str, states: Mapping[str, Any], like: Tensor, cut: Callable[[Tensor], Fragment]) -> None:
        """Take up a parameter's states: those shaped `like` it as ranges that `cut` makes, the others as numbers."""
        for key, value in states.items():
            if isinstance(value, Tensor) and value.shape == like.shape:
                self.add_range(f"{key}/{name}", cut(value))
            elif isinstance(value, Tensor) and value.numel() > 1:
                self.opaque.setdefault(name, {})[key] = value
            else:
                self.scalars.setdefault(name, {})[key] = value

    def add_range(self, name: str, fragment: Fragment) -> None:
        """Take up a range under a name; ranks may have nothing of a small tensor."""
        if fragment.values.numel():
            self.fragments.append(replace(fragment, name=name))


def own_range(tensor: Any) -> Fragment:
    """Return the range that this rank has of a tensor: rows that `fully_shard` cut, values that ZeRO-3 cut, or all of it."""
    if hasattr(tensor, "ds_tensor"):
        local = tensor.ds_tensor.detach().view(-1)
        start = torch.distributed.get_rank(tensor.ds_process_group) * local.numel()
        return Fragment("", tensor.ds_numel, start, local[: max(0, tensor.ds_numel - start)])
    if not isinstance(tensor, DTensor):
        return Fragment("", tensor.numel(), 0, tensor.detach().view(-1))
    values = tensor.to_local().detach().view(-1)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert not any(offsets[1:]), "rows are cut"
    start = offsets[0] * (tensor.numel() // tensor.shape[0]) if offsets else 0
    return Fragment("", tensor.numel(), start, values)


def in_rows(tensor: Any) -> Any:
    """Return a tensor cut between rows alone: itself, or a copy of one that tensor parallelism cut between columns."""
    if not isinstance(tensor, DTensor) or all(getattr(cut, "dim", 0) == 0 for cut in tensor.placements):
        return tensor
    placements = [Shard(0) if getattr(cut, "dim", 0) else cut for cut in tensor.placements]
    detached: Any = tensor.detach()
    return detached.redistribute(placements=placements)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by their names without wrappers'."""
    return {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def torch_state(named: Mapping[str, nn.Parameter], optimizer: Any | None) -> TrainingState:
    """Return the training state of parameters that a torch optimizer steps itself; without one, of the parameters alone."""
    state = TrainingState(options=[] if optimizer is None else group_options(optimizer))
    for name, parameter in named.items():
        state.add_range(f"{WEIGHT}/{name}", state.range_of(parameter))
        if optimizer is not None:
            state.add(name, optimizer.state.get(parameter, {}), parameter, state.range_of)
    return state


def make_torch_state(named: Mapping[str, nn.Parameter], optimizer: Any, saved: Saved) -> None:
    """Give a torch optimizer, which makes its states at its first step, the ones that a checkpoint holds, unfilled."""
    put_options(optimizer, saved.options)
    on_device = {id(p) for g in optimizer.param_groups if g.get("fused") or g.get("capturable") for p in g["params"]}
    for name, parameter in named.items():
        states = optimizer.state[parameter]
        for key, dtype in saved.states.get(name, {}).items():
            states[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        for key, value in saved.others.get(name, {}).items():
            on = isinstance(value, Tensor) and (value.numel() > 1 or id(parameter) in on_device)
            states[key] = copied(value).to(parameter.device) if on else copied(value)


def torch_idle(optimizer: Any) -> list[Tensor]:
    """Return what a torch optimizer reads in its step alone: its parameters' gradients, and its states."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [each for each in [*(p.grad for p in parameters), *states] if isinstance(each, Tensor)]


def copied(value: Any) -> Any:
    """Return a copy of a tensor, else the value."""
    return value.clone() if isinstance(value, Tensor) else value


def group_options(optimizer: Any) -> list[dict[str, Any]]:
    """Return what each parameter group is set to."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def put_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    """Set the parameter groups to a checkpoint's options; CheckpointError where these are another optimizer's.

    Where the numbers differ, groups of like options are one: transformers divides them by how tensor parallelism cut.
    """
    if len(options) != len(optimizer.param_groups):
        kinds, now = _kinds(options), _kinds(group_options(optimizer))
        if max(kinds) == max(now):
            options = [options[kinds.index(kind)] for kind in now]
    if len(options) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint's optimizer has {len(options)} groups of parameters and this run's {len(optimizer.param_groups)}: "
            "resume with the same optim and its arguments, or start a new run."
        )
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        missing = [key for key in optimizer.defaults if key not in saved]
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer is another one (it has no {missing[0]}): resume with the same optim and its "
                "arguments, or start a new run."
            )
        group.update({key: copied(value) for key, value in saved.items()})


def _kinds(options: list[dict[str, Any]]) -> list[int]:
    return list(accumulate((int(before != after) for before, after in pairwise(options)), initial=0))
