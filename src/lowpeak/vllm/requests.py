"""Requests to vLLM, their distribution over waves and engines, and the validation of the answers.

Each completion has a separate request with a separate seed. Three routes take token ids and return token ids and log-probs: that
of `lowpeak serve`, and vLLM's `/inference/v1/generate`, which also return the weight version of each token; `/v1/completions`
exists without `--enable-scale-out`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import torch

from lowpeak.arguments import Sampling
from lowpeak.batching import balanced_partition
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import Completion, Prompt
from lowpeak.vllm.engine_args import Location, cache_size_remedy
from lowpeak.vllm.protocol import Answer, EngineInfo, Request
from lowpeak.vllm.serving import TOKEN_ROUTE, decode_completions

Route = Literal["/lowpeak_tokens", "/inference/v1/generate", "/v1/completions"]
TOKENS: Route = TOKEN_ROUTE
GENERATE: Route = "/inference/v1/generate"
COMPLETIONS: Route = "/v1/completions"

_LENGTH_WINDOW = 256  # completions
_LENGTH_MARGIN = 1.25

Key = tuple[int, int, tuple[int, ...]]  # prompt serial, completion number, prompt ids


@dataclass(frozen=True)
class SequenceRequest:
    """Request for completion `number` of the prompt with this `serial`."""

    serial: int
    number: int
    request: Request

    @property
    def key(self) -> Key:
        """Return the sequence's identity within one wave."""
        return self.serial, self.number, self.request.prompt_ids


@dataclass
class PartialAnswers:
    """Completions of a wave's requests, each with its policy version, kept while others are awaited: 9 bytes a token."""

    _answers: dict[Key, tuple[Completion, int]] = field(default_factory=dict)

    def missing(self, sequences: Iterable[SequenceRequest]) -> list[SequenceRequest]:
        """Return the sequences that have no answer."""
        return [sequence for sequence in sequences if sequence.key not in self._answers]

    def drop_other_versions(self, policy_version: int) -> None:
        self._answers = {key: each for key, each in self._answers.items() if each[1] == policy_version}

    def add(self, sequences: Sequence[SequenceRequest], answers: Mapping[int, Answer], policy_version: int) -> None:
        """Keep the answers, which are given by the indices of their sequences."""
        completions = {sequences[i].key: (to_completion(answer), policy_version) for i, answer in answers.items()}
        self._answers.update(completions)

    def of(self, sequences: Iterable[SequenceRequest]) -> list[tuple[Completion, int]]:
        """Return the completions of these sequences, and the versions of the weights that generated them."""
        return [self._answers[sequence.key] for sequence in sequences]


def sequence_requests(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    end_ids: Iterable[int],
    regex: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[SequenceRequest]:
    """Return one request per completion, grouped by prompt so that vLLM's prefix cache computes each prompt once.

    `regex` is what a completion must match; `more` are additional sampling parameters of vLLM.
    """
    common = {**sampling_params(sampling, end_ids, regex), **(more or {})}
    sequences = []
    for prompt in prompts:
        for number in range(sampling.first_completion, sampling.first_completion + sampling.num_generations):
            seed = {} if sampling.temperature == 0 else {"seed": completion_seed(sampling, prompt.serial, number)}
            sequences.append(SequenceRequest(prompt.serial, number, Request(prompt.ids, {**common, **seed})))
    return sequences


def sampling_params(sampling: Sampling, end_ids: Iterable[int], regex: str | None) -> dict[str, Any]:
    """Return vLLM's sampling parameters as JSON.

    A completion includes the token that ends it, as in the native engine.
    """
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": min(sampling.min_new_tokens, sampling.max_new_tokens),
        # An explicit list, so that a server's generation config adds no end tokens.
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


def completion_seed(sampling: Sampling, serial: int, number: int) -> int:
    """Return the seed of one completion, which depends on neither waves nor ranks.

    It is 62 bits of a hash of (seed, rollout, serial, number).
    """
    name = f"{sampling.seed}/{sampling.rollout}/{serial}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 2


def request_body(request: Request, route: Route) -> dict[str, Any]:
    """Return the JSON body of one completion's request; an adapter is requested as the model's name."""
    params = {"logprobs": 0, **request.params}
    model = {} if request.adapter is None else {"model": request.adapter.name}
    if route == COMPLETIONS:
        return (
            {"prompt": list(request.prompt_ids), "return_token_ids": True, "add_special_tokens": False} | params | model
        )
    # Detokenise only for stop strings and bad words.
    params.setdefault("detokenize", bool(params.get("stop") or params.get("bad_words")))
    return {"token_ids": list(request.prompt_ids), "sampling_params": params} | model


def parse_answer(answer: Any, route: Route, url: str) -> Answer:
    """Return the answer to a `request_body`; raise EngineError if its form is wrong. `check_answers` checks its values."""
    try:
        (choice,) = decode_completions(answer) if route == TOKENS else answer["choices"]
        ids = tuple(choice["token_ids"])
        logprobs = _logprobs(choice["logprobs"], route)
        reason = choice["finish_reason"]
        versions = _versions(choice.get("weight_versions") or ())
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise EngineError(
            f"the server at {url} returned a malformed answer to {route} ({type(error).__name__}: {error}); check that its "
            "vLLM version is in the supported range."
        ) from None
    if route != TOKENS and not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise EngineError(f"the server at {url} returned token ids that are not integers.")
    return Answer(ids, logprobs, str(reason), versions)


def _logprobs(values: Any, route: Route) -> tuple[float, ...]:
    if values is None:
        return ()
    if route == TOKENS:
        return tuple(values)
    if route == COMPLETIONS:
        return tuple(float(each) for each in values["token_logprobs"])
    return tuple(float(each["logprob"]) for each in values["content"] or ())


def _versions(spans: Any) -> frozenset[int]:
    """Return the policy versions among weight versions, without vLLM's name for the loaded checkpoint."""
    names = (str(span["version"]) for span in spans)
    return frozenset(int(name) for name in names if name.isdigit())


def check_answers(
    sequences: Sequence[SequenceRequest], answers: Sequence[Answer], version: int, num_tokens: int | None
) -> list[Answer]:
    """Return the answers if weights of `version` generated them and they are valid.

    Raise EngineError for a wrong number of answers or an invalid one (`num_tokens` is the vocabulary size, None: any); raise
    LostEngineError, with the valid answers in `finished`, if requests were aborted or used other weights.
    """
    if len(answers) != len(sequences):
        raise EngineError(
            f"vLLM returned {len(answers)} completions for {len(sequences)} requests; it must return one for each."
        )
    valid: dict[int, Answer] = {}
    num_aborted, other_versions = 0, set[int]()
    for i, (sequence, answer) in enumerate(zip(sequences, answers, strict=True)):
        if answer.finish_reason == "abort":
            num_aborted += 1
        elif answer.policy_versions - {version}:
            other_versions |= answer.policy_versions - {version}
        else:
            _check(sequence, answer, num_tokens)
            valid[i] = answer
    if len(valid) == len(sequences):
        return list(answers)
    reason = (
        f"aborted {num_aborted} of {len(sequences)} requests"
        if num_aborted
        else f"used weights of versions {sorted(other_versions)}"
    )
    error = LostEngineError(f"vLLM {reason} instead of version {version}: check that no other run uses this engine.")
    error.finished = valid
    raise error


def _check(sequence: SequenceRequest, answer: Answer, num_tokens: int | None) -> None:
    name = f"vLLM's completion {sequence.number} of prompt {sequence.serial}"
    count, most = len(answer.ids), int(sequence.request.params["max_tokens"])
    if not 0 < count <= most or count != len(answer.logprobs):
        raise EngineError(
            f"{name} has {count} tokens and {len(answer.logprobs)} log-probs; the two must be equal, from 1 to {most}."
        )
    if answer.finish_reason not in ("stop", "length") or (answer.finish_reason == "length" and count < most):
        raise EngineError(
            f"{name} has finish reason {answer.finish_reason!r} after {count} of {most} tokens; it must be 'stop', or 'length' at "
            "the limit."
        )
    _check_values(name, answer, num_tokens)


def _check_values(name: str, answer: Answer, num_tokens: int | None) -> None:
    invalid = [token for token in answer.ids if token < 0 or (num_tokens is not None and token >= num_tokens)]
    if invalid:
        raise EngineError(
            f"{name} has token {invalid[0]}, outside the model's {num_tokens}: start vLLM with the trainer's tokenizer."
        )
    if not all(math.isfinite(logprob) for logprob in answer.logprobs):
        raise EngineError(
            f"{name} has log-probs that are NaN or infinite: the policy's weights are broken (a diverged step or a checkpoint "
            "that was not loaded)."
        )


def to_completion(answer: Answer) -> Completion:
    """Return the answer as a completion whose tokens are all the policy's."""
    return Completion(
        ids=torch.tensor(answer.ids, dtype=torch.int32),
        logprobs=torch.tensor(answer.logprobs, dtype=torch.float32),
        loss_mask=torch.ones(len(answer.ids), dtype=torch.bool),
        finish_reason="stop" if answer.finish_reason == "stop" else "length",
    )


@dataclass
class CompletionLengths:
    """Running mean of the tokens of about the last 256 completions."""

    mean: float | None = None
    _count: int = 0

    def add(self, lengths: Sequence[int]) -> None:
        """Add all answers of a wave at once: those that come first are the short ones."""
        total = self._count + len(lengths)
        self.mean = (self._count * (self.mean or 0.0) + sum(lengths)) / total if lengths else self.mean
        self._count = min(_LENGTH_WINDOW, total)


def wave_capacity(
    engines: Sequence[EngineInfo],
    requests: Sequence[Request],
    lengths: CompletionLengths,
    num_callers: int,
    where: Location,
) -> int:
    """Return how many sequences the engines' caches are expected to hold at once, divided by `num_callers`.

    Before lengths are known, that is as many as fit at full length. Raise EngineError if one sequence exceeds an engine's cache.
    """
    longest = max(len(request.prompt_ids) + int(request.params["max_tokens"]) for request in requests)
    tokens = longest if lengths.mean is None else min(longest, _expected_tokens(requests, lengths.mean))
    total = 0
    for info in engines:
        if info.kv_tokens < longest:
            raise EngineError(
                f"One sequence of {longest} tokens (prompt and completion) does not fit vLLM's KV cache of {info.kv_tokens} "
                f"tokens: {cache_size_remedy(where, 'raise')}, or generate fewer tokens."
            )
        total += min(info.max_num_seqs, info.kv_tokens // tokens)
    return max(1, total // num_callers)


def _expected_tokens(requests: Sequence[Request], mean_completion: float) -> int:
    """Return 1.25 times the mean tokens of these sequences, whose completions are expected to be as long as earlier ones."""
    # If they are longer, vLLM preempts the youngest sequences: it drops their keys and values and computes them again later.
    total = sum(
        len(request.prompt_ids) + min(mean_completion, int(request.params["max_tokens"])) for request in requests
    )
    return math.ceil(_LENGTH_MARGIN * total / len(requests))


def form_waves(sequences: Sequence[SequenceRequest], capacity: int) -> list[list[SequenceRequest]]:
    """Split sequences into the fewest waves of at most `capacity`, about equally large, longest prompts first.

    A prompt's sequences stay in one wave unless that needs more waves; a second part finds the prompt in the prefix cache.
    """
    ordered = sorted(
        sequences, key=lambda sequence: (-len(sequence.request.prompt_ids), sequence.serial, sequence.number)
    )
    num_waves = -(-len(ordered) // capacity)
    waves, start = [], 0
    for wave in range(1, num_waves + 1):
        stop = _wave_end(ordered, start, wave, num_waves, capacity)
        waves.append(ordered[start:stop])
        start = stop
    return waves


def _wave_end(sequences: Sequence[SequenceRequest], start: int, wave: int, num_waves: int, capacity: int) -> int:
    """Return the end of the wave from `start`: the boundary of two prompts nearest to an even split that fits."""
    even = len(sequences) * wave // num_waves
    least = max(start + 1, len(sequences) - capacity * (num_waves - wave))
    most = min(start + capacity, len(sequences))
    boundaries = [
        i for i in range(least, most + 1) if i == len(sequences) or sequences[i - 1].serial != sequences[i].serial
    ]
    if wave == num_waves:
        return len(sequences)
    return min(boundaries, key=lambda i: abs(i - even), default=min(max(even, least), most))


def split_wave(wave: Sequence[SequenceRequest], num_engines: int) -> list[list[int]]:
    """Return each engine's indices into the wave, balanced by tokens; whole groups if there are enough prompts."""
    parts = [list(part) for _, part in groupby(range(len(wave)), key=lambda i: wave[i].serial)]
    if len(parts) < num_engines:
        parts = [[i] for i in range(len(wave))]
    shares = balanced_partition([_num_tokens(wave, part) for part in parts], num_engines)
    return [[i for number in share for i in parts[number]] for share in shares]


def _num_tokens(wave: Sequence[SequenceRequest], part: Sequence[int]) -> int:
    """Return the maximal tokens of sequences that share a prompt: the prompt once, and completions of full length."""
    request = wave[part[0]].request
    return len(request.prompt_ids) + len(part) * int(request.params["max_tokens"])
