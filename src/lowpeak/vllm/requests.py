"""Requests to vLLM, one per completion with a seed of its own, in waves; and its answers: read from HTTP, checked, as completions.

vLLM's server has two routes with token ids in, token ids and log-probs out: `/inference/v1/generate` tells which weights wrote
each token; `/v1/completions` is there without `--enable-scale-out`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch

from lowpeak.arguments import Sampling
from lowpeak.batching import assign
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import Completion, Prompt
from lowpeak.vllm.memory_errors import Where, cache_share
from lowpeak.vllm.protocol import Answer, Facts, Request

Route = Literal["/inference/v1/generate", "/v1/completions"]
GENERATE: Route = "/inference/v1/generate"
COMPLETIONS: Route = "/v1/completions"

Key = tuple[int, int, tuple[int, ...]]  # a prompt's serial, which of its completions, the prompt's tokens


@dataclass(frozen=True)
class Row:
    """One completion to be written: completion `number` of the prompt with this `serial`."""

    serial: int
    number: int
    request: Request

    @property
    def key(self) -> Key:
        """What names the completion among those of one policy version and sampling."""
        return self.serial, self.number, self.request.prompt_ids


def rows_of(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    end_ids: Iterable[int],
    regex: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[Row]:
    """A row per completion, a prompt's one after another so that vLLM's prefix cache has it once.

    `regex` is what a completion must match, `more` are vLLM's own sampling parameters.
    """
    common = {**parameters(sampling, end_ids, regex), **(more or {})}
    rows = []
    for prompt in prompts:
        for number in range(sampling.first_completion, sampling.first_completion + sampling.num_generations):
            own = {} if sampling.temperature == 0 else {"seed": seed_of(sampling, prompt.serial, number)}
            rows.append(Row(prompt.serial, number, Request(prompt.ids, {**common, **own})))
    return rows


def parameters(sampling: Sampling, end_ids: Iterable[int], regex: str | None) -> dict[str, Any]:
    """vLLM's sampling parameters, as JSON: a completion ends as the native engine's, with the token that ends it.

    Which tokens end it is said (`ignore_eos` and a list), so that a server's own generation config adds none.
    """
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": True,
        "stop_token_ids": sorted(end_ids),
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
    }
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
    if regex is not None:
        params["structured_outputs"] = {"regex": regex}
    return params


def seed_of(sampling: Sampling, serial: int, number: int) -> int:
    """The seed of one completion, 62 bits of a hash of (seed, rollout, serial, number): neither waves nor ranks are in it."""
    name = f"{sampling.seed}/{sampling.rollout}/{serial}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 2


def body_of(request: Request, route: Route) -> dict[str, Any]:
    """One completion's request; text is made only where a stop string needs it. An adapter is named as a model."""
    params = {"logprobs": 0, **request.params}
    named = {} if request.adapter is None else {"model": request.adapter.name}
    if route == COMPLETIONS:
        return (
            {"prompt": list(request.prompt_ids), "return_token_ids": True, "add_special_tokens": False} | params | named
        )
    params.setdefault("detokenize", bool(params.get("stop") or params.get("bad_words")))
    return {"token_ids": list(request.prompt_ids), "sampling_params": params} | named


def read(answer: Any, route: Route, url: str) -> Answer:
    """The answer to `body_of`; EngineError where it has another form. Whether it can be used is looked at as any engine's is."""
    try:
        (choice,) = answer["choices"]
        ids = tuple(choice["token_ids"])
        logprobs = _logprobs(choice["logprobs"], route)
        reason = choice["finish_reason"]
        versions = _versions(choice.get("weight_versions") or ())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"the server at {url} answered {route} in a form that vLLM does not ({type(error).__name__}: {error}); is its version "
            "in the supported range?"
        ) from None
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise EngineError(f"the server at {url} returned tokens that are no ids.")
    return Answer(ids, logprobs, str(reason), versions)


def _logprobs(found: Mapping[str, Any] | None, route: Route) -> tuple[float, ...]:
    if found is None:
        return ()
    if route == COMPLETIONS:
        return tuple(float(each) for each in found["token_logprobs"])
    return tuple(float(each["logprob"]) for each in found["content"] or ())


def _versions(spans: Any) -> frozenset[int]:
    """The policy versions among weight versions; vLLM's own word for a checkpoint as it was loaded is none."""
    names = (str(span["version"]) for span in spans)
    return frozenset(int(name) for name in names if name.isdigit())


def checked(rows: Sequence[Row], answers: Sequence[Answer], version: int, num_tokens: int | None) -> list[Answer]:
    """The answers to these rows, written by the weights of `version` from a vocabulary of `num_tokens` (None: any).

    EngineError for too few of them or what is none; LostEngineError, with those that are good, where an answer was given
    up or was written by other weights.
    """
    if len(answers) != len(rows):
        raise EngineError(f"vLLM returned {len(answers)} completions for {len(rows)} requests; one for each is needed.")
    good: dict[int, Answer] = {}
    given_up, others = 0, set[int]()
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if answer.finish_reason == "abort":
            given_up += 1
        elif answer.policy_versions - {version}:
            others |= answer.policy_versions - {version}
        else:
            _check(row, answer, num_tokens)
            good[i] = answer
    if len(good) == len(rows):
        return list(answers)
    reason = (
        f"gave up {given_up} of {len(rows)} requests" if given_up else f"answered with the weights of {sorted(others)}"
    )
    error = LostEngineError(f"vLLM {reason}, while version {version} was asked: who else uses this engine?")
    error.finished = good
    raise error


def _check(row: Row, answer: Answer, num_tokens: int | None) -> None:
    where = f"vLLM's completion {row.number} of prompt {row.serial}"
    count, most = len(answer.ids), int(row.request.params["max_tokens"])
    if not 0 < count <= most or count != len(answer.logprobs):
        raise EngineError(
            f"{where} has {count} tokens and {len(answer.logprobs)} log-probs; as many of each are needed, from 1 to {most}."
        )
    if answer.finish_reason not in ("stop", "length") or (answer.finish_reason == "length" and count < most):
        raise EngineError(
            f"{where} ended with {answer.finish_reason!r} after {count} of {most} tokens, which is no end."
        )
    _check_values(where, answer, num_tokens)


def _check_values(where: str, answer: Answer, num_tokens: int | None) -> None:
    wrong = [token for token in answer.ids if token < 0 or (num_tokens is not None and token >= num_tokens)]
    if wrong:
        raise EngineError(
            f"{where} has token {wrong[0]}, which is none of the model's {num_tokens}: another tokenizer?"
        )
    if not all(math.isfinite(logprob) for logprob in answer.logprobs):
        raise EngineError(
            f"{where} has log-probs that are NaN or infinite: the policy's weights are broken (a diverged step or a checkpoint "
            "that was not loaded)."
        )


def completion_of(answer: Answer) -> Completion:
    """The answer as a completion that the policy wrote whole."""
    return Completion(
        ids=torch.tensor(answer.ids, dtype=torch.int32),
        logprobs=torch.tensor(answer.logprobs, dtype=torch.float32),
        loss_mask=torch.ones(len(answer.ids), dtype=torch.bool),
        finish_reason="stop" if answer.finish_reason == "stop" else "length",
    )


def rows_that_fit(all_facts: Sequence[Facts], longest: int, num_callers: int, where: Where) -> int:
    """Rows of `longest` tokens that the engines' caches hold at once, shared evenly by so many callers.

    vLLM queues what does not fit and throws away the keys and values of what it has begun: a wave that fits is never
    computed twice. EngineError where an engine cannot hold one row.
    """
    total = 0
    for facts in all_facts:
        if facts.kv_tokens < longest:
            raise EngineError(
                f"One row of {longest} tokens (prompt and completion) does not fit vLLM's KV cache of {facts.kv_tokens} "
                f"tokens: {cache_share(where, 'raise')}, or generate fewer tokens."
            )
        total += min(facts.max_num_seqs, facts.kv_tokens // longest)
    return max(1, total // num_callers)


def form_waves(rows: Sequence[Row], capacity: int) -> list[list[Row]]:
    """The rows in as few waves of at most `capacity` as there can be, about equally large, longest prompts first.

    A prompt's rows stay in one wave where that makes no more waves; else its second part finds the prompt in the cache.
    """
    ordered = sorted(rows, key=lambda row: (-len(row.request.prompt_ids), row.serial, row.number))
    num_waves = -(-len(ordered) // capacity)
    waves, start = [], 0
    for wave in range(1, num_waves + 1):
        stop = _cut(ordered, start, wave, num_waves, capacity)
        waves.append(ordered[start:stop])
        start = stop
    return waves


def _cut(rows: Sequence[Row], start: int, wave: int, num_waves: int, capacity: int) -> int:
    """Where a wave ends that begins at `start`: between two prompts next to an even share, if all rows still fit."""
    even = len(rows) * wave // num_waves
    least = max(start + 1, len(rows) - capacity * (num_waves - wave))
    most = min(start + capacity, len(rows))
    between = [i for i in range(least, most + 1) if i == len(rows) or rows[i - 1].serial != rows[i].serial]
    if wave == num_waves:
        return len(rows)
    return min(between, key=lambda i: abs(i - even), default=min(max(even, least), most))


def share(wave: Sequence[Row], num_engines: int) -> list[list[int]]:
    """Which rows of a wave each engine answers: a prompt's rows together where there are prompts enough, even in tokens."""
    parts = [list(part) for _, part in groupby(range(len(wave)), key=lambda i: wave[i].serial)]
    if len(parts) < num_engines:
        parts = [[i] for i in range(len(wave))]
    shares = assign([_tokens(wave, part) for part in parts], num_engines)
    return [[i for number in mine for i in parts[number]] for mine in shares]


def _tokens(wave: Sequence[Row], part: Sequence[int]) -> int:
    """What a prompt's rows may cost: the prompt once, and completions of full length."""
    request = wave[part[0]].request
    return len(request.prompt_ids) + len(part) * int(request.params["max_tokens"])
