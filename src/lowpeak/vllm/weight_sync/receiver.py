"""Worker side of one weight update: assemble tensors from pieces, load them into the model, and verify them.

Besides the model, memory holds the bucket and the tensor that is being assembled; a tensor that is complete within a
bucket is loaded from there.
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
    """Receiver of weight updates; `policy_version` is None from `begin` until `commit`.

    `known` are the tensors whose values it can verify without receiving them again.
    """

    model: Any
    names: CheckpointNames
    reloads: ReloadedModules
    policy_version: int | None = None
    known: tuple[str, ...] = ()
    _partial: dict[str, Tensor] = field(default_factory=dict)
    _num_missing: dict[str, int] = field(default_factory=dict)
    _loaded: set[str] = field(default_factory=set)
    _kept: frozenset[str] = frozenset()
    _summing: bool = True
    _written: bool = False
    _reloaded: dict[str, int] = field(default_factory=dict)
    _reload_sums: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._placement = Placement(self.model)

    @property
    def is_broken(self) -> bool:
        """Return true after a failed update: the model holds partly written weights."""
        return self._written and self.policy_version is None

    def begin(self, summing: bool = True) -> tuple[str, ...]:
        """Drop the version and return the tensors that need not be sent again.

        Without `summing` nothing can be verified.
        """
        known = self.known if self.policy_version is not None else ()
        self.policy_version, self.known = None, ()
        self._kept, self._summing = frozenset(known), summing
        self._drop_partial()
        self._loaded.clear()
        self.reloads.begin()
        self._reloaded = {}
        self._placement.begin(summing, skipped=self.reloads.parameters())
        return known

    @torch.no_grad()
    def take(self, pieces: Iterable[Piece], bucket: Tensor) -> None:
        """Load every tensor that these pieces complete; the bucket may be overwritten afterwards."""
        for piece in pieces:
            values = piece.values_in(bucket)
            if piece.is_complete:
                self._load(piece.name, values.view(piece.shape))
            else:
                self._assemble(piece, values)

    def verify(self, sent: Mapping[str, str], shapes: Mapping[str, int]) -> dict[str, int]:
        """Raise EngineError with names unless the model holds exactly the tensors that were sent.

        Returns the number of loaded elements of each tensor of which this worker has fewer than `shapes` counts: its
        engine's ranks share such tensors.
        """
        if self._partial:
            raise EngineError(f"These tensors are incomplete: {shorten_names(self._partial)}.")
        not_sent = {*(sent.keys() - self._loaded - self._kept), *self.names.lacking(sent)}
        if not_sent:
            raise EngineError(f"These tensors were not received: {shorten_names(not_sent)}.")
        missing = self.reloads.missing()
        self.reloads.finish()
        if self._summing:
            self._reload_sums = read_checksums(self.reloads.sums())
            if different := self._placement.verify(sent):
                raise EngineError(f"vLLM's weights differ from the policy's: {shorten_names(different)}.")
        missing += self._placement.missing(sent)
        if missing:
            raise EngineError(
                f"The update lacks values for these parameters of vLLM's model: {shorten_names(missing)}."
            )
        # A reloaded tensor is in no parameter in its original form, so only sending it again can verify it.
        self.known = tuple(n for n, regions in self._placement.regions.items() if regions) if self._summing else ()
        placed = self._placement.num_placed(sent) | self._reloaded
        return {name: placed[name] for name, count in shapes.items() if placed[name] < count}

    def commit(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def adapter(self) -> None:
        return

    def abort(self) -> None:
        """Abort the update: the weights have no version."""
        self.policy_version, self.known = None, ()
        self._drop_partial()

    def prove(self) -> None:
        """Raise EngineError with names, and drop the version, if weights changed since they were verified."""
        if self.policy_version is None:
            raise EngineError("vLLM has weights without a version.")
        sums = read_checksums(self.reloads.sums())
        changed = [name for name in sums if sums[name] != self._reload_sums.get(name)] + self._placement.changed()
        if changed:
            self.abort()
            raise EngineError(f"vLLM's weights changed since they were verified: {shorten_names(changed)}.")

    def _load(self, name: str, tensor: Tensor) -> None:
        """Load one tensor under the first of its `candidates` that vLLM accepts, and record where vLLM wrote it."""
        if name in self._loaded:
            raise EngineError(f"The tensor {name} was sent twice.")
        self._written = True
        # A layerwise reload keeps a reference to the tensor, but the bucket will be overwritten.
        source = tensor.clone() if self.reloads else tensor
        failed: Exception | None = None
        for weights in self.names.candidates(name, source):
            try:
                taken = self._placement.load(name, source, partial(self.model.load_weights, weights))
            except Exception as error:
                failed = failed or error
                continue
            # `load_weights` of some models returns nothing.
            reloaded = bool(self.reloads) and (taken is None or bool(taken))
            if self._placement.regions[name] or reloaded:
                if not self._placement.regions[name]:
                    self._reloaded[name] = source.numel()
                self._loaded.add(name)
                return
        shape = "x".join(map(str, tensor.shape))
        reason = (
            "it wrote the tensor nowhere"
            if failed is None
            else f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
        )
        raise EngineError(f"vLLM's model does not accept the tensor {name} of shape {shape} ({reason}).") from failed

    def _assemble(self, piece: Piece, values: Tensor) -> None:
        if piece.name not in self._partial:
            self._partial[piece.name] = torch.empty(piece.numel, dtype=piece.dtype, device=values.device)
            self._num_missing[piece.name] = piece.numel
        self._partial[piece.name][piece.start : piece.start + piece.count] = values
        self._num_missing[piece.name] -= piece.count
        if not self._num_missing[piece.name]:
            del self._num_missing[piece.name]
            self._load(piece.name, self._partial.pop(piece.name).view(piece.shape))

    def _drop_partial(self) -> None:
        self._partial.clear()
        self._num_missing.clear()


class CheckpointNames:
    """Names under which vLLM's model accepts the tensors of a model with the transformers `config`."""

    def __init__(self, config: Any = None) -> None:
        self._config = config

    def candidates(self, name: str, tensor: Tensor) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the tensors to load for a parameter: the tensor itself, then its form in a checkpoint if that differs.

        transformers renames (Mixtral's `block_sparse_moe` is its `mlp`) and joins experts; vLLM loads most models in
        both forms, some only in the checkpoint's. The second form is computed after vLLM refused the first.
        """
        yield [(name, tensor)]
        if self._skeleton is not None:
            from transformers.core_model_loading import revert_weight_conversion

            reverted = list(revert_weight_conversion(self._skeleton, {name: tensor}).items())
            if [other for other, _ in reverted] != [name]:
                yield reverted

    def lacking(self, sent: Collection[str]) -> list[str]:
        """Return the parameters of transformers' model that were not sent; none if other tensors were sent too."""
        # A missing tensor may show nowhere else: an expert among many in one parameter of vLLM's, or values that are all zero.
        names = set() if self._skeleton is None else {name for name, _ in self._skeleton.named_parameters()}
        return sorted(names.difference(sent)) if names.issuperset(sent) else []

    @cached_property
    def _skeleton(self) -> Any:
        """Return transformers' model of the config on the meta device; None if transformers has none."""
        from transformers import AutoModelForCausalLM

        if self._config is None:
            return None
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                return AutoModelForCausalLM.from_config(self._config)
        except Exception:
            # A model that only vLLM implements uses the checkpoint's names.
            return None
