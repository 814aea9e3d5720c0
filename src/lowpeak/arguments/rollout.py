"""How completions are drawn, and how many serve how many steps: the arguments, and small frozen records without surprises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, gcd, lcm
from typing import Any, Literal

from lowpeak.arguments.base import OWN_MEMORY
from lowpeak.arguments.declare import (
    MAPPING,
    SHARE,
    ActsWhen,
    Check,
    above_zero,
    argument,
    at_least,
    fill,
    in_data,
    in_generation,
    in_memory,
    one_of,
    require,
    said_as,
    within,
)
from lowpeak.arguments.text import parse_bytes

ALL = 1 << 62  # a gather budget that holds any model

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
# Of generation_kwargs, what both engines take.
EVERY_ENGINE = ("seed", "stop", "stop_strings", "stop_token_ids", "eos_token_id", "do_sample", *SAID_BY_ARGUMENTS)

# vLLM's sampling parameters beyond EVERY_ENGINE that a run takes: a server does not tell of a name that it does not know.
_PASSED_ON = (
    *("presence_penalty", "frequency_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
    *("thinking_token_budget", "skip_reading_prefix_cache"),
)
_ENDS = (
    "a completion ends with the tokenizer's end of sequence, a stop string or a stop token, or at max_completion_length; "
    "remove it"
)
# Why others are refused: what is said by an argument, what lowpeak sets itself, what would end a completion unknown to the run.
_NO_SAMPLING = {
    "n": "say it as num_generations",
    "structured_outputs": "say it as vllm_structured_outputs_regex",
    **dict.fromkeys(
        [
            "logprobs",
            "prompt_logprobs",
            "flat_logprobs",
            "output_kind",
            "detokenize",
            "skip_special_tokens",
            "extra_args",
        ],
        "lowpeak sets it itself to train on the answer; remove it",
    ),
    "ignore_eos": _ENDS,
    "repetition_detection": _ENDS,
}

_NO_SERVER = ActsWhen(
    lambda args, facts: not (args.use_vllm and args.vllm_mode == "server"),
    "servers generate on devices of their own; remove it",
)
_OWN_CACHE = replace(
    _NO_SERVER,
    because="a server has a KV cache of its own; give `lowpeak serve` its size (kv_cache_memory_bytes, or gpu_memory_utilization), "
    "here remove it",
)
_GATHERED = (
    ActsWhen(
        lambda args, facts: not args.use_vllm,
        "vLLM generates with weights of its own, so nothing of the policy is gathered; remove it",
    ),
    ActsWhen(
        lambda args, facts: facts.sharded is not False,
        "parameters are whole on every rank, and it concerns FSDP2 and ZeRO-3; remove it",
    ),
)
_SOMETHING_RESTS = ActsWhen(
    lambda args, facts: not facts.states_on_host or facts.frozen is not False,
    "the optimizer's states are in host memory already, and there is no reference and no reward model; remove it",
)
_FROZEN = ActsWhen(
    lambda args, facts: facts.frozen is not False, "there is no reference and no reward model; remove it"
)


@dataclass(repr=False)
class RolloutArguments:
    """How many completions of how many prompts are drawn, how, and within which memory."""

    num_generations: int = in_generation(8, "Completions of each prompt (G).", at_least(1))
    max_completion_length: int = in_generation(512, "Most tokens of a completion.", at_least(1, "token"))
    max_new_tokens: int | None = in_generation(
        None, "Other name of max_completion_length.", means="max_completion_length"
    )
    generation_batch_size: int | None = in_generation(
        None,
        "Completions of a rollout, over all ranks (in place of steps_per_generation).",
        above_zero("a number of completions"),
    )
    steps_per_generation: int | None = in_generation(
        None, "Batches of per_device_train_batch_size that a rollout holds (None: one step's).", at_least(1)
    )
    num_iterations: int = argument(1, "Passes over each rollout.", at_least(1))
    dynamic_sampling_rounds: int = argument(
        0,
        "Ask again at most so often for groups whose rewards are all equal (DAPO).",
        Check(lambda x: x >= 0, "must be 0 (off) or more"),
    )
    temperature: float = in_generation(
        1.0,
        "Softmax temperature of sampling and of every log-prob.",
        Check(lambda x: not x < 1e-6, "must be at least 1e-6 in training (evaluation is greedy as well)"),
    )
    top_p: float = in_generation(1.0, "Sample among the likeliest tokens of this total probability.", SHARE)
    top_k: int = in_generation(
        0,
        "Sample among this many likeliest tokens (0: all).",
        Check(lambda x: x >= 0, "must be 0 (all tokens) or more"),
    )
    min_p: float | None = in_generation(
        None,
        "Least probability, as a share of the likeliest token's.",
        within(0, 1),
    )
    repetition_penalty: float = in_generation(1.0, "Above 1 makes tokens that were seen less likely.", above_zero())
    generation_kwargs: dict | str | None = in_generation(
        None,
        "More of generation: stop_strings, stop_token_ids, eos_token_id, seed, transformers' names of sampling arguments; vLLM's "
        "own parameters (JSON).",
        MAPPING,
    )
    overlong_prompts: str = in_data(
        "error",
        "A prompt longer than fits: 'error', or 'drop' and count (in the log).",
        one_of(Literal["error", "drop"]),
    )
    kv_cache_bytes: int | None = in_memory(
        None,
        "Bytes of the engine's KV cache (None: from free memory).",
        above_zero("a number of bytes"),
        acts=_OWN_CACHE,
    )
    gather_budget: str | int | None = in_memory(
        None,
        "Bytes of a sharded model (FSDP2, ZeRO-3) that stay gathered while it generates: 8GiB, 0, or auto (None: auto).",
        acts=_GATHERED,
    )
    ds3_gather_for_generation: bool | None = in_memory(
        None,
        "True: gather all of a sharded model to generate; False: a layer at a time (gather_budget 0).",
        acts=_GATHERED,
    )
    disable_unwrapping_for_generation: bool | None = in_memory(
        None, "Older name: True is ds3_gather_for_generation=False.", acts=_GATHERED
    )
    offload_frozen_models: bool = in_memory(
        False,
        "Keep reference and reward models in host memory, on the device a layer at a time (GPUs).",
        acts=(OWN_MEMORY, _FROZEN),
    )
    offload_during_rollout: bool = in_memory(
        False,
        "Gradients, optimizer states and frozen models wait in host memory while completions are generated (GPUs).",
        acts=(_NO_SERVER, OWN_MEMORY, _SOMETHING_RESTS),
    )
    share_prompt: bool | None = in_memory(
        None, "Forward a prompt once for all of its completions (None: where it pays)."
    )


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
    """How many prompts a rollout asks and how many steps it serves.

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


def resolve_rollout(args: Any, world_size: int) -> RolloutSettings:
    """Return the sizes of a rollout; ArgumentError where it does not hold whole groups, or does not serve whole steps."""
    batch, accumulation = args.per_device_train_batch_size * world_size, args.gradient_accumulation_steps
    per_generation = _steps_per_generation(args, batch)
    rows = batch * per_generation
    whole = lcm(
        args.num_generations // gcd(args.num_generations, batch), accumulation
    )  # batches: groups and steps are whole
    remedy = f"steps_per_generation={whole}, or another multiple of {whole}"
    if args.generation_batch_size is not None:
        remedy = f"generation_batch_size={batch * whole}, or another multiple of {batch * whole}"
    require(
        rows % args.num_generations == 0,
        f"a rollout holds per_device_train_batch_size x ranks x steps_per_generation = {args.per_device_train_batch_size} x "
        f"{world_size} x {per_generation} = {rows} completions, which num_generations={args.num_generations} does not divide: use "
        f"{remedy}.",
    )
    require(
        per_generation % accumulation == 0,
        f"steps_per_generation={per_generation} is not a multiple of gradient_accumulation_steps={accumulation}, and a rollout "
        f"serves whole steps: use {remedy}.",
    )
    return fill(
        RolloutSettings,
        args,
        num_prompts=rows // args.num_generations,
        rows_per_step=batch * accumulation,
        steps_per_pass=per_generation // accumulation,
        max_refills=args.dynamic_sampling_rounds,
    )


def _steps_per_generation(args: Any, batch: int) -> int:
    size = args.generation_batch_size
    if size is None:
        return args.steps_per_generation or args.gradient_accumulation_steps
    require(
        args.steps_per_generation is None,
        f"generation_batch_size={size} and {said_as(args, 'steps_per_generation')} say the same thing; give one.",
    )
    require(
        size % batch == 0,
        f"generation_batch_size={size} is not a multiple of per_device_train_batch_size x ranks = {batch}: use "
        f"{ceil(size / batch) * batch}, or another multiple.",
    )
    return size // batch


def resolve_sampling(args: Any) -> Sampling:
    """Return how completions are drawn, from the arguments and what of generation_kwargs every engine takes."""
    more = dict(args.generation_kwargs or {})
    unknown = sorted(set(more) - set(EVERY_ENGINE))
    require(
        args.use_vllm or not unknown,
        f"generation_kwargs has {', '.join(unknown)}, which the native engine does not take; it takes {', '.join(EVERY_ENGINE)}.",
    )
    require(
        more.get("do_sample") in (None, True),
        f"generation_kwargs has do_sample={more.get('do_sample')!r}: greedy completions of a prompt are all the same, so "
        "there is nothing to compare; remove it (an evaluation is greedy, too).",
    )
    seed = more.get("seed", args.seed)
    require(isinstance(seed, int), f"generation_kwargs has seed={seed!r}, which is no whole number.")
    stop, stop_token_ids = _resolve_stops(more)
    return fill(
        Sampling,
        args,
        max_new_tokens=args.max_completion_length,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        stop=stop,
        stop_token_ids=stop_token_ids,
        seed=int(seed),
    )


def _resolve_stops(more: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts and the token ids that end a completion."""
    stop, stop_ids = more.get("stop_strings") or more.get("stop") or (), more.get("stop_token_ids") or ()
    ends = more.get("eos_token_id")
    ends = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
    strings = (stop,) if isinstance(stop, str) else stop
    require(
        isinstance(strings, list | tuple) and all(isinstance(text, str) and text for text in strings),
        f"generation_kwargs has stop strings {stop!r}: they must be a string, or a list of strings, none of them empty.",
    )
    for name, ids, words in (("stop_token_ids", stop_ids, ""), ("eos_token_id", ends, "a token id, or ")):
        require(
            isinstance(ids, list | tuple) and all(isinstance(number, int) and number >= 0 for number in ids),
            f"generation_kwargs has {name}={more.get(name)!r}: it must be {words}a list of token ids.",
        )
    return tuple(strings), (*stop_ids, *ends)


def sampling_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what generation_kwargs hands to vLLM beyond what every engine takes; ArgumentError for what it should not."""
    more = {name: value for name, value in given.items() if name not in EVERY_ENGINE}
    unknown = f"vLLM does not take it; it takes {', '.join((*EVERY_ENGINE, *_PASSED_ON))}"
    for name in more:
        require(name in _PASSED_ON, f"generation_kwargs has {name}: {_NO_SAMPLING.get(name, unknown)}.")
    if "logit_bias" in more:
        bias = more["logit_bias"]
        require(
            isinstance(bias, Mapping) and all(str(t).isdigit() and isinstance(b, int | float) for t, b in bias.items()),
            f"generation_kwargs has logit_bias={bias!r}, which is no mapping of token ids to numbers.",
        )
        more["logit_bias"] = {int(token): float(value) for token, value in bias.items()}  # JSON has texts for keys
    return more


def resolve_gather_budget(args: Any) -> int | None:
    """Return bytes, `ALL`, or None: from free memory. ArgumentError where two of the three names contradict each other."""
    budget = args.gather_budget
    size = None if budget in (None, "auto") else parse_bytes(budget)
    require(
        budget in (None, "auto") or size is not None,
        f"gather_budget={budget!r} must be 'auto', a number of bytes, or a size such as '8GiB' or '500MB'.",
    )
    meanings = {
        "gather_budget": size,
        "ds3_gather_for_generation": ALL if args.ds3_gather_for_generation else 0,
        "disable_unwrapping_for_generation": 0 if args.disable_unwrapping_for_generation else ALL,
    }
    said = {name: meaning for name, meaning in meanings.items() if getattr(args, name) is not None}
    told = " and ".join(f"{name}={getattr(args, name)!r}" for name in said)
    require(len(set(said.values())) <= 1, f"{told} contradict each other: keep gather_budget, and remove the others.")
    return next(iter(said.values()), None)
