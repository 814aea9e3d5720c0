"""The report of a rollout: the engine's work, lengths of completions, and their staleness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lowpeak.records import Metric, Prompt, Record, merge_metrics
from lowpeak.vllm.weight_sync import PushReport


@dataclass
class RolloutStats:
    """Counts of the engine's work since they were last popped.

    useful              tokens that the engine added to completions
    computed            positions that its forwards computed for them
    pushes              metrics of the weights that were sent to it
    turns               metrics of conversations with tools
    most_prompt_tokens  of all conversations, whose environments may lengthen prompts
    """

    useful: int = 0
    computed: int = 0
    pushes: dict[str, Metric] = field(default_factory=dict)
    turns: dict[str, Metric] = field(default_factory=dict)
    most_prompt_tokens: int = 0

    def add(self, useful: int, computed: int) -> None:
        self.useful += useful
        self.computed += computed

    def pop_useful_share(self) -> dict[str, Metric]:
        """Return the share of useful tokens since the last call; empty for an engine that does not count."""
        metric = Metric(float(self.useful), float(self.computed))
        self.useful = self.computed = 0
        return {"useful_tokens/rollout": metric} if metric.count else {}

    def add_conversations(self, metrics: dict[str, Metric]) -> None:
        self.turns = merge_metrics(self.turns, metrics)

    def add_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Note the longest prompt, which bounds the memory of a conversation."""
        self.most_prompt_tokens = max([self.most_prompt_tokens, *(len(prompt.ids) for prompt in prompts)])

    def pop_conversations(self) -> dict[str, Metric]:
        """Return the metrics of conversations since the last call."""
        turns, self.turns = self.turns, {}
        return turns

    def add_push(self, report: PushReport) -> None:
        sums = {"bytes": report.num_bytes, "seconds": report.seconds, "proof_seconds": report.proof_seconds}
        new = {f"push/{name}": Metric(float(value), 1.0, "sum") for name, value in sums.items()}
        self.pushes = merge_metrics(self.pushes, new)

    def pop_pushes(self) -> dict[str, Metric]:
        """Return bytes and seconds of the pushes since the last call; empty on ranks that push nothing."""
        pushes, self.pushes = self.pushes, {}
        return pushes


def staleness_metrics(records: Sequence[Record], step: int) -> dict[str, Metric]:
    """Return mean and maximum of the steps between the versions that generated tokens and the step after `step` steps."""
    versions = [
        record.completion.policy_versions[record.completion.loss_mask]
        for record in records
        if record.completion.policy_versions is not None
    ]
    ages = (step - torch.cat(versions)).float() if versions else torch.zeros(0)
    if not len(ages):
        return {}
    return {
        "staleness/mean": Metric(float(ages.sum()), float(len(ages))),
        "staleness/max": Metric(float(ages.max()), kind="max"),
    }


def length_metrics(records: Sequence[Record]) -> dict[str, Metric]:
    """Return TRL's `completions/*`: lengths of all and of terminated completions, and the share of truncated ones.

    A length counts the tokens that the policy wrote.
    """
    lengths = [float(record.completion.num_written) for record in records]
    ended = [float(r.completion.num_written) for r in records if r.completion.finish_reason == "stop"]
    metrics = {f"completions/{name}": metric for name, metric in _spread("length", lengths).items()}
    metrics |= {f"completions/{name}": metric for name, metric in _spread("terminated_length", ended).items()}
    num_truncated = float(len(lengths) - len(ended))
    return metrics | {"completions/clipped_ratio": Metric(num_truncated, float(len(lengths)))}


def _spread(name: str, values: Sequence[float]) -> dict[str, Metric]:
    if not values:
        return {}
    return {
        f"mean_{name}": Metric(sum(values), float(len(values))),
        f"min_{name}": Metric(min(values), 1.0, "min"),
        f"max_{name}": Metric(max(values), 1.0, "max"),
    }
