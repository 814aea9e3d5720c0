"""The engine protocol: what generates. The step does not know which engine runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Group, Prompt, Weights, WeightSlice

SLICE_BYTES = 8 << 20


@dataclass(frozen=True)
class SliceForm:
    """The slices that an engine takes: `Strategy.slices`' arguments of these names."""

    max_bytes: int = SLICE_BYTES
    dtype: torch.dtype | None = None
    weights: Weights = "merged"


def check_lengths(prompts: Sequence[Prompt], sampling: Sampling, context: int | None, whose: str, remedy: str) -> None:
    """EngineError for a prompt without tokens, or one whose completions exceed the context of `whose` (None: no limit)."""
    for prompt in prompts:
        if not prompt.ids:
            raise EngineError(
                f"Prompt {prompt.serial}, {prompt.source!r:.60}, has no tokens, so there is nothing to generate from: drop such "
                "rows from the data set."
            )
        if context is not None and len(prompt.ids) + sampling.max_new_tokens > context:
            raise EngineError(
                f"Prompt {prompt.serial} has {len(prompt.ids)} tokens; with {sampling.max_new_tokens} new tokens it "
                f"exceeds {whose} context of {context}: {remedy}."
            )


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates groups with the weights of one policy version.

    `policy_version` is None while the engine holds no known weights: it was just made, restarted, or dropped them.
    """

    @property
    def policy_version(self) -> int | None:
        """The version of the weights that `generate` would use now."""

    @property
    def cuts_groups(self) -> bool:
        """Whether a group may be generated in parts (`sampling.first_completion`), so that several ranks share it."""

    @property
    def slice_form(self) -> SliceForm:
        """What `load` takes next. A rank that has no `base` yet for its `adapter` wants that first."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """One group of `sampling.num_generations` completions per prompt, in the order of `prompts`."""

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        """One whole update: all or nothing, caches reset. An engine that shares the policy's weights reads no slice.

        After a `base` it holds no version: the adapter comes next.
        """

    def sleep(self) -> None:
        """Give back the memory that generating needs."""

    def wake(self) -> None:
        """Be ready to generate, for the first time or again; all ranks call it together."""

    def close(self) -> None:
        """Let go of everything; `wake` begins anew."""
