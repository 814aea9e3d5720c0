"""vLLM's own loader, called tensor by tensor, and the proof of what it did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.buckets import read_sums
from lowpeak.rollout.vllm.weights.names import Names
from lowpeak.rollout.vllm.weights.placement import Placement
from lowpeak.rollout.vllm.weights.reload import Reloads


class Loader:
    """Puts whole tensors into a model of vLLM, and says whether their bytes are there as they came."""

    def __init__(self, model: Any, names: Names, reloads: Reloads) -> None:
        self._model = model
        self._names = names
        self._reloads = reloads
        self._placement = Placement(model)
        self._reloaded: dict[str, int] = {}
        self._sums: dict[str, str] = {}

    def begin(self, summing: bool) -> None:
        """Make the model ready to be written; without `summing` nothing will be asked about checksums."""
        self._reloads.begin()
        self._reloaded = {}
        self._placement.begin(summing, skipped=self._reloads.parameters())

    def load(self, name: str, tensor: Tensor) -> None:
        """Put one tensor where it belongs, and note where that was; vLLM's complaints come with the tensor's name.

        As the first of its `candidates` that vLLM takes.
        """
        own = tensor.clone() if self._reloads else tensor  # reloading keeps it
        failed: Exception | None = None
        for weights in self._names.candidates(name, own):
            try:
                taken = self._placement.load(name, own, partial(self._model.load_weights, weights))
            except Exception as error:
                failed = failed or error
                continue
            if self._placement.regions[name]:
                return
            if self._reloads and (taken is None or taken):  # some models do not tell
                self._reloaded[name] = own.numel()
                return
        shape = "x".join(map(str, tensor.shape))
        said = "it writes it nowhere" if failed is None else f"{type(failed).__name__}: {failed}".splitlines()[0][:300]
        raise EngineError(f"vLLM's model does not take the tensor {name} of shape {shape} ({said}).") from failed

    def finish(self) -> list[str]:
        """All tensors are there; the parameters of reloaded modules that were not."""
        missing = self._reloads.missing()
        self._reloads.finish()
        return missing

    def wrong(self, sent: Mapping[str, str]) -> list[str]:
        """The names of tensors that are not, bit by bit, what was sent, by the sender's checksums."""
        self._sums = read_sums(self._reloads.sums())
        return self._placement.verify(sent)

    def missing(self, sent: Iterable[str]) -> list[str]:
        """The model's parameters that the tensors did not write all of."""
        return self._placement.missing(sent)

    def lacking(self, sent: Collection[str]) -> list[str]:
        """The tensors that the model has, by its configuration, and that are not among these."""
        return self._names.lacking(sent)

    def num_placed(self, names: Iterable[str]) -> dict[str, int]:
        """How many elements of each tensor went into this worker's parameters."""
        return self._placement.num_placed(names) | self._reloaded

    def changed(self) -> list[str]:
        """The names of tensors, or of reloaded parameters, that are no longer what was verified."""
        found = read_sums(self._reloads.sums())
        return self._placement.changed() + sorted(name for name in found if found[name] != self._sums.get(name))

    @property
    def known(self) -> tuple[str, ...]:
        """The tensors that need not come again to be proved: those that lie in parameters as they are."""
        return tuple(name for name, regions in self._placement.regions.items() if regions)
