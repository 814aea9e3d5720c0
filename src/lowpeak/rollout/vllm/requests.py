"""What is asked of vLLM: one request per completion, whose draws are its own whatever it is generated with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.vllm.vllm import Request

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
