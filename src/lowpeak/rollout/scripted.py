"""The fake engine: it says what a script says, and remembers how it was used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowpeak.config.rollout import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Completion, Group, Prompt, Weights, WeightSlice
from lowpeak.rollout.engine import SliceForm

Line = Sequence[int] | Completion
Script = Mapping[str | tuple[int, ...], Sequence[Line]] | Callable[[Prompt], Sequence[Line]]


@dataclass(frozen=True)
class Call:
    """One call of `generate` and the version of the weights that answered it."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    policy_version: int


class ScriptedEngine:
    """A rollout engine that needs no model: each prompt's completions come from `script`.

    `script` maps a prompt's source string or token ids to its completions, or is a function of the prompt; they are
    taken in turn, from the start again when a group is larger. Token ids become a completion that ended by itself
    with log-prob 0 everywhere (the script is certain). `calls` are the calls so far; `loads` the versions loaded, with
    the names of the slices that came.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._policy_version: int | None = None
        self.calls: list[Call] = []
        self.loads: list[tuple[int, tuple[str, ...]]] = []
        self.asleep = False

    @property
    def policy_version(self) -> int | None:
        """The version loaded last, or None."""
        return self._policy_version

    @property
    def cuts_groups(self) -> bool:
        """No: a script says whole groups."""
        return False

    @property
    def slice_form(self) -> SliceForm:
        """Small ones, in their own dtypes: their names alone are kept."""
        return SliceForm()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """What the script says for each prompt; EngineError before the first `load`, asleep, or off the script."""
        if self._policy_version is None:
            raise EngineError("The engine holds no weights yet: call load() before generate().")
        if self.asleep:
            raise EngineError("The engine is asleep: call wake() before generate().")
        self.calls.append(Call(tuple(prompts), sampling, self._policy_version))
        return [self._group(prompt, sampling.num_generations) for prompt in prompts]

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        """Reads every slice, keeps its name, and holds `policy_version` from then on."""
        self.loads.append((policy_version, tuple(piece.name for piece in slices)))
        self._policy_version = policy_version

    def sleep(self) -> None:
        """Refuse to generate until `wake`."""
        self.asleep = True

    def wake(self) -> None:
        """Generate again."""
        self.asleep = False

    def close(self) -> None:
        """Nothing is held."""

    def _group(self, prompt: Prompt, num_generations: int) -> Group:
        lines = self._lines(prompt)
        if not lines:
            raise EngineError(f"The script has no completion for prompt {prompt.serial} ({prompt.source!r}).")
        return Group(prompt, tuple(_completion(lines[i % len(lines)]) for i in range(num_generations)))

    def _lines(self, prompt: Prompt) -> Sequence[Line]:
        if callable(self._script):
            return self._script(prompt)
        if isinstance(prompt.source, str) and prompt.source in self._script:
            return self._script[prompt.source]
        return self._script.get(prompt.ids, ())


def _completion(line: Line) -> Completion:
    if isinstance(line, Completion):
        return line
    ids = torch.tensor(list(line), dtype=torch.int32)
    return Completion(ids, torch.zeros(len(ids)), torch.ones(len(ids), dtype=torch.bool), "stop")
