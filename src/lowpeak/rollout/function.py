"""Rollouts by a user's function: `rollout_func(prompts, trainer)`, with tools and environments of the user's choice.

The contract is TRL's. `prompts` repeats each prompt, as the dataset contains it, once per requested completion,
consecutively. The function returns one entry for each: a dict with `prompt_ids`, `completion_ids`, `logprobs` (None
if unknown), optionally `env_mask` (1 for a token of the policy, 0 for one of the environment), and any other fields,
which rewards receive as columns. `trainer.model.training` distinguishes a rollout from an evaluation.
`trainer.rollout_func_sampling`, a Sampling, has the requested sampling parameters: an evaluation also requests one greedy
completion of each prompt.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any

import torch

from lowpeak.arguments import Sampling
from lowpeak.data import REWARD_KEYWORDS, PromptReader
from lowpeak.errors import ArgumentError, EngineError, LostEngineError, fail_on_exit
from lowpeak.heads import num_embeddings
from lowpeak.models import context_length
from lowpeak.records import Completion, Group, Prompt
from lowpeak.rollout.engine import RolloutEngine, SliceForm
from lowpeak.rollout.pending import GeneratedOnResult, Pending

_REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
_MAX_LOGPROB = 1e-2  # half precision may round a log-prob to slightly above 0
_PER_COMPLETION = (*_REQUIRED, "env_mask")
# vLLM's names of sampling parameters, which TRL's helper accepts, and the corresponding fields of Sampling.
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
    """One call of the function: its sampling parameters, and the numbers that seed its engine calls."""

    first_serial: int
    sampling: Sampling
    num_calls: int = 0


@dataclass(eq=False, repr=False)
class FunctionEngine:
    """Engine whose groups a user's function generates; the function may call `engine`.

    `gather_policy` returns the policy in the state in which the function receives it, `end_ids` the tokens that end a
    completion.
    """

    function: Callable[..., Mapping[str, Any]]
    trainer: Any
    engine: RolloutEngine
    gather_policy: Callable[[], AbstractContextManager[Any]]
    end_ids: Callable[[Sampling], Collection[int]]
    new_reader: Callable[[], PromptReader]
    _call: _FunctionCall | None = None
    _unfinished: tuple[Any, Pending] | None = None

    def __post_init__(self) -> None:
        engine = self.engine
        self.load, self.sleep, self.wake, self.close = engine.load, engine.sleep, engine.wake, engine.close

    @property
    def policy_version(self) -> int | None:
        return self.engine.policy_version

    @property
    def slice_form(self) -> SliceForm:
        return self.engine.slice_form

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Pending:
        return GeneratedOnResult(partial(self.generate, prompts, sampling))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Call the function once for all prompts; raise EngineError if its result is invalid.

        Without prompts it is not called; this rank then only takes part in the other ranks' forwards, if those need
        all ranks.
        """
        training, size = self.trainer.model.training, sampling.num_generations
        with self.gather_policy() as model:
            if not prompts:
                return []
            entries = [copy.deepcopy(prompt.source) for prompt in prompts for _ in range(size)]
            call = _FunctionCall(prompts[0].serial, sampling)
            with self._request_sampling(call, training), fail_on_exit(EngineError, "rollout_func"):
                output = self._call_function(entries)
            num_tokens = num_embeddings(model) or int(model.config.get_text_config().vocab_size)
            context = context_length(model)
        fields, ends = _check_output(output, len(entries), size), self.end_ids(sampling)
        completions = [_completion(fields, i, sampling.max_new_tokens, ends, num_tokens) for i in range(len(entries))]
        _check_context(completions, context)
        return [Group(prompt, tuple(completions[p * size : (p + 1) * size])) for p, prompt in enumerate(prompts)]

    def _call_function(self, entries: list[Any]) -> Mapping[str, Any]:
        """Return the function's result; after an error other than a lost engine, drop the wave that it waited for."""
        try:
            return self.function(entries, self.trainer)
        except LostEngineError:
            raise
        except BaseException:
            self._unfinished = None
            raise

    def complete(self, prompts: Sequence[Any], overrides: Mapping[str, Any]) -> list[Group]:
        """Request one completion of each prompt from the engine, with the call's sampling parameters and `overrides`.

        Raise EngineError outside of the function's call.
        """
        call = self._call
        if call is None:
            raise EngineError("generate_rollout_completions was called outside of a rollout_func; call it inside one.")
        call.num_calls += 1
        sampling = replace(call.sampling, num_generations=1, seed=_call_seed(call), **_sampling_overrides(overrides))
        read = self.new_reader().read_batch([{"prompt": prompt} for prompt in prompts], 0)
        wave = [prompt for prompt in read if prompt is not None]
        request = call.num_calls, [prompt.ids for prompt in wave], sampling
        unfinished = self._unfinished if self._unfinished is not None and self._unfinished[0] == request else None
        pending = self.engine.submit(wave, sampling) if unfinished is None else unfinished[1]
        try:
            groups = pending.result()
        except LostEngineError:
            # The function is called again: this call of it then requests only the completions that its wave lacks.
            self._unfinished = request, pending
            raise
        if unfinished is not None:
            self._unfinished = None
        return groups

    @contextmanager
    def _request_sampling(self, call: _FunctionCall, training: bool) -> Iterator[None]:
        """Set the sampling and the mode that the function reads from the trainer; reset them after the block."""
        trainer, self._call = self.trainer, call
        trainer.rollout_func_sampling, mode = call.sampling, trainer.model.training
        # TRL's functions tell a rollout from an evaluation by this flag. The modules inside stay in eval mode.
        trainer.model.training = training
        try:
            yield
        finally:
            trainer.rollout_func_sampling, self._call = None, None
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
    `logprobs` and `text`. `generation_overrides` have vLLM's names (`max_tokens`, `temperature`, ...).
    """
    if as_chat is not None and any(isinstance(prompt, list) != as_chat for prompt in prompts):
        kind = "a list of messages" if as_chat else "a string"
        raise ArgumentError(f"as_chat={as_chat} needs prompts that are each {kind}; omit it to decide by type.")
    engine, tokenizer = trainer.collector.engine, trainer.processing_class
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
    """Return the fields of a Sampling that vLLM's names override; None keeps a field."""
    unknown = sorted(set(overrides) - {*_OVERRIDES, "n"})
    if unknown or overrides.get("n", 1) != 1:
        what = ", ".join(unknown) or f"n={overrides['n']}"
        raise ArgumentError(
            f"generation_overrides has {what}, which has no effect; it accepts {', '.join(_OVERRIDES)}, and each prompt gets "
            "one completion."
        )
    fields = {_OVERRIDES[name]: value for name, value in overrides.items() if name != "n" and value is not None}
    for name in {"stop", "stop_token_ids"} & fields.keys():
        fields[name] = (fields[name],) if isinstance(fields[name], str) else tuple(fields[name])
    if "top_k" in fields:
        # vLLM's -1 also means off.
        fields["top_k"] = max(0, fields["top_k"])
    return fields


def _call_seed(call: _FunctionCall) -> int:
    """Return the seed of one engine call.

    It is 56 bits of a hash of the function's call and of the engine call's number within it.
    """
    name = f"{call.sampling.seed}/{call.first_serial}/{call.num_calls}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")


def _check_names(output: Any) -> None:
    """Raise EngineError for a result that is not a dict, lacks a field, or uses a reward's keyword."""
    if not isinstance(output, Mapping):
        raise EngineError(f"rollout_func returned {type(output).__name__}; it must return a dict of lists.")
    missing = [name for name in _REQUIRED if name not in output]
    if missing:
        raise EngineError(f"rollout_func's result lacks {', '.join(missing)}; it must have {', '.join(_REQUIRED)}.")
    taken = sorted(REWARD_KEYWORDS & output.keys() - {*_REQUIRED})
    if taken:
        raise EngineError(
            f"rollout_func's result has {', '.join(map(repr, taken))}, which are keywords of every reward: rename the fields."
        )


def _check_output(output: Any, count: int, num_generations: int) -> dict[str, Sequence[Any]]:
    """Return the result as lists with one entry per completion; raise EngineError if it is malformed."""
    _check_names(output)
    fields = {name: values if _is_list(values) else [values] * count for name, values in output.items()}
    for name, values in fields.items():
        if name in _PER_COMPLETION and output[name] is not None and values is not output[name]:
            raise EngineError(
                f"rollout_func's {name!r} is {output[name]!r:.40}; it must be a list with one entry for each of {count} prompts."
            )
        if len(values) != count:
            raise EngineError(
                f"rollout_func's {name!r} has {len(values)} entries for {count} prompts; it must have one for each; every "
                f"prompt is given {num_generations} times, once per completion."
            )
    empty = [i for i, ids in enumerate(fields["prompt_ids"]) if not len(ids)]
    if empty:
        raise EngineError(
            f"rollout_func: entry {empty[0]} has no prompt_ids; the first completion token needs at least one."
        )
    return fields


def _is_list(values: Any) -> bool:
    """Return whether a field has one entry per completion (list, tuple, array); any other value applies to all."""
    return isinstance(values, list | tuple) or getattr(values, "ndim", 0) > 0


def _completion(
    fields: Mapping[str, Sequence[Any]], index: int, max_new_tokens: int, ends: Collection[int], num_tokens: int
) -> Completion:
    ids, prompt_ids = (_token_ids(fields, name, index, num_tokens) for name in ("completion_ids", "prompt_ids"))
    logprobs = _list_or(fields["logprobs"][index], [None] * len(ids))
    mask = _list_or(fields["env_mask"][index] if "env_mask" in fields else None, [1] * len(ids))
    if not set(mask) <= {0, 1}:
        raise EngineError(f"rollout_func: entry {index}: env_mask has values other than 0 and 1.")
    if not len(ids) == len(logprobs) == len(mask) > 0:
        raise EngineError(
            f"rollout_func: entry {index} has {len(ids)} completion_ids, {len(logprobs)} logprobs and {len(mask)} values of "
            "env_mask; the three must be equally long and not empty."
        )
    is_truncated = ids[-1] not in ends and len(ids) >= max_new_tokens
    return Completion(
        ids=torch.tensor(ids, dtype=torch.int32),
        logprobs=_logprobs(logprobs, mask, index),
        loss_mask=torch.tensor(mask).bool(),
        finish_reason="length" if is_truncated else "stop",
        prompt_ids=tuple(prompt_ids),
        extra={name: values[index] for name, values in fields.items() if name not in (*_REQUIRED, "env_mask")},
    )


def _check_context(completions: Sequence[Completion], context: int | None) -> None:
    for index, each in enumerate(completions):
        total = len(each.prompt_ids or ()) + len(each)
        if context is not None and total > context:
            raise EngineError(
                f"rollout_func: entry {index} has {total} tokens of prompt and completion, beyond the model's context of "
                f"{context}: end it earlier."
            )


def _logprobs(values: Sequence[Any], mask: Sequence[Any], index: int) -> torch.Tensor:
    """Return the log-probs, NaN if unknown; raise EngineError for an invalid log-prob of a policy's token."""
    flat = [value[0] if isinstance(value, list | tuple) else value for value in values]
    known = [value for value, is_policy in zip(flat, mask, strict=True) if is_policy and value is not None]
    invalid = [value for value in known if not -math.inf < value < _MAX_LOGPROB]
    if invalid:
        raise EngineError(
            f"rollout_func: entry {index}: logprobs has {invalid[0]}; a log-prob is a finite number of at most 0, or None if "
            "unknown."
        )
    return torch.tensor([math.nan if value is None else value for value in flat], dtype=torch.float32)


def _list_or(values: Any, default: list[Any]) -> list[Any]:
    return default if values is None else list(values)


def _token_ids(fields: Mapping[str, Sequence[Any]], name: str, index: int, num_tokens: int) -> list[int]:
    """Return the token ids of one entry as integers."""
    values = fields[name][index]
    ids = values.tolist() if hasattr(values, "tolist") else list(values)
    # Checked here, because a GPU that looks up an invalid token may fail for the rest of the process.
    for token in ids:
        if not isinstance(token, Integral) or not 0 <= int(token) < num_tokens:
            raise EngineError(
                f"rollout_func: entry {index}: {name} has {token!r}, which is not a token of the model: tokens are integers "
                f"from 0 to {num_tokens - 1}."
            )
    return [int(token) for token in ids]
