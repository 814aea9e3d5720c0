"""One update as a worker of vLLM takes it: pieces become tensors, tensors go into the model, and all of it is proved.

What is alive beyond the model is the bucket and the tensor that is being put together: a tensor that lies whole in a bucket is
loaded from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.buckets import Piece
from lowpeak.rollout.vllm.weights.loader import Loader


@dataclass
class Receiver:
    """Takes the buckets of one update after the other; `policy_version` is None from `begin` until `commit`.

    `known` are the tensors whose values it holds and could prove now, so that they need not come again.
    """

    loader: Loader
    policy_version: int | None = None
    known: tuple[str, ...] = ()
    _parts: dict[str, Tensor] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)
    _loaded: set[str] = field(default_factory=set)
    _held: frozenset[str] = frozenset()
    _summing: bool = True
    _written: bool = False

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
        self.loader.begin(summing)
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
            raise EngineError(f"Only parts came of {_few(self._parts)}.")
        lost = {*(sent.keys() - self._loaded - self._held), *self.loader.lacking(sent)}
        if lost:
            raise EngineError(f"These tensors did not come: {_few(lost)}.")
        missing = self.loader.finish()
        wrong = self.loader.wrong(sent) if self._summing else []
        if wrong:
            raise EngineError(f"vLLM's weights are not the policy's: {_few(wrong)}.")
        missing += self.loader.missing(sent)
        if missing:
            raise EngineError(f"The update has no values for these parameters of vLLM's model: {_few(missing)}.")
        self.known = self.loader.known if self._summing else ()
        placed = self.loader.num_placed(sent)
        return {name: placed[name] for name, count in shapes.items() if placed[name] < count}

    def commit(self, policy_version: int) -> None:
        """The weights are this version's."""
        self.policy_version = policy_version

    def adapter(self) -> None:
        """Requests name no adapter."""
        return

    def abort(self) -> None:
        """Give the update up: the weights are of no version."""
        self.policy_version, self.known = None, ()
        self._drop_parts()

    def prove(self) -> None:
        """EngineError with names, and no version any more, where weights changed since they were verified."""
        if self.policy_version is None:
            raise EngineError("vLLM holds the weights of no version.")
        changed = self.loader.changed()
        if changed:
            self.abort()
            raise EngineError(f"vLLM's weights are no longer the policy's: {_few(changed)}.")

    def _load(self, name: str, tensor: Tensor) -> None:
        if name in self._loaded:
            raise EngineError(f"The tensor {name} came twice.")
        self._written = True
        self.loader.load(name, tensor)
        self._loaded.add(name)

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


def _few(names: Iterable[str], most: int = 5) -> str:
    """A handful of names, and how many there are beside them."""
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
