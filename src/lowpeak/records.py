"""Data types of a rollout and its steps: prompts, completions, records, micro-batches, slices and metrics.

In the order in which one rollout makes them:

    Prompt        one prompt, tokenized                        drawn from the dataset
    Completion    the tokens generated for it                  returned by an engine
    Group         a prompt and its G completions               rewarded as a whole
    Record        one sequence (a prompt and one completion) with its rewards; later with log-probs, values, advantages
    MicroBatch    the tensors of one forward and backward, packed from records
    TokenBatch    the part of a micro-batch that a loss reads
    Metric        a logged number that carries its reduction over micro-batches and ranks
    WeightSlice   a flat range of one parameter, on its way to an engine or a file

All are immutable: a later stage makes a new record with `dataclasses.replace`. Records are ragged, with tensors on the CPU;
padding first appears in a micro-batch.

Shapes are suffixes: C tokens of one completion; T loss tokens of a micro-batch (those that the loss counts); U units that
the loss weighs (tokens, sequences or pairs); B sequences of a micro-batch; L the length of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
MetricKind = Literal["mean", "sum", "max", "min"]
# Which weights of a model are exported: see Strategy.slices.
Weights = Literal["merged", "adapter", "base"]
# Each parameter's unsharded shape and dtype, by name, in a fixed order.
WeightLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
# What a loss weighs; a unit is never split between micro-batches.
Unit = Literal["token", "sequence", "pair"]


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: the index of its last token, its reward, and the seconds of the reply to it.

    `message` is the index of its message, where a program drives: a history that it edits has messages of others, too.
    """

    last: int
    reward: float | None = None
    seconds: float = 0.0
    message: int | None = None


@dataclass
class Conversation:
    """The messages and turns of a completion with tools, and the environment that replied.

    `has_failed`: the environment raised, at the latest in `get_reward`, so the completion has no reward.
    """

    messages: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]
    environment: Any = None
    has_failed: bool = False

    def without_environment(self) -> Conversation:
        """Return the conversation for other processes, which the messages reach as the completion's."""
        return replace(self, messages=(), environment=None)


@dataclass(frozen=True)
class Branch:
    """A fork of a completion: its tokens from `start` on follow token `after` of prompt and completion; -1: no token.

    It ends all tokens between `after` and itself: no later token attends to them.
    """

    start: int  # index in the completion
    after: int  # index in prompt + completion, below len(prompt) + start


@dataclass(frozen=True)
class Completion:
    """C tokens of one prompt, generated or the dataset's, with the end-of-sequence token if there is one.

    `logprobs` are of the full softmax at the sampling temperature, before top-k, top-p and penalties. `loss_mask` is False for
    tokens that the policy did not generate (a tool's answer): they are context only. `prompt_ids` replaces the group's prompt
    for this completion (a `rollout_func` may change it, and a dataset's completion is tokenized with its prompt); None:
    unchanged. `extra` are columns that a `rollout_func` added. `policy_versions` are those that generated the tokens; None: the
    rollout's. With `branches` (by ascending `start`) the C tokens are the distinct tokens of a trie, depth first; without, a chain.
    From stage 7 on `loss_mask` is the loss's: no token of a truncated completion with mask_truncated_completions.
    """

    ids: Tensor  # int32 [C]
    logprobs: Tensor  # float32 [C]
    loss_mask: Tensor  # bool [C]
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    policy_versions: Tensor | None = None  # int32 [C]
    conversation: Conversation | None = None
    branches: tuple[Branch, ...] = ()

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def num_written(self) -> int:
        """Return how many of the tokens the policy generated; valid before stage 7."""
        return int(self.loss_mask.count_nonzero())


@dataclass(frozen=True)
class Prompt:
    """One prompt of a rollout.

    `serial` counts the prompts drawn in a run; the sampling hash uses it. `source` is the prompt as it stands in the dataset
    (a string or a list of messages); rewards get it. `columns` are the other columns of its table row. `assistant_prefix` is
    the text of the prompt's last message, if completions continue that message. `teacher_ids` is the prompt that a teacher
    reads in its place; None: the same. `completion` is the dataset's, if it takes the place of generated ones.
    """

    serial: int
    ids: tuple[int, ...]
    source: str | list[dict[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    assistant_prefix: str = ""
    teacher_ids: tuple[int, ...] | None = None
    completion: Completion | None = None

    @property
    def conversational(self) -> bool:
        return not isinstance(self.source, str)


@dataclass(frozen=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class Record:
    """One sequence of a rollout with everything that stays fixed for it.

    `group` is the index of its prompt's group. `rewards` has one value per reward function, `reward` is their weighted sum; NaN
    without a score. `teacher_prompt_ids` are the prompt's `teacher_ids`. The tensors below are float32 [C], or None if the
    algorithm does not need them:

    - `old`, `reference`: log-probs under the policy before the rollout's first step, and under the reference model
    - `values`, `returns`: the critic's predictions, and their regression targets
    - `entropy`: of the policy's next-token distribution
    - `advantages`: the weights of the tokens' policy gradients
    - `token_rewards`: the part of `reward` that reward functions gave to single tokens
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
    teacher_prompt_ids: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.completion)


@dataclass(frozen=True)
class TokenBatch:
    """The inputs of a loss for T loss tokens, besides the forward's log-probs and entropies.

    The loss is `sum(weights_U * loss_U)`; its units are the T tokens, the B sequences, or pairs of sequences. Optional tensors
    are None if the algorithm does not need them; without `old_T` the step is on-policy, and old is the policy's detached
    log-prob. `coefficients` are numbers of the algorithm's state (an adaptive KL or entropy coefficient).

    The shares are parts of the whole step, over all ranks: 1 / its loss tokens, 1 / its sequences, 1 / its micro-batches. They
    are 0 outside of a step; a masked micro-batch has a `batch_share` alone.
    """

    sequences_T: Tensor  # int64 [T]: each token's sequence, ascending
    num_sequences: int  # B
    weights_U: Tensor  # float32 [U]
    advantages_T: Tensor  # float32 [T]
    sampling_T: Tensor | None = None  # log-probs that the engine sampled with
    old_T: Tensor | None = None
    reference_T: Tensor | None = None
    values_T: Tensor | None = None
    returns_T: Tensor | None = None
    pairs_B: Tensor | None = None  # int64 [B]: each sequence's pair
    coefficients: Mapping[str, float] = field(default_factory=dict)
    token_share: float = 0.0
    sequence_share: float = 0.0
    batch_share: float = 0.0

    def counts(self) -> list[int]:
        """Return each sequence's number of loss tokens; the tensors are on the CPU."""
        counts: list[int] = torch.bincount(self.sequences_T, minlength=self.num_sequences).tolist()
        return counts

    def slice(self, start: int, stop: int) -> TokenBatch:
        """Return tokens [start, stop); the loss's unit must be a token."""
        assert self.weights_U.shape == self.sequences_T.shape, "a unit larger than a token is never split"
        sliced: dict[str, Any] = {
            name: value[start:stop] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **sliced)

    def to(self, device: torch.device | str) -> TokenBatch:
        return _to_device(self, device)


@dataclass(frozen=True)
class Node:
    """Consecutive tokens of a packed row; the first follows the last token of the node `parent`, if there is one.

    A token attends to the tokens of its node's ancestors, and to those of its node up to itself. All fields are known on the host.
    """

    start: int  # of its tokens in the row
    length: int
    parent: int = -1  # index of a node; -1: its first token starts a tree
    depth: int = 0  # position of its first token in a sequence

    @property
    def tokens(self) -> range:
        """Its tokens' indices in the row."""
        return range(self.start, self.start + self.length)


@dataclass(frozen=True)
class Forest:
    """The trees of one packed row, one after another, as nodes in depth-first order: a subtree is a range of tokens.

    `position_ids_1L` are the tokens' depths. Tokens after the last node are padding; no token attends to them.
    """

    nodes: tuple[Node, ...]
    position_ids_1L: Tensor  # int64 [1, L]

    @classmethod
    def of(cls, shape: Sequence[tuple[int, int]], padding: int = 0) -> Forest:
        """Return the forest of nodes with these parents and lengths."""
        nodes: list[Node] = []
        start = 0
        for parent, length in shape:
            depth = nodes[parent].depth + nodes[parent].length if parent >= 0 else 0
            nodes.append(Node(start, length, parent, depth))
            start += length
        positions = [torch.arange(node.depth, node.depth + node.length) for node in nodes]
        return cls(tuple(nodes), torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)])[None])


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward and backward: input ids, and the T positions that predict loss tokens.

    Without a `forest` each sequence, or each of its paths, has a row, padded on the right to L. With right padding and causal
    attention no real token attends to padding, so there is no attention mask. With a `forest` all are packed into one row.

    `positions_T` index the flattened hidden states, and position `positions_T[i]` predicts `targets_T[i]`. A position may
    occur several times: completions that share a prompt share its last position. A rank without work left gets a *masked*
    micro-batch, with one loss token of weight 0, because all ranks must run equally many.
    """

    input_ids_BL: Tensor  # int64; [1, L] with a forest
    positions_T: Tensor  # int64
    targets_T: Tensor  # int64
    tokens: TokenBatch
    record_indices: tuple[int, ...]  # indices of its sequences in the rollout, in order; empty if masked
    num_useful: int  # tokens forwarded, without padding and repeated prompts
    forest: Forest | None = None  # None: padded rows
    repeated: tuple[int, ...] = ()  # of each padded row: how many of its first tokens an earlier row of its record has

    def to(self, device: torch.device | str) -> MicroBatch:
        return _to_device(self, device)


def _to_device(value: Any, device: torch.device | str) -> Any:
    """Return a record with its tensors on `device`, without waiting for the copies."""
    if isinstance(value, Tensor):
        # A copy from pageable memory waits for the device. torch reuses pinned memory only after the copies from it have ended,
        # by an event on their stream, so the pinned tensor may be freed here.
        if value.device.type == "cpu" and torch.device(device).type not in ("cpu", "mps"):
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    if isinstance(value, MicroBatch | TokenBatch | Forest):
        return replace(value, **{name: _to_device(each, device) for name, each in vars(value).items()})
    return value


SLICE_BYTES = 8 << 20  # of a slice, unless an engine takes others


@dataclass(frozen=True)
class WeightSlice:
    """A flat range of one parameter: `values` are its elements [start, start + len(values)).

    `shape` is the whole parameter's. `values` are valid until the next slice is requested, and must not be changed: they may
    share the parameter's memory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    values: Tensor


@dataclass
class TensorAssembler:
    """Assembles tensors from flat slices that come in any order, on the CPU or on `device`."""

    device: torch.device | str = "cpu"
    incomplete: dict[str, Tensor] = field(default_factory=dict)
    _num_missing: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> Tensor | None:
        """Copy `values` into the tensor's elements [start, start + len(values)); return the tensor once it is complete."""
        if name not in self.incomplete:
            self.incomplete[name] = torch.empty(shape, dtype=values.dtype, device=self.device)
            self._num_missing[name] = self.incomplete[name].numel()
        self.incomplete[name].view(-1)[start : start + len(values)] = values
        self._num_missing[name] -= len(values)
        return None if self._num_missing[name] else self.incomplete.pop(name)

    def clear(self) -> None:
        """Drop the incomplete tensors."""
        self.incomplete.clear()


@dataclass(frozen=True)
class Metric:
    """A metric that carries its reduction, so that losses need no collectives.

    `total` and `count` are numbers or 0-d tensors. Over micro-batches and ranks `mean` sums both and divides `total` by
    `count`; `sum` adds totals; `max` and `min` take the extreme.
    """

    total: Tensor | float
    count: Tensor | float = 1.0
    kind: MetricKind = "mean"

    def merge(self, other: Metric) -> Metric:
        assert self.kind == other.kind, f"cannot merge {self.kind} with {other.kind}"
        if self.kind in ("mean", "sum"):
            return Metric(self.total + other.total, self.count + other.count, self.kind)
        # Python numbers stay Python numbers: fp32 tensors are exact up to 2^24 only.
        if not isinstance(self.total, Tensor) and not isinstance(other.total, Tensor):
            return Metric((max if self.kind == "max" else min)(self.total, other.total), 1.0, self.kind)
        pick = torch.maximum if self.kind == "max" else torch.minimum
        return Metric(pick(torch.as_tensor(self.total), torch.as_tensor(other.total)), 1.0, self.kind)

    def value(self) -> float:
        """Return the reduced number; NaN for a mean of nothing.

        Synchronizes with the device: call it once a step, not inside a phase.
        """
        if self.kind != "mean":
            return float(self.total)
        count = float(self.count)
        return float(self.total) / count if count else float("nan")


Metrics = Mapping[str, Metric]


def merge_metrics(first: Metrics, second: Metrics) -> dict[str, Metric]:
    """Return the union of two mappings; metrics of the same name are merged."""
    both = {name: first[name].merge(second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}
