"""A user's own generation as an engine: `rollout_func(prompts, trainer)`, tools and environments included.

TRL's contract: prompts as the data set gave them, each once; back comes a dict of lists with one entry per completion,
prompt after prompt: `prompt_ids`, `completion_ids`, `logprobs`, optionally `env_mask` (1 where the policy wrote the
token, 0 where the environment did), and any other fields, which rewards get as columns. What is asked for meanwhile stands
in `trainer.asked`, a Sampling: evaluation asks for one greedy completion of each prompt (`temperature` 0) and for
`num_generations_eval` others, which `trainer.num_generations` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from typing import Any

import torch

from lowpeak.config.rollout import Sampling
from lowpeak.errors import EngineError
from lowpeak.records import Completion, Group, Prompt, Weights, WeightSlice
from lowpeak.rollout.engine import SliceForm
from lowpeak.wrapped import num_embeddings

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class FunctionEngine:
    """Groups from a function that generates with the trainer's model in its own way. Its groups are never cut."""

    def __init__(
        self,
        function: Callable[..., Mapping[str, Any]],
        trainer: Any,
        eos_token_id: int | None,
        hold: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._function = function
        self._hold = hold
        self._trainer = trainer
        self._eos = eos_token_id
        self._version: int | None = None

    @property
    def policy_version(self) -> int | None:
        """The version of the weights that the function finds in the trainer."""
        return self._version

    def load(self, slices: Iterable[WeightSlice], policy_version: int, weights: Weights = "merged") -> None:
        """Note the version: the function uses the trainer's own model, so no slice is read."""
        self._version = policy_version

    def sleep(self) -> None:
        """Nothing is held."""

    def wake(self) -> None:
        """Nothing was given back."""

    def close(self) -> None:
        """Nothing is held."""

    @property
    def cuts_groups(self) -> bool:
        """No: what belongs to a group is the function's to say."""
        return False

    @property
    def slice_form(self) -> SliceForm:
        """Any: no slice is read."""
        return SliceForm()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Call the function once for all prompts; EngineError says what of its answer cannot be used.

        Without prompts it is not called, and this rank helps the others to generate where they need all ranks.
        """
        with self._hold() as model:
            if not prompts:
                return []
            with _asking(self._trainer, sampling):
                output = self._function([prompt.source for prompt in prompts], self._trainer)
            num_tokens = num_embeddings(model) or int(model.config.get_text_config().vocab_size)
        rows = len(prompts) * sampling.num_generations
        fields = _checked(output, rows, len(prompts), sampling.num_generations)
        completions = [self._completion(fields, row, sampling, num_tokens) for row in range(rows)]
        size = sampling.num_generations
        return [Group(prompt, tuple(completions[p * size : (p + 1) * size])) for p, prompt in enumerate(prompts)]

    def _completion(
        self, fields: Mapping[str, Sequence[Any]], row: int, sampling: Sampling, num_tokens: int
    ) -> Completion:
        ids, prompt_ids = (_token_ids(fields, name, row, num_tokens) for name in ("completion_ids", "prompt_ids"))
        logprobs = list(fields["logprobs"][row])
        mask = list(fields["env_mask"][row]) if "env_mask" in fields else [1] * len(ids)
        if not len(ids) == len(logprobs) == len(mask) > 0:
            raise EngineError(
                f"rollout_func: row {row} has {len(ids)} completion_ids, {len(logprobs)} logprobs and {len(mask)} values of "
                "env_mask; the three must be equally long and not empty."
            )
        flat = [value[0] if isinstance(value, list | tuple) else value for value in logprobs]
        cut = ids[-1] != self._eos and len(ids) >= sampling.max_new_tokens
        return Completion(
            ids=torch.tensor(ids, dtype=torch.int32),
            logprobs=torch.tensor(flat, dtype=torch.float32),
            loss_mask=torch.tensor(mask).bool(),
            finish_reason="length" if cut else "stop",
            prompt_ids=tuple(prompt_ids),
            extra={name: values[row] for name, values in fields.items() if name not in (*_REQUIRED, "env_mask")},
        )


@contextmanager
def _asking(trainer: Any, sampling: Sampling) -> Iterator[None]:
    """Tell the function, by the trainer that it gets, what is asked of it."""
    before, trainer.asked = trainer.asked, sampling
    try:
        yield
    finally:
        trainer.asked = before


def _token_ids(fields: Mapping[str, Sequence[Any]], name: str, row: int, num_tokens: int) -> list[int]:
    """A row's tokens as plain numbers; a device that looks up a token it does not have may fail for good."""
    values = fields[name][row]
    ids = values.tolist() if hasattr(values, "tolist") else list(values)
    for token in ids:
        if not isinstance(token, Integral) or not 0 <= int(token) < num_tokens:
            raise EngineError(
                f"rollout_func: row {row}: {name} has {token!r}, which is no token of the model: they are whole numbers "
                f"from 0 to {num_tokens - 1}."
            )
    return [int(token) for token in ids]


def _checked(output: Any, rows: int, num_prompts: int, num_generations: int) -> Mapping[str, Sequence[Any]]:
    if not isinstance(output, Mapping):
        raise EngineError(f"rollout_func returned {type(output).__name__}; it must return a dict of lists.")
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        raise EngineError(f"rollout_func's answer lacks {', '.join(missing)}; it must have {', '.join(_REQUIRED)}.")
    for name, values in output.items():
        if not hasattr(values, "__len__") or len(values) != rows:
            count = len(values) if hasattr(values, "__len__") else "no"
            raise EngineError(
                f"rollout_func's {name!r} has {count} entries for {num_prompts} prompts x {num_generations} generations = "
                f"{rows} rows; one entry per completion is needed, prompt after prompt."
            )
    empty = [row for row, ids in enumerate(output["prompt_ids"]) if not len(ids)]
    if empty:
        raise EngineError(
            f"rollout_func: row {empty[0]} has no prompt_ids; the first token needs one to be predicted from."
        )
    return output
