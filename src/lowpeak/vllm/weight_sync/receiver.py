"""One update as a worker of vLLM takes it: pieces become tensors, tensors go into the model, and all of it is proved.

What is alive beyond the model is the bucket and the tensor that is being put together: a tensor that lies whole in a bucket is
loaded from there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.vllm.weight_sync.buckets import Piece, read_checksums, shorten_names
from lowpeak.vllm.weight_sync.reload import ReloadedModules
from lowpeak.vllm.weight_sync.write_tracing import Placement


@dataclass
class WeightReceiver:
    """Takes the buckets of one update after the other; `policy_version` is None from `begin` until `commit`.

    `known` are the tensors whose values it holds and could prove now, so that they need not come again.
    """

    model: Any
    names: CheckpointNames
    reloads: ReloadedModules
    policy_version: int | None = None
    known: tuple[str, ...] = ()
    _parts: dict[str, Tensor] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)
    _loaded: set[str] = field(default_factory=set)
    _held: frozenset[str] = frozenset()
    _summing: bool = True
    _written: bool = False
    _reloaded: dict[str, int] = field(default_factory=dict)
    _reload_sums: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._placement = Placement(self.model)

    @property
    def is_broken(self) -> bool:
        """Whether weights were written that are no version's; not so before the first update, when they are the checkpoint's."""
        return self._written and self.policy_version is None

    def begin(self, summing: bool = True) -> tuple[str, ...]:
        """Forget the version; the names that need not come again. Without `summing` nothing can be proved."""
        held = self.known if self.policy_version is not None else ()
        self.policy_version, self.known = None, ()
        self._held, self._summing = frozenset(held), summing
        self._drop_parts()
        self._loaded.clear()
        self.reloads.begin()
        self._reloaded = {}
        self._placement.begin(summing, skipped=self.reloads.parameters())
        return held

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece], bucket: Tensor) -> None:
        """Load every tensor that the pieces make whole; the bucket may be overwritten afterwards."""
        for piece in pieces:
            values = piece.values_in(bucket)
            if piece.is_whole:
                self._load(piece.name, values.view(piece.shape))
            else:
                self._join(piece, values)

    def verify(self, sent: Mapping[str, str], shapes: Mapping[str, int]) -> dict[str, int]:
        """EngineError with names where the model does not hold what was sent, nothing else and all of it.

        The answer is how many elements of each tensor this worker holds less than `shapes` say: its ranks share them.
        """
        if self._parts:
            raise EngineError(f"Only parts came of {shorten_names(self._parts)}.")
        lost = {*(sent.keys() - self._loaded - self._held), *self.names.lacking(sent)}
        if lost:
            raise EngineError(f"These tensors did not come: {shorten_names(lost)}.")
        missing = self.reloads.missing()
        self.reloads.finish()
        if self._summing:
            self._reload_sums = read_checksums(self.reloads.sums())
            if wrong := self._placement.verify(sent):
                raise EngineError(f"vLLM's weights are not the policy's: {shorten_names(wrong)}.")
        missing += self._placement.missing(sent)
        if missing:
            raise EngineError(
                f"The update has no values for these parameters of vLLM's model: {shorten_names(missing)}."
            )
        # Reloaded tensors lie in no parameter as they came, so they have to come again to be proved.
        self.known = tuple(n for n, regions in self._placement.regions.items() if regions) if self._summing else ()
        placed = self._placement.num_placed(sent) | self._reloaded
        return {name: placed[name] for name, count in shapes.items() if placed[name] < count}

    def commit(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def adapter(self) -> None:
        return

    def abort(self) -> None:
        """Give the update up: the weights are of no version."""
        self.policy_version, self.known = None, ()
        self._drop_parts()

    def prove(self) -> None:
        """EngineError with names, and no version any more, where weights changed since they were verified."""
        if self.policy_version is None:
            raise EngineError("vLLM holds the weights of no version.")
        found = read_checksums(self.reloads.sums())
        changed = [name for name in found if found[name] != self._reload_sums.get(name)] + self._placement.changed()
        if changed:
            self.abort()
            raise EngineError(f"vLLM's weights are no longer the policy's: {shorten_names(changed)}.")

    def _load(self, name: str, tensor: Tensor) -> None:
        """Load one tensor as the first of its `candidates` that vLLM takes, and note where that was."""
        if name in self._loaded:
            raise EngineError(f"The tensor {name} came twice.")
        self._written = True
        own = tensor.clone() if self.reloads else tensor  # reloading keeps it
        failed: Exception | None = None
        for weights in self.names.candidates(name, own):
            try:
                taken = self._placement.load(name, own, partial(self.model.load_weights, weights))
            except Exception as error:
                failed = failed or error
                continue
            reloaded = bool(self.reloads) and (taken is None or bool(taken))  # some models do not tell
            if self._placement.regions[name] or reloaded:
                if not self._placement.regions[name]:
                    self._reloaded[name] = own.numel()
                self._loaded.add(name)
                return
        shape = "x".join(map(str, tensor.shape))
        said = "it writes it nowhere" if failed is None else f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
        raise EngineError(f"vLLM's model does not take the tensor {name} of shape {shape} ({said}).") from failed

    def _join(self, piece: Piece, values: Tensor) -> None:
        if piece.name not in self._parts:
            self._parts[piece.name] = torch.empty(piece.numel, dtype=piece.dtype, device=values.device)
            self._left[piece.name] = piece.numel
        self._parts[piece.name][piece.start : piece.start + piece.count] = values
        self._left[piece.name] -= piece.count
        if not self._left[piece.name]:
            del self._left[piece.name]
            self._load(piece.name, self._parts.pop(piece.name).view(piece.shape))

    def _drop_parts(self) -> None:
        self._parts.clear()
        self._left.clear()


class CheckpointNames:
    """The names that a model of vLLM takes whose configuration is transformers' `config`."""

    def __init__(self, config: Any = None) -> None:
        self._config = config

    def candidates(self, name: str, tensor: Tensor) -> Iterator[list[tuple[str, Tensor]]]:
        """What to load for a parameter: itself, then what transformers makes of it in a checkpoint, where that is another thing.

        transformers renames (Mixtral's `block_sparse_moe` is its `mlp`) and joins experts; vLLM knows most models both ways, and
        some by the checkpoint alone. The second is made when the first was refused.
        """
        yield [(name, tensor)]
        if self._skeleton is not None:
            from transformers.core_model_loading import revert_weight_conversion

            reverted = list(revert_weight_conversion(self._skeleton, {name: tensor}).items())
            if [other for other, _ in reverted] != [name]:
                yield reverted

    def lacking(self, sent: Collection[str]) -> list[str]:
        """The parameters of transformers' model that did not come, where all that came are its parameters; else none is known.

        What lacks may show nowhere else: an expert among many that vLLM keeps in one parameter, or values that would all be zero.
        """
        own = set() if self._skeleton is None else {name for name, _ in self._skeleton.named_parameters()}
        return sorted(own.difference(sent)) if own.issuperset(sent) else []

    @cached_property
    def _skeleton(self) -> Any:
        """transformers' model of the same config, without weights; None where it has none."""
        from transformers import AutoModelForCausalLM

        if self._config is None:
            return None
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                return AutoModelForCausalLM.from_config(self._config)
        except Exception:  # a model that only vLLM has: its names are the checkpoint's
            return None
