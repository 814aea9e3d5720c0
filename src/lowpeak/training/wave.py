"""Stages 4 and 5 of a wave of prompts: each group is generated and rewarded on the rank that owns it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lowpeak.arguments import Sampling
from lowpeak.batching import assign_completions, balanced_partition
from lowpeak.errors import AgreedMemoryError, LocalMemoryError, MemoryExhaustedError, RewardError
from lowpeak.memory import Phase
from lowpeak.ranks import Ranks
from lowpeak.records import Completion, Group, Prompt
from lowpeak.rewards import RewardedCompletions, RewardPanel, merge_rewarded_completions
from lowpeak.rollout import BackgroundPending, Pending, ReplayEngine, RolloutEngine
from lowpeak.training.rollout_metrics import RolloutStats
from lowpeak.training.run import RunContext


class WaveParts(Protocol):
    """The part of a collector that a wave uses."""

    context: RunContext
    engine: RolloutEngine
    panel: RewardPanel
    stats: RolloutStats


@dataclass
class OwnedShare:
    """One rank's prompts with their groups and rewards, which are kept while a lost engine is awaited.

    `known` are groups of a checkpoint, with their prompts' serials as keys; `known_results` are the results of their function
    calls. `waited` counts the seconds in `generate`.
    """

    collector: WaveParts
    prompts: Sequence[Prompt]
    sampling: Sampling
    phase: Phase
    known: Mapping[int, Group] = field(default_factory=dict)
    known_results: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    state: Any = None  # of the trainer, for rewards
    groups: list[Group] | None = None
    rewarded: RewardedCompletions | None = None
    pending: Pending | None = None
    waited: float = 0.0

    def submit(self) -> None:
        """Give the engine the prompts whose groups are not known, or all that it replays."""
        engine = self.collector.engine
        if self.pending is None and self.known and isinstance(engine, ReplayEngine):
            self.pending = engine.replay(self.prompts, self.sampling, self.known, dict(self.known_results))
        elif self.pending is None:
            prompts = [prompt for prompt in self.prompts if self._known_group(prompt) is None]
            self.pending = engine.submit(prompts, self.sampling)

    def generate(self) -> list[Group]:
        """Stage 4: return this rank's groups."""
        if self.groups is None:
            began = time.perf_counter()
            with local_memory_errors(), self.collector.context.run.tracker.phase(self.phase):
                self.submit()
                assert self.pending is not None
                self.groups = self._with_known_groups(self.pending.result())
            self.waited += time.perf_counter() - began
        return self.groups

    def _with_known_groups(self, generated: list[Group]) -> list[Group]:
        known = [self._known_group(prompt) for prompt in self.prompts]
        if not any(known) or isinstance(self.collector.engine, ReplayEngine):
            return generated  # on a peer of tensor parallelism an engine of conversations has none
        rest = iter(generated)
        return [group or next(rest) for group in known]

    def _known_group(self, prompt: Prompt) -> Group | None:
        """Return the prompt's group if it is known, or the dataset's completion."""
        if prompt.completion is not None:
            return Group(prompt, (prompt.completion,))
        return self.known.get(prompt.serial)

    def finished(self) -> list[Group]:
        """Return the groups of the drawn prompts that exist so far, in any order, without the dataset's completions."""
        drawn = {prompt.serial: prompt for prompt in self.prompts}
        if self.groups is not None:
            return [_of_drawn(group, drawn) for group in self.groups if group.prompt.completion is None]
        known = [group for prompt in self.prompts if (group := self.known.get(prompt.serial)) is not None]
        generated = self.pending.finished() if isinstance(self.pending, BackgroundPending) else []
        return known + [_of_drawn(group, drawn) for group in generated]

    def results(self) -> dict[str, Mapping[str, Any]]:
        """Return the results of the functions that conversations called so far, by the names of calls."""
        pending = self.pending
        return {**self.known_results, **(pending.results if isinstance(pending, BackgroundPending) else {})}

    @contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Abort the pending groups if an error leaves the block; the next attempt submits new ones."""
        try:
            yield
        except BaseException:
            if self.pending is not None:
                self.pending.abort()
            raise

    def reward(self) -> RewardedCompletions:
        """Stages 4 and 5: return this rank's groups with their rewards."""
        if self.rewarded is not None:
            return self.rewarded
        panel, run = self.collector.panel, self.collector.context.run
        ranks, is_training = run.strategy.ranks, self.phase is Phase.ROLLOUT
        # If rewards take all ranks, every rank raises for an engine that one of them lost, before they meet there.
        with ranks.propagate_errors() if panel.needs_all_ranks else nullcontext():
            groups = self.generate()
        with _reward_errors(), run.tracker.phase(Phase.REWARD if is_training else self.phase):
            rewarded = panel.compute_rewards(groups if ranks.is_tp_leader else [], trainer_state=self.state)
        stats = self.collector.stats
        useful = stats.pop_useful_share() if is_training else {}
        self.rewarded = replace(rewarded, metrics=rewarded.metrics | useful | stats.pop_conversations())
        return self.rewarded


def _of_drawn(group: Group, drawn: Mapping[int, Prompt]) -> Group:
    """Return the group of the prompt as it was drawn; one that an environment has changed is each completion's own."""
    prompt, ids = drawn[group.prompt.serial], group.prompt.ids
    if ids == prompt.ids:
        return group
    own = [replace(each, prompt_ids=each.prompt_ids or ids) for each in group.completions]
    return Group(prompt, tuple(own))


@dataclass
class Wave:
    """Prompts that all ranks generate together.

    owners      indices of the prompts that each rank owns
    share       this rank's prompts, which it rewards
    parts       the prompt and the completions that each rank generates, if several ranks generate a group
    generated   what this rank generates: its share, or its part
    num_completions   of each prompt
    """

    prompts: Sequence[Prompt]
    num_completions: int
    owners: Sequence[Sequence[int]]
    share: OwnedShare
    parts: Sequence[tuple[int, range]] | None
    generated: OwnedShare
    policy_version: int = 0
    submitted: float | None = None  # when it was submitted, by the performance counter

    @property
    def is_submitted(self) -> bool:
        return self.submitted is not None

    def submit(self, policy_version: int) -> None:
        """Start to generate on this rank, with weights of `policy_version`."""
        self.generated.submit()
        self.policy_version, self.submitted = policy_version, time.perf_counter()

    def generate(self, ranks: Ranks) -> None:
        """Wait on all ranks for the groups."""
        if self.parts is None:
            ranks.call_on_all(lambda: len(self.generated.generate()))
            return
        groups = self._merge(ranks.call_on_all(self.generated.generate))
        self.share.groups = [groups[prompt.serial] for prompt in self.share.prompts]

    def finished(self, ranks: Ranks) -> list[Group]:
        """Return the groups of all ranks that are complete so far."""
        groups = self._merge(ranks.call_on_all(self.generated.finished))
        return [group for group in groups.values() if len(group.completions) == self.num_completions]

    def results(self, ranks: Ranks) -> dict[str, Mapping[str, Any]]:
        """Return the results of functions of all ranks so far."""
        return {name: row for each in ranks.call_on_all(self.generated.results) for name, row in each.items()}

    def _merge(self, generated: Sequence[Sequence[Group]]) -> dict[int, Group]:
        """Return the groups of all ranks by their prompts' serials, with the completions of several ranks in order."""
        starts = [0] * len(generated) if self.parts is None else [part.start for _, part in self.parts]
        completions: dict[int, tuple[Completion, ...]] = {}
        prompts = {prompt.serial: prompt for prompt in self.prompts}
        for rank in sorted(range(len(generated)), key=starts.__getitem__):
            for group in generated[rank]:
                before = completions.get(group.prompt.serial, ())
                if len(before) < self.num_completions:  # a known group is every rank's
                    completions[group.prompt.serial] = before + group.completions
        return {serial: Group(prompts[serial], each) for serial, each in completions.items()}


def make_wave(
    collector: WaveParts,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    phase: Phase,
    ranks: Ranks,
    *,
    splits: bool,
    known: Mapping[int, Group],
    results: Mapping[str, Mapping[str, Any]],
) -> Wave:
    """Return a wave of these prompts; with `splits` fewer groups than ranks are generated in parts."""
    owners = balanced_partition([len(prompt.ids) for prompt in prompts], ranks.world_size)
    # A rank without prompts submits, too: generation under a sharded strategy takes all ranks.
    share = generated = OwnedShare(collector, [prompts[i] for i in owners[ranks.rank]], sampling, phase, known, results)
    parts = None
    if splits and 0 < len(prompts) < ranks.world_size:
        parts = assign_completions(len(prompts), sampling.num_generations, ranks.world_size)
        number, part = parts[ranks.rank]
        part_sampling = replace(sampling, num_generations=len(part), first_completion=part.start)
        generated = OwnedShare(collector, [prompts[number]] if part else [], part_sampling, phase, known, results)
    return Wave(prompts, sampling.num_generations, owners, share, parts, generated)


@contextmanager
def local_memory_errors() -> Iterator[None]:
    """Raise LocalMemoryError when an engine runs out of memory: the other ranks finish generating, then agree on the error."""
    try:
        yield
    except AgreedMemoryError:
        raise
    except MemoryExhaustedError as error:
        raise LocalMemoryError(str(error), error.reason) from error


@contextmanager
def _reward_errors() -> Iterator[None]:
    """Raise RewardError for memory that ran out in a reward: generating again, in smaller waves, would not help."""
    try:
        yield
    except MemoryExhaustedError as error:
        raise RewardError(str(error)) from error


def merge_in_prompt_order(
    shares: Sequence[tuple[Sequence[int], RewardedCompletions]], first_group: int
) -> RewardedCompletions:
    """Merge the ranks' rewarded records in the order of the prompts; groups are numbered from `first_group`.

    A share is the indices of the prompts that a rank owns, and its records, whose group g is of the g-th of these.
    """
    rewarded = merge_rewarded_completions(
        [part.renumber_groups([first_group + i for i in owned]) for owned, part in shares]
    )
    return rewarded.rows(sorted(range(len(rewarded.records)), key=lambda row: rewarded.records[row].group))
