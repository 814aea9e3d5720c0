"""Rollouts by a user's function: `rollout_func(prompts, trainer)`, with tools and environments of the user's choice.

The contract is TRL's. `prompts` has each prompt, as the data set gave it, once per completion that is asked of it, one
after another. The function returns one entry for each: a dict with `prompt_ids`, `completion_ids`, `logprobs` (None if
they are not known), optionally `env_mask` (1 for a token of the policy, 0 for one of the environment), and any other
fields, which rewards get as columns. `trainer.model.training` tells a rollout from an evaluation. `trainer.asked`, a
Sampling, says how completions are to be drawn: an evaluation also asks for one greedy completion of each prompt.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch

from lowpeak.arguments import Sampling
from lowpeak.data import REWARD_KEYWORDS, PromptReader
from lowpeak.errors import ArgumentError, EngineError, fail_on_exit
from lowpeak.models import num_embeddings
from lowpeak.records import Completion, Group, Prompt
from lowpeak.rollout.engine import RolloutEngine, SliceForm

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_ROUNDED = 1e-2  # a log-prob that half precision rounds may be a little above 0
_PER_ROW = (*_REQUIRED, "env_mask")
# vLLM's names of sampling parameters, which TRL's helper takes, and the fields of Sampling that they are.
_OVERRIDES = {
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
}


@dataclass
class _FunctionCall:
    """What one call of the function asks for; the seeds of its calls of the engine follow from it."""

    first_serial: int
    sampling: Sampling
    num_calls: int = 0


@dataclass(eq=False, repr=False)
class FunctionEngine:
    """An engine whose groups a user's function writes; `engine` is the one that the function may ask.

    `hold` gives the policy in the state in which the function finds it, and `end_ids` the tokens that end a completion.
    """

    function: Callable[..., Mapping[str, Any]]
    trainer: Any
    engine: RolloutEngine
    hold: Callable[[], AbstractContextManager[Any]]
    end_ids: Callable[[Sampling], Collection[int]]
    new_reader: Callable[[], PromptReader]
    cuts_groups = False  # the function may need a group's entries together
    _question: _FunctionCall | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        self.load, self.sleep, self.wake, self.close = engine.load, engine.sleep, engine.wake, engine.close

    @property
    def policy_version(self) -> int | None:
        return self.engine.policy_version

    @property
    def slice_form(self) -> SliceForm:
        return self.engine.slice_form

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Call the function once for all prompts; EngineError says why its answer cannot be used.

        Without prompts it is not called, and this rank helps the others to generate if forwards need all ranks.
        """
        training, size = self.trainer.model.training, sampling.num_generations
        with self.hold() as model:
            if not prompts:
                return []
            entries = [copy.deepcopy(prompt.source) for prompt in prompts for _ in range(size)]
            question = _FunctionCall(prompts[0].serial, sampling)
            with self._asking(question, training), fail_on_exit(EngineError, "rollout_func"):
                output = self.function(entries, self.trainer)
            num_tokens = num_embeddings(model) or int(model.config.get_text_config().vocab_size)
        fields, ends = _check_output(output, len(entries), size), self.end_ids(sampling)
        rows = [_completion(fields, row, sampling.max_new_tokens, ends, num_tokens) for row in range(len(entries))]
        return [Group(prompt, tuple(rows[p * size : (p + 1) * size])) for p, prompt in enumerate(prompts)]

    def complete(self, prompts: Sequence[Any], overrides: Mapping[str, Any]) -> list[Group]:
        """Ask the engine for one completion of each prompt, drawn as asked of the function but for `overrides`.

        EngineError outside of the function's call.
        """
        question = self._question
        if question is None:
            raise EngineError("generate_rollout_completions was called outside of a rollout_func; call it inside one.")
        question.num_calls += 1
        sampling = replace(
            question.sampling, num_generations=1, seed=_call_seed(question), **_sampling_overrides(overrides)
        )
        read = self.new_reader().read_batch([{"prompt": prompt} for prompt in prompts], 0)
        return self.engine.generate([prompt for prompt in read if prompt is not None], sampling)

    @contextmanager
    def _asking(self, question: _FunctionCall, training: bool) -> Iterator[None]:
        """Tell the function, by the trainer that it gets, what is asked of it."""
        trainer, self._question = self.trainer, question
        trainer.asked, mode = question.sampling, trainer.model.training
        # TRL's functions tell a rollout from an evaluation by this flag. The modules inside stay in eval mode.
        trainer.model.training = training
        try:
            yield
        finally:
            trainer.asked, self._question = None, None
            trainer.model.training = mode


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Return one completion per prompt from the run's engine, inside a `rollout_func`; TRL's function of this name.

    Prompts are strings, or lists of messages for the chat template. Each result has `prompt_ids`, `completion_ids`,
    `logprobs` and `text`. `generation_overrides` are in vLLM's names (`max_tokens`, `temperature`, ...).
    """
    if as_chat is not None and any(isinstance(prompt, list) != as_chat for prompt in prompts):
        kind = "a list of messages" if as_chat else "a string"
        raise ArgumentError(f"as_chat={as_chat} needs prompts that are each {kind}; leave it out to go by their type.")
    engine, tokenizer = trainer.maker.engine, trainer.processing_class
    if not isinstance(engine, FunctionEngine):
        raise EngineError("generate_rollout_completions was called in a run without a rollout_func; pass one.")
    results = []
    for group in engine.complete(prompts, generation_overrides or {}) if prompts else []:
        ids = group.completions[0].ids.tolist()
        results.append(
            {
                "prompt_ids": list(group.prompt.ids),
                "completion_ids": ids,
                "logprobs": group.completions[0].logprobs.tolist(),
                "text": tokenizer.decode(ids, skip_special_tokens=True),
            }
        )
    return results


def _sampling_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Sampling that vLLM's names override; None leaves one as it is."""
    unknown = sorted(set(overrides) - {*_OVERRIDES, "n"})
    if unknown or overrides.get("n", 1) != 1:
        what = ", ".join(unknown) or f"n={overrides['n']}"
        raise ArgumentError(
            f"generation_overrides has {what}, which cannot act; it takes {', '.join(_OVERRIDES)}, and one completion is "
            "written for each prompt."
        )
    fields = {_OVERRIDES[name]: value for name, value in overrides.items() if name != "n" and value is not None}
    for name in {"stop", "stop_token_ids"} & fields.keys():
        fields[name] = (fields[name],) if isinstance(fields[name], str) else tuple(fields[name])
    if "top_k" in fields:
        fields["top_k"] = max(0, fields["top_k"])  # vLLM's -1 is off, too
    return fields


def _call_seed(question: _FunctionCall) -> int:
    """The seed of one call of the engine: 56 bits of a hash of the question and the call's number in it."""
    name = f"{question.sampling.seed}/{question.first_serial}/{question.num_calls}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")


def _check_names(output: Any) -> None:
    """Raise EngineError for an answer that is no dict, lacks a field, or has one under a reward's keyword."""
    if not isinstance(output, Mapping):
        raise EngineError(f"rollout_func returned {type(output).__name__}; it must return a dict of lists.")
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        raise EngineError(f"rollout_func's answer lacks {', '.join(missing)}; it must have {', '.join(_REQUIRED)}.")
    taken = sorted(REWARD_KEYWORDS & output.keys() - {*_REQUIRED})
    if taken:
        raise EngineError(
            f"rollout_func's answer has {', '.join(map(repr, taken))}, keywords of every reward, which are made of its ids: rename "
            "the fields."
        )


def _check_output(output: Any, rows: int, num_generations: int) -> dict[str, Sequence[Any]]:
    """The answer as lists with one entry per row; EngineError if it cannot be that."""
    _check_names(output)
    fields = {name: values if _is_list(values) else [values] * rows for name, values in output.items()}
    for name, values in fields.items():
        if name in _PER_ROW and output[name] is not None and values is not output[name]:
            raise EngineError(
                f"rollout_func's {name!r} is {output[name]!r:.40}; it must be a list with one entry for each of {rows} prompts."
            )
        if len(values) != rows:
            raise EngineError(
                f"rollout_func's {name!r} has {len(values)} entries for {rows} prompts; it must have one for each, and each "
                f"prompt comes {num_generations} times, once per completion."
            )
    empty = [row for row, ids in enumerate(fields["prompt_ids"]) if not len(ids)]
    if empty:
        raise EngineError(
            f"rollout_func: row {empty[0]} has no prompt_ids; the first token needs one to be predicted from."
        )
    return fields


def _is_list(values: Any) -> bool:
    """Whether a field has one entry per row: lists, tuples, arrays. Anything else is the same for all rows."""
    return isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0


def _completion(
    fields: Mapping[str, Sequence[Any]], row: int, max_new_tokens: int, ends: Collection[int], num_tokens: int
) -> Completion:
    ids, prompt_ids = (_token_ids(fields, name, row, num_tokens) for name in ("completion_ids", "prompt_ids"))
    logprobs = _list_or(fields["logprobs"][row], [None] * len(ids))
    mask = _list_or(fields["env_mask"][row] if "env_mask" in fields else None, [1] * len(ids))
    if not len(ids) == len(logprobs) == len(mask) > 0:
        raise EngineError(
            f"rollout_func: row {row} has {len(ids)} completion_ids, {len(logprobs)} logprobs and {len(mask)} values of "
            "env_mask; the three must be equally long and not empty."
        )
    cut = ids[-1] not in ends and len(ids) >= max_new_tokens
    return Completion(
        ids=torch.tensor(ids, dtype=torch.int32),
        logprobs=_logprobs(logprobs, mask, row),
        loss_mask=torch.tensor(mask).bool(),
        finish_reason="length" if cut else "stop",
        prompt_ids=tuple(prompt_ids),
        extra={name: values[row] for name, values in fields.items() if name not in (*_REQUIRED, "env_mask")},
    )


def _logprobs(values: Sequence[Any], mask: Sequence[Any], row: int) -> torch.Tensor:
    """A row's log-probs, NaN where they are not known; EngineError for what is none of a token that the policy wrote."""
    flat = [value[0] if isinstance(value, list | tuple) else value for value in values]
    written = [value for value, kept in zip(flat, mask, strict=True) if kept and value is not None]
    wrong = [value for value in written if not -math.inf < value < _ROUNDED]
    if wrong:
        raise EngineError(
            f"rollout_func: row {row}: logprobs has {wrong[0]}; a log-prob is a finite number of at most 0, or None where it is "
            "not known."
        )
    return torch.tensor([math.nan if value is None else value for value in flat], dtype=torch.float32)


def _list_or(values: Any, default: list[Any]) -> list[Any]:
    return default if values is None else list(values)


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
