"""Recurrent and convolution layers over a forest: the state at a prompt's end starts each of its completions.

A mixer of transformers (gated delta rule, Mamba, short convolution) reads its states from the cache that it is given, goes on
from them and stores the new ones. So the sequences of a forest take two calls: the prompts from empty states, and the
completions from copies of their prompts' states, with a cache through which gradients flow. A tree of branches, and any tree for
a mixer whose scan takes no state (Mamba 1), gives one row for each of its sequences instead, and shared tokens are computed again.

Shapes: L packed tokens, N rows of a call with M tokens each, X hidden size."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowpeak.batching import paths
from lowpeak.heads import backbone_of, modules_without_critic
from lowpeak.records import Node

# The largest fraction of a call's tokens that may be padding.
_MAX_PADDING = 0.25
_HOOK = "_lowpeak_forest_hook"
_CACHE_NAMES = ("cache", "cache_params", "past_key_values")  # of the mixers' argument, by release of transformers


def mixers_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model that carry states from token to token through transformers' cache, without a critic's.

    Mixers of transformers before 5.23 are omitted: they go on from a state with one token at a time only.
    """
    return [module for module in modules_without_critic(model) if _is_mixer(module)]


def _is_mixer(module: Any) -> bool:
    # transformers has no flag for it: mixers that go on from a state call `get_conv_state`, and their scans take
    # `initial_state`. Convolutions have no recurrent state.
    kind: Any = type(module)
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_convolution and _cache_name(kind) is not None and "get_conv_state" in _source(kind)


@functools.cache
def _cache_name(kind: Any) -> str | None:
    """Return the name of a mixer's argument for the cache; None for a module that is none."""
    names = inspect.signature(kind.forward).parameters
    return next((name for name in _CACHE_NAMES if name in names), None) if "attention_mask" in names else None


@functools.cache
def _source(kind: Any) -> str:
    """Return the source of a mixer's class, without the classes that wrappers derive from it."""
    classes = (each for each in kind.__mro__ if each.__module__.startswith("transformers."))
    return inspect.getsource(next(classes, kind))


def _takes_state(kind: Any) -> bool:
    """Return whether several tokens can follow a state."""
    return "initial_state" in _source(kind) or "update_recurrent_state" not in _source(kind)


def continues_by_single_tokens(model: nn.Module) -> bool:
    """Return whether only single tokens can follow the states of a model's mixers."""
    return not all(_takes_state(type(mixer)) for mixer in mixers_of(model))


def install_mixers(causal: nn.Module) -> None:
    """Let the mixers of a causal LM take the forest of their backbone's forward."""
    mixers, backbone = mixers_of(causal), cast(Any, backbone_of(causal))
    if not mixers or _HOOK in backbone.__dict__:
        return
    for mixer in mixers:
        # Bound to the module, so that a deep copy runs its own weights.
        mixer.forward = MethodType(_forest_forward, mixer)
        mixer._lowpeak_forest = None
    backbone._lowpeak_forest = None
    setattr(backbone, _HOOK, backbone.register_forward_pre_hook(_pass_forest, with_kwargs=True))


def uninstall_mixers(causal: nn.Module) -> None:
    """Restore the mixers' forward."""
    hook = backbone_of(causal).__dict__.pop(_HOOK, None)
    if hook is not None:
        hook.remove()
        for mixer in mixers_of(causal):
            del mixer.forward


def _pass_forest(backbone: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Give the mixers the forest of a forward: not all layers pass keywords on. A recomputed layer finds it, too."""
    forest = kwargs.get("forest")
    if forest is not backbone._lowpeak_forest:  # most forwards that generate have none, like the one before
        for module in (backbone, *mixers_of(backbone)):
            module._lowpeak_forest = forest


def _forest_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    kind: Any = type(self)
    forward, forest = kind.forward, self._lowpeak_forest
    if forest is None:
        return forward(self, hidden_states, *args, **kwargs)
    name = str(_cache_name(kind))
    kwargs = {key: value for key, value in kwargs.items() if key not in (name, "attention_mask", "forest")}

    def run(rows_NMX: Tensor, mask_NM: Tensor | None, states: States | None) -> Tensor:
        out: Tensor = forward(self, rows_NMX, attention_mask=mask_NM, **{name: states}, **kwargs)
        return out

    return forest.mixer_calls(_takes_state(kind)).run(run, hidden_states)


@dataclass
class States:
    """The states of one mixer, as a cache of transformers whose updates replace tensors: [N, ...] by number of the state."""

    conv: dict[int, Tensor] = field(default_factory=dict)
    recurrent: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def concatenate(parts: Sequence[States]) -> States:
        """Return the states of all rows of `parts`."""
        return States(
            {i: torch.cat([part.conv[i] for part in parts]) for i in parts[0].conv},
            {i: torch.cat([part.recurrent[i] for part in parts]) for i in parts[0].recurrent},
        )

    def fork(self, rows_N: Tensor) -> States:
        """Return copies of the states of some rows."""
        return States(
            {i: state.index_select(0, rows_N) for i, state in self.conv.items()},
            {i: state.index_select(0, rows_N) for i, state in self.recurrent.items()},
        )

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.conv)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Keep the last inputs of a convolution; return them all, after those that were kept."""
        if state_idx in self.conv:
            conv_states = torch.cat([self.conv[state_idx], conv_states], -1)
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        conv_states = nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.conv[state_idx] = conv_states[..., -width:]
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


@dataclass(frozen=True)
class MixerCall:
    """The rows of one call: indices [N * M] of packed tokens; `mask_NM` is False for padding on the left.

    `prompts_N` are the rows of the prompts' states that they start from; None: they start from none. `keeps_states`: they are
    prompts.
    """

    num_rows: int
    indices: Tensor
    mask_NM: Tensor | None = None
    prompts_N: Tensor | None = None
    keeps_states: bool = False


class MixerCalls:
    """A mixer's calls for a forest, and the index of each packed token among their results."""

    def __init__(self, nodes: Sequence[Node], length: int, device: torch.device, takes_state: bool) -> None:
        self._device = device
        self._sources, self._num_results = [-1] * length, 0
        self.calls: list[MixerCall] = []
        if takes_state:
            self._add_forked(nodes)
        else:
            self._add(paths(nodes))
        # Padding tokens take the row of zeros that `run` appends to the results.
        sources = [self._num_results if source < 0 else source for source in self._sources]
        self._sources_L = torch.tensor(sources, device=device)

    def _add_forked(self, nodes: Sequence[Node]) -> None:
        """Add calls for the roots that only leaves follow, for these leaves, and for each sequence of other trees."""
        parents = {node.parent for node in nodes} - {-1}
        inner = {index for index in parents if nodes[index].parent >= 0}
        prompts = parents - inner - {nodes[index].parent for index in inner}
        rows = self._add([list(nodes[index].tokens) for index in sorted(prompts)], keeps_states=True)
        row_of = {tokens[0]: row for row, tokens in enumerate(rows)}
        leaves = [node for node in nodes if node.parent in prompts]
        self._add(
            [list(leaf.tokens) for leaf in leaves], {leaf.start: row_of[nodes[leaf.parent].start] for leaf in leaves}
        )
        self._add([path for path in paths(nodes) if path[0] not in row_of])

    def _add(
        self, rows: list[list[int]], starts: dict[int, int] | None = None, keeps_states: bool = False
    ) -> list[list[int]]:
        """Add calls for rows of indices; return the rows in the order of the calls."""
        batches = _batches(rows)
        for batch in batches:
            prompts_N = None if starts is None else self._tensor([starts[row[0]] for row in batch])
            self.calls.append(self._call(batch, prompts_N, keeps_states))
        return [row for batch in batches for row in batch]

    def _call(self, batch: list[list[int]], prompts_N: Tensor | None, keeps_states: bool) -> MixerCall:
        """Return the call for rows of indices, and note where results go; kept states are padded on the left."""
        # A single token would take the path of decoding, which changes states in place.
        width = max(2, len(batch[-1]))
        indices, mask = [], []
        for row in batch:
            missing = width - len(row)
            indices += row[:1] * missing + row if keeps_states else row + row[-1:] * missing
            mask.append([False] * missing + [True] * len(row))
            for i, token in enumerate(row, self._num_results + missing * keeps_states):
                self._sources[token] = i
            self._num_results += width
        is_masked = keeps_states and len(batch[0]) < width
        mask_NM = self._tensor(mask) if is_masked else None
        return MixerCall(len(batch), self._tensor(indices), mask_NM, prompts_N, keeps_states)

    def _tensor(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def run(self, mixer: Callable[[Tensor, Tensor | None, States | None], Tensor], hidden_1LX: Tensor) -> Tensor:
        """Return the mixer's output for each packed token, [1, L, X]; zeros for padding tokens."""
        results: list[Tensor] = []
        kept: list[States] = []
        ends: States | None = None  # of all prompts
        for call in self.calls:
            states = States() if call.keeps_states else None
            if call.prompts_N is not None:
                ends = ends or States.concatenate(kept)
                states = ends.fork(call.prompts_N)
            rows_NMX = hidden_1LX[0].index_select(0, call.indices).unflatten(0, (call.num_rows, -1))
            results.append(mixer(rows_NMX, call.mask_NM, states).flatten(0, 1))
            if call.keeps_states and states is not None:
                kept.append(states)
        results.append(results[0].new_zeros(1, results[0].shape[-1]))
        return torch.cat(results).index_select(0, self._sources_L)[None]


def _batches(rows: list[list[int]]) -> list[list[list[int]]]:
    """Return rows of similar lengths together, the longest of each batch last."""
    batches: list[list[list[int]]] = []
    num_tokens = 0  # of the last batch without its padding
    for row in sorted(rows, key=len):
        if batches and num_tokens + len(row) >= (1 - _MAX_PADDING) * (len(batches[-1]) + 1) * len(row):
            batches[-1].append(row)
            num_tokens += len(row)
        else:
            batches.append([row])
            num_tokens = len(row)
    return batches
