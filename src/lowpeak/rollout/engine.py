"""Protocol of rollout engines, which generate completions. The training step does not depend on the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from lowpeak.arguments import Sampling
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import SLICE_BYTES, Group, Prompt, Weights, WeightSlice
from lowpeak.rollout.pending import BackgroundEngine, Pending
from lowpeak.rollout.turns import TurnQueue


@dataclass(frozen=True)
class SliceForm:
    """Form of the weight slices that an engine takes: arguments of `Strategy.slices`."""

    max_bytes: int = SLICE_BYTES
    dtype: torch.dtype | None = None
    weights: Weights = "merged"


def check_lengths(prompts: Sequence[Prompt], sampling: Sampling, context: int | None, whose: str, remedy: str) -> None:
    """Raise EngineError for a prompt without tokens, or with completions beyond the context of `whose` (None: no
    limit).
    """
    for prompt in prompts:
        if not prompt.ids:
            raise EngineError(
                f"Prompt {prompt.serial}, {prompt.source!r:.60}, has no tokens: drop such rows from the dataset."
            )
        if context is not None and len(prompt.ids) + sampling.max_new_tokens > context:
            raise EngineError(
                f"Prompt {prompt.serial} has {len(prompt.ids)} tokens; with {sampling.max_new_tokens} new tokens it "
                f"exceeds {whose} context of {context}: {remedy}."
            )


@runtime_checkable
class RolloutEngine(Protocol):
    """Generator of groups with the weights of one policy version.

    `policy_version` is None while the engine's weights are unknown: before the first load, after a restart, or after
    it dropped them.
    """

    @property
    def policy_version(self) -> int | None:
        """Return the version of the weights in the engine."""

    @property
    def slice_form(self) -> SliceForm:
        """Return the form of the slices for the next `load`.

        An engine that lacks the base of its `adapter` requests the base first.
        """

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        """Accept a wave of prompts and return the groups that it will have: `num_generations` completions per prompt."""

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        """Update all weights and reset caches; after an error the engine has no version.

        An engine that shares the policy's weights reads no slice. After a `base` it has no version until the adapter
        is loaded.
        """

    def sleep(self) -> None:
        """Release the memory that generation needs."""

    def wake(self) -> None:
        """Prepare for generation, for the first time or again; all ranks call it together."""

    def close(self) -> None:
        """Release everything; `wake` starts again."""


@runtime_checkable
class TurnEngine(RolloutEngine, Protocol):
    """An engine that also samples single turns of conversations, which arrive while others are under way."""

    def sample_turns(self, queue: TurnQueue, sampling: Sampling) -> None:
        """Sample the turns that conversations request, until the queue is closed.

        Turns have the temperature and filters of `sampling`, and their own lengths and keys. On an error all unanswered
        requests fail.
        """


class TurnWork(Protocol):
    """The sampling of a queue's turns in a thread; `lengths` are those of the turns so far."""

    @property
    def lengths(self) -> Sequence[int]: ...

    def run(self) -> LostEngineError | None:
        """Sample until the queue is closed; return the error of a part of the engine that was lost, if others took over."""


@runtime_checkable
class BackgroundTurnEngine(BackgroundEngine, Protocol):
    """The part of a TurnEngine that samples turns in a thread, if it is `in_background`.

    work = engine.prepare_turns(queue, sampling)     # the owner's thread; errors are those of `sample_turns`
    lost = work.run()                                # any thread
    engine.note_turns(work.lengths)                  # the owner's thread
    """

    def prepare_turns(self, queue: TurnQueue, sampling: Sampling) -> TurnWork: ...

    def note_turns(self, lengths: Sequence[int]) -> None:
        """Expect later turns to be about as long as these."""


@runtime_checkable
class ReplayEngine(Protocol):
    """An engine whose completions need live objects, such as environments, until they are rewarded."""

    def replay(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        finished: Mapping[int, Group],
        results: MutableMapping[str, Mapping[str, Any]],
    ) -> Pending:
        """Submit prompts of which some groups, by serial, have been generated before; `results` are those of their functions.

        What they called is called again, and their tokens are taken as they are, as far as the answers are the same.
        """
