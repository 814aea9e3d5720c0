"""How completions are drawn, and how many serve how many steps: small frozen records without defaults that surprise."""

from __future__ import annotations

from dataclasses import dataclass

# What generation_kwargs may say, in transformers' and vLLM's names, and the arguments that say the same.
SAID_BY_ARGUMENTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
}


@dataclass(frozen=True)
class Sampling:
    """How the completions of each prompt are drawn.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off. The order is that of
    transformers' `generate()`: repetition penalty, temperature, top-k, top-p, min-p. A draw is a hash of (seed,
    rollout, prompt serial, completion, position): it depends on neither waves, slots nor order. `stop` strings end a
    completion with the token that completes one of them. The completions are numbers `first_completion` and on of their
    prompt's: a group may be generated in parts.
    """

    num_generations: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    rollout: int = 0
    first_completion: int = 0


@dataclass(frozen=True)
class RolloutSettings:
    """How many prompts a rollout asks and how many steps it serves (DESIGN: a rollout and its steps).

    A rollout has `num_prompts x num_generations` rows; each pass over it makes `steps_per_pass` steps of
    `rows_per_step` rows, and there are `num_iterations` passes. `max_refills` is how often dynamic sampling asks again (0: never).
    """

    num_prompts: int
    num_generations: int
    rows_per_step: int
    steps_per_pass: int
    num_iterations: int
    max_refills: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of a rollout, over all ranks."""
        return self.num_prompts * self.num_generations

    @property
    def num_steps(self) -> int:
        """Optimizer steps that one rollout serves."""
        return self.steps_per_pass * self.num_iterations
