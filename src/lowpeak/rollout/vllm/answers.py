"""What vLLM answers, checked and as completions: a row that cannot be used is one sentence, not a training run on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import Completion
from lowpeak.rollout.vllm.requests import Row
from lowpeak.rollout.vllm.vllm import Answer


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
