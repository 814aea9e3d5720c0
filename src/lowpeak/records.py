"""What travels along the straight line: prompts, completions, groups, records, micro-batches, slices, metrics.

Everything is ragged and immutable: nothing is padded before a micro-batch is built, and a later station makes a new record with
`dataclasses.replace`. Tensors in records live on the CPU.

Shapes are suffixes: C tokens of one completion, T counted tokens of a micro-batch, B rows and L padded length of a
micro-batch, N rows of a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
MetricKind = Literal["mean", "sum", "max", "min"]
Weights = Literal["merged", "adapter", "base"]  # of a model that leave: see Strategy.slices
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # parameters' names, whole shapes and dtypes, in an order
Unit = Literal["token", "sequence", "pair"]  # what a loss's weights weigh, and what is never cut


@dataclass(frozen=True)
class Prompt:
    """One prompt of a rollout.

    `serial` counts the prompts drawn in the run: it is unique within a run, and it is what the sampling hash uses.
    `source` is the prompt as the data set gave it (a string or a list of messages), which is what rewards see. `begun` is the
    text of its last message if completions continue that.
    """

    serial: int
    ids: tuple[int, ...]
    source: str | list[dict[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    begun: str = ""

    @property
    def conversational(self) -> bool:
        return not isinstance(self.source, str)


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt: C tokens, the end-of-sequence token included when there is one.

    `logprobs` are of the full softmax at the sampling temperature, before top-k, top-p and penalties. `loss_mask` is
    False where the policy did not write the token (a tool's answer): such tokens are context only. `prompt_ids`
    overrides the group's prompt for this row (a `rollout_func` may change it); None is the group's own.
    """

    ids: Tensor  # int32 [C]
    logprobs: Tensor  # float32 [C]
    loss_mask: Tensor  # bool [C]
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def num_written(self) -> int:
        return int(self.loss_mask.count_nonzero())


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Record:
    """One row of a rollout with all that is fixed for it: ids, rewards, and per-token values added by later stations.

    `rewards` has one value per reward function, `reward` their weighted sum; NaN where nobody scored. `token_rewards` is the
    part of `reward` that reward functions gave for single tokens: float32 [C], or None.
    `old`, `reference`, `values`, `entropy`, `advantages`, `returns` (what values are to become) are float32 [C] or None where
    nothing needs them.
    """

    group: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    rewards: tuple[float, ...]
    reward: float
    old: Tensor | None = None
    reference: Tensor | None = None
    values: Tensor | None = None
    entropy: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    token_rewards: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion)


@dataclass(frozen=True)
class TokenBatch:
    """The constants of T counted tokens: what a loss knows besides the log-probs and entropies of the pass itself.

    `rows_T` says which of the `num_rows` rows a token belongs to, in order. `weights_U` weighs the loss's units: T
    tokens, `num_rows` sequences, or pairs, of which `pairs_B` says which one a row belongs to. None means that nothing needs
    it: without `old_T` the run is on-policy and old is the policy's own detached log-prob. `coefficients` are plain numbers of
    the algorithm's state (an adaptive KL or entropy coefficient).

    The shares are parts of the step: `token_share` is 1 / its counted tokens, `row_share` 1 / its rows, `batch_share` 1 / its
    micro-batches, over all ranks. They are 0 outside of a step; in a masked micro-batch only `batch_share` is set.
    """

    rows_T: Tensor  # int64 [T]
    num_rows: int
    weights_U: Tensor  # float32 [U]
    advantages_T: Tensor  # float32 [T]
    sampling_T: Tensor | None = None
    old_T: Tensor | None = None
    reference_T: Tensor | None = None
    values_T: Tensor | None = None
    returns_T: Tensor | None = None
    pairs_B: Tensor | None = None  # int64 [B]
    coefficients: Mapping[str, float] = field(default_factory=dict)
    token_share: float = 0.0
    row_share: float = 0.0
    batch_share: float = 0.0

    def slice(self, start: int, stop: int) -> TokenBatch:
        """Return tokens [start, stop): only where the unit is a token, so that `weights_U` is cut alike."""
        assert self.weights_U.shape == self.rows_T.shape, "a unit larger than a token is never cut"
        cut: dict[str, Any] = {
            name: value[start:stop] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **cut)

    def to(self, device: torch.device | str) -> TokenBatch:
        return _moved(self, device)


@dataclass(frozen=True)
class Tree:
    """A prompt and the completions that continue it, one after another in a row: [prompt, c1, ..., cG].

    A token sees the prompt's tokens up to itself and its own completion's up to itself, and no other completion. A
    sequence on its own is a tree with an empty prompt and one completion. All are numbers of tokens; none may be read
    off a device.
    """

    start: int  # where in the row it begins
    prompt: int
    completions: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prompt + sum(self.completions)


@dataclass(frozen=True)
class Forest:
    """What one row without padding between its sequences holds: trees one after another, which do not see each other.

    `position_ids_1L` restart at 0 with each tree, and with each completion at its prompt's length. Tokens after the
    last tree are padding; nothing sees them.
    """

    trees: tuple[Tree, ...]
    position_ids_1L: Tensor  # int64 [1, L]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward: B rows padded on the right to L, and the T positions that predict counted tokens.

    `positions_T` index the flattened [B*L] hidden states; position i predicts `targets_T` (several where completions
    share a prompt). With right padding and causal attention no real token sees a pad, so there is no attention mask.
    With a `forest`, B is 1 and the row holds several sequences. A rank with nothing left gets a micro-batch of one
    counted token of weight 0.
    """

    input_ids_BL: Tensor  # int64
    positions_T: Tensor  # int64
    targets_T: Tensor  # int64
    tokens: TokenBatch
    record_indices: tuple[int, ...]  # which records of the rollout its rows are, in order; empty when masked
    num_useful: int  # tokens of the forward that are neither padding nor a prompt that its pass had before
    forest: Forest | None = None  # None: padded rows

    def to(self, device: torch.device | str) -> MicroBatch:
        return _moved(self, device)


def _moved(value: Any, device: torch.device | str) -> Any:
    """Return a record with its tensors on `device`, without waiting for the copies."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, MicroBatch | TokenBatch | Forest):
        return replace(value, **{name: _moved(each, device) for name, each in vars(value).items()})
    return value


@dataclass(frozen=True)
class WeightSlice:
    """A flat range of one parameter on its way out: `values` are elements [start, start + len(values)).

    They are good until the next slice is asked for, and nobody's to change: they may be the parameter's own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    values: Tensor


@dataclass(frozen=True)
class Metric:
    """A metric that carries its own reduction, so that no loss gathers anything: numbers or 0-d tensors.

    `mean` divides `total` by `count` after both were summed; `sum` adds totals; `max` and `min` take the extreme.
    """

    total: Tensor | float
    count: Tensor | float = 1.0
    kind: MetricKind = "mean"

    def merge(self, other: Metric) -> Metric:
        assert self.kind == other.kind, f"cannot merge {self.kind} with {other.kind}"
        if self.kind in ("mean", "sum"):
            return Metric(self.total + other.total, self.count + other.count, self.kind)
        if not isinstance(self.total, Tensor) and not isinstance(other.total, Tensor):  # exact: fp32 ends at 2^24
            return Metric((max if self.kind == "max" else min)(self.total, other.total), 1.0, self.kind)
        pick = torch.maximum if self.kind == "max" else torch.minimum
        return Metric(pick(torch.as_tensor(self.total), torch.as_tensor(other.total)), 1.0, self.kind)

    def value(self) -> float:
        """Return the reduced number; NaN for a mean of nothing. Reads the device: once a step, not inside a phase."""
        if self.kind != "mean":
            return float(self.total)
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


Metrics = Mapping[str, Metric]


def merge_metrics(first: Metrics, second: Metrics) -> dict[str, Metric]:
    """Return both mappings as one, merging the metrics that stand in both."""
    both = {name: first[name].merge(second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}
