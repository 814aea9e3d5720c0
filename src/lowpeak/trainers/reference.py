"""Trainers beside a reference, which may move towards the policy (TR-DPO, arXiv 2404.09656)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lowpeak.checkpoint import ARGUMENTS
from lowpeak.parallel import has_shards
from lowpeak.trainers.base import StepTrainer
from lowpeak.training import REFERENCE_FOLDER, load_extra_weights, save_extra_weights


class ReferenceTrainer(StepTrainer):
    """A trainer that updates its reference every few steps, if `settings.reference_sync` asks for it, and saves it then."""

    given_reference = ""  # name of the reference or teacher that the constructor got; of a path its last part

    def identity(self) -> dict[str, Any]:
        identity = super().identity()
        identity[ARGUMENTS]["reference"] = self.given_reference
        return identity

    def note_reference(self, given: Any) -> None:
        """Keep the name of a reference, which a resumed run must have, too; not the model, which may be freed."""
        self.given_reference = Path(given).name if isinstance(given, str) else ""

    def finish_step(self) -> dict[str, float]:
        """Stage 13; then update the reference if that is due."""
        values = super().finish_step()
        sync, step = getattr(self.parts.settings, "reference_sync", None), self.state.global_step
        if sync is not None and step % sync.every == 0:
            # The step is in checkpoints: a resumed run rounds the average as the run that was not interrupted.
            key = f"{self.args.seed}/reference/{step}"
            self.run.strategy.average(self._reference_model(), self.model, sync.share, key)
        return values

    def save_extra(self, folder: Path) -> None:
        super().save_extra(folder)
        with_states = self.run.writes_shards and not self.args.save_only_model
        with self.run.strategy.ranks.propagate_errors():
            for name, parameters in self.extra_weights(with_states).items():
                save_extra_weights(folder, name, parameters, self.run.strategy.ranks)

    def extra_weights(self, with_states: bool) -> dict[str, Mapping[str, nn.Parameter]]:
        """Return weights that change but are not in a checkpoint's model, by their folder in the checkpoint.

        `with_states`: the checkpoint has sharded training states, which contain all trained weights. The averaged
        reference is never among them.
        """
        if getattr(self.parts.settings, "reference_sync", None) is None:
            return {}
        return {REFERENCE_FOLDER: dict(self._reference_model().named_parameters())}

    def load_extra_weights(self, checkpoint: Path) -> None:
        for name, parameters in self.extra_weights(has_shards(checkpoint)).items():
            load_extra_weights(checkpoint, name, parameters, self.run.strategy.ranks)

    def _reference_model(self) -> nn.Module:
        reference = self.run.reference
        assert reference is not None
        assert reference.model is not None, "an averaged reference is a separate model"
        return reference.model
