"""Stage 5, the rewards of complete groups: each reward is called once for all completions.

As in TRL, a completion's reward is the weighted sum of its rewards, without those that are None. If all are None it is NaN,
and the completion is excluded from its group's statistics.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import torch

from lowpeak.errors import ArgumentError, DataError, RewardError, RewardTimeoutError
from lowpeak.ranks import Ranks
from lowpeak.records import Completion, Conversation, Group, Metric, Prompt, Record, merge_metrics
from lowpeak.rewards.factory import unique_names
from lowpeak.rewards.function import BackgroundLoop, FunctionReward, TimeLimitExceeded
from lowpeak.rewards.model import ModelReward
from lowpeak.rewards.reward import Reward
from lowpeak.rewards.reward_call import MAX_REWARD, NO_REWARD, RewardCall, RewardInputs

logger = logging.getLogger(__name__)

# The contract defines these keywords, so a column of such a name is never passed.
_NOT_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
_MAX_CHARACTERS = 1_000  # of a column's value in the journal

# Returns the records with prompts for a teacher, given their groups and the texts of their completions.
AddContexts = Callable[[Sequence[Group], Sequence[Record], Sequence[str]], tuple[Record, ...]]


@dataclass(frozen=True)
class RewardSettings:
    """The weights of rewards, and the meaning of failures.

    A failure is an error ("raise"), or counts as None for the completions concerned ("none"). `timeout` bounds each call of a
    function that has no time limit itself, in seconds.
    """

    weights: tuple[float, ...]
    on_failure: Literal["raise", "none"] = "raise"
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.on_failure not in ("raise", "none"):
            raise ArgumentError(f"A reward's failure must 'raise' or count as 'none', got {self.on_failure!r}.")
        if self.timeout is not None and not self.timeout > 0:
            raise ArgumentError(f"The rewards' time limit must be positive, got {self.timeout} seconds.")
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ArgumentError(f"Reward weights must be finite, got {list(self.weights)}.")


@dataclass(frozen=True)
class RewardedCompletions:
    """N completions with their rewards, and the values that the rewards logged.

    `prompts` and `completions` have the dataset's format, `extra` has the values of `log_extra`, and `columns` those of the
    dataset's columns that reward functions name: each has one entry per completion.
    """

    records: tuple[Record, ...]
    metrics: dict[str, Metric]
    extra: dict[str, list[Any]]
    columns: dict[str, list[Any]]
    prompts: tuple[Any, ...]
    completions: tuple[Any, ...]

    def rows(self, indices: Sequence[int]) -> RewardedCompletions:
        """Return the completions of these indices, with the metrics of all."""
        return RewardedCompletions(
            tuple(self.records[i] for i in indices),
            self.metrics,
            {name: [values[i] for i in indices] for name, values in self.extra.items()},
            {name: [values[i] for i in indices] for name, values in self.columns.items()},
            tuple(self.prompts[i] for i in indices),
            tuple(self.completions[i] for i in indices),
        )

    def renumber_groups(self, groups: Sequence[int]) -> RewardedCompletions:
        """Return the same completions; group g becomes group `groups[g]`."""
        return replace(self, records=tuple(replace(record, group=groups[record.group]) for record in self.records))


def merge_rewarded_completions(parts: Sequence[RewardedCompletions]) -> RewardedCompletions:
    """Return the completions of all parts, in order.

    A column that a part lacks is None there.
    """
    sizes = [len(part.records) for part in parts]
    metrics: dict[str, Metric] = {}
    for part in parts:
        metrics = merge_metrics(metrics, part.metrics)
    return RewardedCompletions(
        tuple(chain.from_iterable(part.records for part in parts)),
        metrics,
        _merge_columns([part.extra for part in parts], sizes),
        _merge_columns([part.columns for part in parts], sizes),
        tuple(chain.from_iterable(part.prompts for part in parts)),
        tuple(chain.from_iterable(part.completions for part in parts)),
    )


def _merge_columns(parts: Sequence[Mapping[str, list[Any]]], sizes: Sequence[int]) -> dict[str, list[Any]]:
    names = dict.fromkeys(chain.from_iterable(parts))
    filled = {name: [part.get(name, [None] * size) for part, size in zip(parts, sizes, strict=True)] for name in names}
    return {name: list(chain.from_iterable(values)) for name, values in filled.items()}


class RewardPanel:
    """All rewards of a run: sync ones are called one after another, then async ones concurrently.

    Models that are sharded over ranks come last; all ranks call them, even without groups.

    Raises:
        ArgumentError: there is not one weight for each reward.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        settings: RewardSettings,
        decode: Callable[[list[int]], str],
        add_contexts: AddContexts | None = None,
    ) -> None:
        if len(settings.weights) != len(rewards):
            raise ArgumentError(
                f"There are {len(settings.weights)} reward weights for {len(rewards)} rewards; give one for each."
            )
        self.names = unique_names([reward.name for reward in rewards])
        self.rewards = tuple(
            _with_settings(reward, name, settings.timeout) for reward, name in zip(rewards, self.names, strict=True)
        )
        self.settings = settings
        self._decode, self._add_contexts = decode, add_contexts
        self._loop = BackgroundLoop()

    @property
    def needs_all_ranks(self) -> bool:
        """Return whether all ranks must compute rewards together, even those without groups."""
        return any(_sharding_ranks(reward) is not None for reward in self.rewards)

    def compute_rewards(self, groups: Sequence[Group], *, trainer_state: Any = None) -> RewardedCompletions:
        """Return the groups' completions with their rewards; RewardError if a reward failed and `on_failure` is "raise".

        If two rewards log a column of the same name, the second one's is prefixed with the reward's name.
        """
        inputs = reward_inputs(groups, self._decode)
        calls = [
            RewardCall(reward, name, inputs, trainer_state)
            for reward, name in zip(self.rewards, self.names, strict=True)
        ]
        self._run_calls(calls, len(inputs))
        records = self._records(groups, inputs, calls)
        metrics = metrics_by_function(self.names, records)
        if self._add_contexts is not None:
            records = self._add_contexts(groups, records, inputs.texts)
            with_context = sum(record.teacher_prompt_ids is not None for record in records)
            metrics["teacher/context_share"] = Metric(float(with_context), float(len(records)))
        extra: dict[str, list[Any]] = {}
        for call in calls:
            metrics = merge_metrics(metrics, call.log.metrics)
            if self.settings.on_failure == "none":
                metrics[f"rewards/{call.name}/failed"] = Metric(float(len(call.failures)), kind="sum")
            for column, values in call.log.columns.items():
                extra[f"{call.name}/{column}" if column in extra else column] = values
        columns = self._named_columns(inputs)
        return RewardedCompletions(records, metrics, extra, columns, tuple(inputs.prompts), tuple(inputs.completions))

    def _named_columns(self, inputs: RewardInputs) -> dict[str, list[Any]]:
        """Return the columns that a reward function has as parameters, with long values cut."""
        # Those that `**kwargs` collects are not among them: a dataset may have any number.
        functions = [reward for reward in self.rewards if isinstance(reward, FunctionReward)]
        names = frozenset().union(*(function.parameters for function in functions))
        return {name: [_cut(value) for value in values] for name, values in inputs.columns.items() if name in names}

    def _run_calls(self, calls: Sequence[RewardCall], num_completions: int) -> None:
        """Run all calls; without completions, only those of sharded models.

        If a sync call fails and `on_failure` is "raise", the later calls are not made.
        """
        sharded = [call for call in calls if _sharding_ranks(call.reward) is not None]
        ranks = _sharding_ranks(sharded[0].reward) if sharded else None
        with nullcontext() if ranks is None else ranks.propagate_errors():
            if num_completions:
                self._run_unsharded([call for call in calls if call not in sharded])
        # Check only after all calls: an error between the collectives of two models would leave other ranks waiting.
        for call in sharded:
            call.run()
        for call in sharded:
            self._check(call)

    def _run_unsharded(self, calls: Sequence[RewardCall]) -> None:
        """Run the sync calls one after another, then the async ones together."""
        asynchronous = [call for call in calls if call.is_async]
        for call in calls:
            if not call.is_async:
                call.run()
                self._check(call)
        self._run_async(asynchronous)
        for call in asynchronous:
            self._check(call)

    def _run_async(self, calls: Sequence[RewardCall]) -> None:
        if not calls:
            return

        async def run_all() -> None:
            await asyncio.gather(*(call.run_async() for call in calls))

        limits = [call.reward.timeout for call in calls if isinstance(call.reward, FunctionReward)]
        finite = [limit for limit in limits if limit is not None]
        try:
            # A function's time limit acts only when it awaits. After the sum of all limits, one must be blocking the loop.
            self._loop.run(run_all(), sum(finite) + 1.0 if len(finite) == len(limits) else None)
        except TimeLimitExceeded:
            unfinished = [call for call in calls if not call.finished]
            names = " or ".join(f"'{call.name}'" for call in unfinished)
            for call in unfinished:
                call.error = RewardTimeoutError(
                    f"Async reward {names} blocks its event loop past its time limit; use await for calls that wait."
                )

    def _check(self, call: RewardCall) -> None:
        call.check()
        if call.failures:
            if self.settings.on_failure == "raise":
                raise call.failures[0]
            logger.warning(
                "%s This reward failed for %d of %d completions.",
                call.failures[0],
                len(call.failures),
                len(call.values),
            )

    def _records(
        self, groups: Sequence[Group], inputs: RewardInputs, calls: Sequence[RewardCall]
    ) -> tuple[Record, ...]:
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        records = []
        for index, (prompt, completion) in enumerate(pairs):
            rewards = tuple(call.values[index] for call in calls)
            if completion.conversation is not None:
                rewards = (NO_REWARD,) * len(calls) if completion.conversation.has_failed else rewards
                completion = replace(completion, conversation=completion.conversation.without_environment())
            prompt_ids = prompt.ids if completion.prompt_ids is None else completion.prompt_ids
            _check_teacher_prompt(prompt, completion, inputs.describe(index))
            group = inputs.positions[index][0]
            reward = weighted_sum(rewards, self.settings.weights)
            if abs(reward) > MAX_REWARD:
                raise RewardError(
                    f"The weighted sum of the rewards is {reward} for {inputs.describe(index)}, whose square is infinite in "
                    "fp32: lower reward_weights, or the rewards."
                )
            tokens = self._token_rewards([call.tokens.get(index, ()) for call in calls])
            record = Record(group, prompt_ids, completion, rewards, reward, token_rewards=tokens)
            records.append(replace(record, teacher_prompt_ids=prompt.teacher_ids))
        return tuple(records)

    def _token_rewards(self, tokens: Sequence[tuple[float, ...]]) -> torch.Tensor | None:
        """Return the weighted sum of a completion's token rewards: float32 [C]; None without any.

        `tokens` has one tuple per reward, empty if the reward returned one number for the completion.
        """
        weighted = [w * torch.tensor(each) for w, each in zip(self.settings.weights, tokens, strict=True) if each]
        return torch.stack(weighted).sum(0) if weighted else None


def _check_teacher_prompt(prompt: Prompt, completion: Completion, name: str) -> None:
    is_changed = completion.prompt_ids not in (None, prompt.ids) and completion is not prompt.completion
    if prompt.teacher_ids is not None and is_changed:
        raise DataError(
            f"The prompt of {name} was changed, so its teacher's prompt no longer fits: remove the column privileged_context, or "
            "the rollout_func or environment that changes prompts."
        )


def reward_inputs(groups: Sequence[Group], decode: Callable[[list[int]], str]) -> RewardInputs:
    """Return the inputs of rewards for complete groups.

    A column has one value per completion: the one that a `rollout_func` returned for the completion, else the prompt's, else
    None. Prompts have the dataset's format; completions are strings, or lists of one message, which includes the text of the
    prompt that it continues.
    """
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    ids = [completion.ids.tolist() for _, completion in pairs]
    texts = tuple(decode(tokens) for tokens in ids)
    rows = [{**prompt.columns, **completion.extra} for prompt, completion in pairs]
    return RewardInputs(
        prompts=[prompt.source for prompt, _ in pairs],
        completions=[_in_format_of(*pair, text) for pair, text in zip(pairs, texts, strict=True)],
        completion_ids=ids,
        columns=_columns_of_rows(rows),
        texts=texts,
        positions=tuple((g, k) for g, group in enumerate(groups) for k in range(len(group.completions))),
        conversations=_conversations(groups),
    )


def _conversations(groups: Sequence[Group]) -> tuple[Conversation, ...]:
    every = (completion.conversation for group in groups for completion in group.completions)
    return tuple(filter(None, every))


def _columns_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return each name's values; None where a row lacks the name."""
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_COLUMNS)
    return {name: [row.get(name) for row in rows] for name in names}


def _in_format_of(prompt: Prompt, completion: Completion, text: str) -> str | list[dict[str, Any]]:
    """Return a completion's text as a string or a message, like the prompt; a conversation as its messages."""
    if completion.conversation is not None:
        return copy.deepcopy(list(completion.conversation.messages))
    if not prompt.conversational:
        return text
    return [{"role": "assistant", "content": prompt.assistant_prefix + text}]


def _cut(value: Any) -> Any:
    """Return the value, or the start of a text that is too long for the journal."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def weighted_sum(rewards: Sequence[float], weights: Sequence[float]) -> float:
    """Return `sum(w * r)` over the rewards that are not NaN; NaN if all are."""
    given = [(reward, weight) for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(reward * weight for reward, weight in given) if given else NO_REWARD


def metrics_by_function(names: Sequence[str], records: Sequence[Record]) -> dict[str, Metric]:
    """Return `rewards/<name>/mean` and `/std` (unbiased) over the records that have this reward.

    With the records of all ranks these are TRL's metrics.
    """
    metrics: dict[str, Metric] = {}
    for index, name in enumerate(names):
        values = [record.rewards[index] for record in records if not math.isnan(record.rewards[index])]
        metrics[f"rewards/{name}/mean"] = Metric(sum(values), float(len(values)))
        # Fewer than two have no std: its value is then NaN, with weight 0 in a later mean.
        has_std = len(values) > 1
        metrics[f"rewards/{name}/std"] = Metric(statistics.stdev(values) if has_std else 0.0, float(has_std))
    return metrics


def warn_of_unrewarded(names: Sequence[str], rewarded: RewardedCompletions) -> None:
    """Log one warning if completions have no reward, with their number and the first one."""
    unrewarded = [i for i, record in enumerate(rewarded.records) if math.isnan(record.reward)]
    if names and unrewarded:
        total = len(rewarded.records)
        logger.warning(
            "%s completions have no reward from %s, so nothing is learned from them: return a number from at least one reward. "
            "The first is %.60r to the prompt %.60r.",
            f"All {total}" if len(unrewarded) == total else f"{len(unrewarded)} of {total}",
            ", ".join(names),
            rewarded.completions[unrewarded[0]],
            rewarded.prompts[unrewarded[0]],
        )


def _sharding_ranks(reward: Reward) -> Ranks | None:
    """Return the ranks over which a reward model is sharded, which must all make its calls."""
    return reward.ranks if isinstance(reward, ModelReward) else None


def _with_settings(reward: Reward, name: str, timeout: float | None) -> Reward:
    """Return a copy of a function reward with this name and the default time limit.

    Other rewards are returned unchanged.
    """
    if not isinstance(reward, FunctionReward):
        return reward
    renamed = copy.copy(reward)
    renamed.name, renamed.timeout = name, timeout if reward.timeout is None else reward.timeout
    return renamed
