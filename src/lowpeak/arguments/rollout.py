"""Rollouts: arguments and settings of their size, sampling and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, gcd, lcm
from numbers import Integral
from typing import Any, Literal

from lowpeak.arguments.base import HAS_DEVICE_MEMORY
from lowpeak.arguments.declare import (
    MAPPING,
    SHARE,
    Check,
    EffectCondition,
    above_zero,
    argument,
    at_least,
    data_argument,
    generation_argument,
    make_settings,
    memory_argument,
    one_of,
    require,
    shown_name,
    within,
)
from lowpeak.arguments.text import parse_bytes

# Names in generation_kwargs (transformers' and vLLM's) that are aliases of arguments.
ARGUMENT_OF_KWARG = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
}
# Names in generation_kwargs that both engines accept.
COMMON_KWARGS = (
    *("seed", "stop", "stop_strings", "stop_token_ids", "eos_token_id", "do_sample", "min_new_tokens", "min_tokens"),
    *ARGUMENT_OF_KWARG,
)

# vLLM's other sampling parameters that are accepted. An explicit list, because a server ignores names that it does not know.
_VLLM_KWARGS = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("thinking_token_budget", "skip_reading_prefix_cache"),
)
_ENDS_COMPLETIONS = (
    "a completion ends at the end-of-sequence token, a stop string, a stop token or max_completion_length; remove it"
)
# Refused names with the reason: another argument sets them, lowpeak sets them, or they end completions unknown to the run.
_REFUSED_KWARGS = {
    **dict.fromkeys(("n", "num_return_sequences"), "use num_generations"),
    **dict.fromkeys(("num_beams", "penalty_alpha"), "completions are sampled token by token; remove it"),
    **dict.fromkeys(("typical_p", "epsilon_cutoff", "eta_cutoff"), "use top_k, top_p or min_p"),
    **dict.fromkeys(("suppress_tokens", "bad_words_ids"), "only vLLM can ban tokens (logit_bias, bad_words)"),
    "no_repeat_ngram_size": "use repetition_penalty, or the reward get_repetition_penalty_reward(ngram_size=3)",
    **dict.fromkeys(("min_length", "max_length"), "it counts the prompt; use min_new_tokens, max_completion_length"),
    "structured_outputs": "use vllm_structured_outputs_regex",
    **dict.fromkeys(
        (
            *("logprobs", "prompt_logprobs", "flat_logprobs", "output_kind"),
            *("detokenize", "skip_special_tokens", "extra_args"),
        ),
        "lowpeak sets it; remove it",
    ),
    "ignore_eos": _ENDS_COMPLETIONS,
    "repetition_detection": _ENDS_COMPLETIONS,
}

_NO_SERVER = EffectCondition(
    lambda args, facts: not (args.use_vllm and args.vllm_mode == "server"),
    "servers generate on separate devices; remove it",
)
_HAS_KV_CACHE = replace(
    _NO_SERVER,
    reason="the KV cache is the server's; set its size with `lowpeak serve` (kv_cache_memory_bytes or "
    "gpu_memory_utilization), and remove it here",
)
_NATIVE_ENGINE = EffectCondition(
    lambda args, facts: not args.use_vllm,
    "vLLM generates with its copy of the weights, so the policy is not gathered; remove it",
)
_GATHERS = (
    _NATIVE_ENGINE,
    EffectCondition(
        lambda args, facts: facts.sharded is not False or facts.casts_weights is not False,
        "each rank has all parameters, and none are cast; remove it",
    ),
)
_HAS_OFFLOADABLE = EffectCondition(
    lambda args, facts: not facts.states_on_host or facts.frozen is not False,
    "the optimizer states are already in host memory, and there is no reference or reward model; remove it",
)
_HAS_FROZEN = EffectCondition(
    lambda args, facts: facts.frozen is not False, "there is no reference or reward model; remove it"
)


_HAS_STEPS = EffectCondition(
    lambda args, facts: (
        not args.steps_per_generation or _whole_step(args, args.steps_per_generation) == args.steps_per_generation
    ),
    "a rollout has at least the completions of one step, gradient_accumulation_steps batches; remove it",
)


@dataclass(repr=False)
class RolloutArguments:
    """Arguments of rollouts: number of completions, sampling, and memory."""

    num_generations: int = generation_argument(8, "Completions per prompt.", at_least(1))
    max_completion_length: int = generation_argument(512, "Maximum tokens of a completion.", at_least(1, "token"))
    max_new_tokens: int | None = generation_argument(
        None, "Alias of max_completion_length.", alias_of="max_completion_length"
    )
    generation_batch_size: int | None = generation_argument(
        None,
        "Completions of a rollout over all ranks (instead of steps_per_generation).",
        above_zero("a number of completions"),
    )
    steps_per_generation: int | None = generation_argument(
        None,
        "Batches of per_device_train_batch_size in a rollout (None: gradient_accumulation_steps, one step).",
        at_least(1),
        _HAS_STEPS,
    )
    num_iterations: int = argument(1, "Passes over each rollout.", at_least(1))
    dynamic_sampling_rounds: int = argument(
        0,
        "Maximum rounds that replace groups with equal rewards by new groups (DAPO; 0: off).",
        Check(lambda x: x >= 0, "must be 0 (off) or more"),
    )
    temperature: float = generation_argument(
        1.0,
        "Softmax temperature of sampling and of all log-probs.",
        Check(lambda x: not x < 1e-6, "must be at least 1e-6 (evaluation is greedy in any case)"),
    )
    top_p: float = generation_argument(1.0, "Sample among the most likely tokens with this total probability.", SHARE)
    top_k: int = generation_argument(
        0,
        "Sample among this many most likely tokens (0: all).",
        Check(lambda x: x >= 0, "must be 0 (all tokens) or more"),
    )
    min_p: float | None = generation_argument(
        None,
        "Minimum probability of a token, relative to the most likely token (None: 0).",
        within(0, 1),
    )
    repetition_penalty: float = generation_argument(
        1.0, "Penalty of repeated tokens (1: off; above 1: less likely).", above_zero()
    )
    generation_kwargs: dict[str, Any] | str | None = generation_argument(
        None,
        "Further sampling parameters (JSON): stop_strings, stop_token_ids, eos_token_id, seed, transformers' names of sampling "
        "arguments, and vLLM's parameters.",
        MAPPING,
    )
    overlong_prompts: str = data_argument(
        "error",
        "Prompts that do not fit in the context: 'error', or 'drop', which logs their number.",
        one_of(Literal["error", "drop"]),
    )
    kv_cache_bytes: int | str | None = memory_argument(
        None,
        "Bytes of the engine's KV cache: 8GiB, or a number (None: set from free memory).",
        Check(
            lambda x: x is None or (isinstance(x, int | str) and (parse_bytes(x) or 0) > 0),
            "must be above 0: a number of bytes, or a size such as '8GiB'",
        ),
        acts_if=_HAS_KV_CACHE,
    )
    gather_budget: int | str | None = memory_argument(
        None,
        "Bytes of a sharded model (FSDP2, ZeRO-3) that stay gathered during generation, or of bf16 copies of fp32 weights: 8GiB, "
        "0, or auto (None: auto).",
        acts_if=_GATHERS,
    )
    ds3_gather_for_generation: bool | None = memory_argument(
        None,
        "Gather all of a sharded model for generation (False: one layer at a time, as gather_budget=0).",
        acts_if=_GATHERS,
    )
    disable_unwrapping_for_generation: bool | None = memory_argument(
        None, "Older name; True means ds3_gather_for_generation=False.", acts_if=_GATHERS
    )
    cuda_graphs: bool = generation_argument(
        False,
        "Decode by CUDA graphs: one launch for the kernels of a token. Not run on a GPU yet; `lowpeak env --selftest --rows "
        "decode` compares both ways.",
        acts_if=(
            EffectCondition(lambda args, facts: not args.use_vllm, "vLLM captures its own graphs; remove it"),
            EffectCondition(lambda args, facts: facts.is_cuda is not False, "the device has no CUDA graphs; remove it"),
            EffectCondition(
                lambda args, facts: not facts.sharded, "sharded weights are gathered in a forward; remove it"
            ),
        ),
    )
    offload_frozen_models: bool = memory_argument(
        False,
        "Keep reference and reward models in host memory, and copy one layer at a time to the GPU.",
        acts_if=(HAS_DEVICE_MEMORY, _HAS_FROZEN),
    )
    offload_during_rollout: bool = memory_argument(
        False,
        "Move gradients, optimizer states and frozen models to host memory during generation (GPUs).",
        acts_if=(_NO_SERVER, HAS_DEVICE_MEMORY, _HAS_OFFLOADABLE),
    )
    share_prompt: bool | None = memory_argument(
        None, "Forward a prompt once for all of its completions (None: if it saves computation)."
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of the completions of each prompt.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `repetition_penalty` 1 are off. They apply in the order of
    transformers' `generate()`: repetition penalty, temperature, top-k, top-p, min-p. A random number is a hash of (seed,
    rollout, prompt serial, completion, position), so it does not depend on waves, slots or order. A `stop` string ends a
    completion with the token that completes the string; the first `min_new_tokens` tokens end none. `first_completion` is the
    index of the first completion in its group, since a group may be generated in several calls.
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
    min_new_tokens: int = 0
    seed: int = 0
    rollout: int = 0
    first_completion: int = 0


@dataclass(frozen=True)
class RolloutSettings:
    """Size of a rollout and the number of optimizer steps that it serves.

    A rollout has `num_prompts x num_generations` completions. Each of its `num_iterations` passes has `steps_per_pass` steps of
    `rows_per_step` completions. `max_refills` is the maximum number of dynamic sampling rounds (0: off).
    """

    num_prompts: int
    num_generations: int
    rows_per_step: int
    steps_per_pass: int
    num_iterations: int
    max_refills: int = 0

    @property
    def num_sequences(self) -> int:
        """Completions of a rollout over all ranks."""
        return self.num_prompts * self.num_generations

    @property
    def num_steps(self) -> int:
        """Optimizer steps that one rollout serves."""
        return self.steps_per_pass * self.num_iterations


def resolve_rollout(args: Any, world_size: int) -> RolloutSettings:
    """Return the sizes of a rollout; ArgumentError unless it has whole groups and serves whole steps."""
    batch, accumulation = args.per_device_train_batch_size * world_size, args.gradient_accumulation_steps
    per_generation = _steps_per_generation(args, batch)
    rows = batch * per_generation
    larger = _larger_rollout(args, batch)
    require(
        per_generation % accumulation == 0,
        f"steps_per_generation={per_generation} is not a multiple of gradient_accumulation_steps={accumulation}, but a rollout "
        f"must serve whole steps: use {larger}.",
    )
    require(
        rows % args.num_generations == 0,
        f"a rollout has per_device_train_batch_size x ranks x steps_per_generation = {args.per_device_train_batch_size} x "
        f"{world_size} x {per_generation} = {rows} completions, which num_generations={args.num_generations} must divide: use "
        f"{_sizes_with_groups(args, batch, rows)}, or {larger}.",
    )
    return make_settings(
        RolloutSettings,
        args,
        num_prompts=rows // args.num_generations,
        rows_per_step=batch * accumulation,
        steps_per_pass=per_generation // accumulation,
        max_refills=args.dynamic_sampling_rounds,
    )


def _sizes_with_groups(args: Any, batch: int, rows: int) -> str:
    """Return the nearest sizes with which a rollout has whole groups and serves as many steps as before."""
    group, added = args.num_generations, {}  # completions that one more of each argument adds
    if args.generation_batch_size is None:
        added["per_device_train_batch_size"] = rows // args.per_device_train_batch_size
        added |= {} if args.steps_per_generation else {"gradient_accumulation_steps": batch}
    sizes = {}
    for name, completions in added.items():
        multiple = group // gcd(group, completions)
        below = getattr(args, name) // multiple * multiple
        sizes[name] = [size for size in (below, below + multiple) if size]
    divisors = [size for size in range(2, rows + 1) if rows % size == 0]
    sizes["num_generations"] = sorted(sorted(divisors, key=lambda size: abs(size - group))[:2])
    return ", ".join(f"{name}={' or '.join(map(str, each))}" for name, each in sizes.items() if each)


def _larger_rollout(args: Any, batch: int) -> str:
    """Return the least rollout with whole groups and whole steps as an argument, with the steps that it would serve."""
    accumulation, name = args.gradient_accumulation_steps, shown_name(args, "steps_per_generation")
    batches = lcm(args.num_generations // gcd(args.num_generations, batch), accumulation)
    # A mini-batch of PPO has gradient_accumulation_steps batches.
    size = batches // accumulation if name == "num_mini_batches" else batches
    if args.generation_batch_size is not None:
        name, size = "generation_batch_size", batch * batches
    served = f"{batches // accumulation} steps, off-policy after the first" if batches > accumulation else "one step"
    return f"{name}={size} or another multiple of it (a rollout of {batch * batches} completions serves {served})"


def _steps_per_generation(args: Any, batch: int) -> int:
    size = args.generation_batch_size
    if size is None:
        return _whole_step(args, args.steps_per_generation or args.gradient_accumulation_steps)
    require(
        args.steps_per_generation is None,
        f"generation_batch_size={size} and {shown_name(args, 'steps_per_generation')} set the same size; set one.",
    )
    require(
        size % batch == 0,
        f"generation_batch_size={size} is not a multiple of per_device_train_batch_size x ranks = {batch}: use "
        f"{ceil(size / batch) * batch}, or another multiple.",
    )
    return _whole_step(args, size // batch)


def _whole_step(args: Any, batches: int) -> int:
    """Return the batches of a rollout: those of a step, if TRL would fill the step with several rollouts of one policy."""
    accumulation: int = args.gradient_accumulation_steps
    fills = batches < accumulation and accumulation % batches == 0 and args.num_iterations == 1
    return accumulation if fills else batches


def resolve_sampling(args: Any) -> Sampling:
    """Return the sampling parameters from the arguments and from the engine-independent part of generation_kwargs."""
    kwargs = dict(args.generation_kwargs or {})
    least = kwargs.get("min_new_tokens", kwargs.get("min_tokens", 0))
    require(
        type(least) is int and 0 <= least <= args.max_completion_length,
        f"generation_kwargs has min_new_tokens={least!r}, which must be from 0 to max_completion_length.",
    )
    accepted = (*COMMON_KWARGS, *(_VLLM_KWARGS if args.use_vllm else ()))
    for name in kwargs:
        reason = _REFUSED_KWARGS.get(name, f"the engine does not accept it; it accepts {', '.join(accepted)}")
        require(name in accepted, f"generation_kwargs has {name}: {reason}.")
    seed = kwargs.get("seed", args.seed)
    require(
        isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= int(seed) < 2**32,
        f"generation_kwargs has seed={seed!r}, which must be an integer from 0 to 2**32 - 1.",
    )
    stop, stop_token_ids = _resolve_stops(kwargs)
    return make_settings(
        Sampling,
        args,
        max_new_tokens=args.max_completion_length,
        top_k=args.top_k or 0,
        min_p=args.min_p or 0.0,
        stop=stop,
        stop_token_ids=stop_token_ids,
        min_new_tokens=least,
        seed=int(seed),
    )


def _resolve_stops(kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the strings and the token ids that end a completion."""
    require(
        not (kwargs.get("stop_strings") and kwargs.get("stop")),
        "generation_kwargs has stop and stop_strings, which set the same strings: set one.",
    )
    stop = kwargs.get("stop_strings") or kwargs.get("stop") or ()
    strings = (stop,) if isinstance(stop, str) else stop
    require(
        isinstance(strings, list | tuple) and all(isinstance(text, str) and text for text in strings),
        f"generation_kwargs has stop strings {stop!r}: they must be a non-empty string, or a list of them.",
    )
    return tuple(strings), (*_token_ids(kwargs, "stop_token_ids"), *_token_ids(kwargs, "eos_token_id"))


def _token_ids(kwargs: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the token ids of a name in generation_kwargs; `eos_token_id` may be a single one."""
    value = kwargs.get(name)
    if value is None:
        return ()
    is_one = name == "eos_token_id" and not isinstance(value, list | tuple)
    ids = (value,) if is_one else value
    require(
        isinstance(ids, list | tuple) and all(type(number) is int and number >= 0 for number in ids),
        f"generation_kwargs has {name}={value!r}: it must be {'a token id, or ' if is_one else ''}a list of token ids.",
    )
    return tuple(ids)


def sampling_kwargs(generation_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of generation_kwargs that only vLLM accepts, of names that `resolve_sampling` has checked."""
    kwargs = {name: value for name, value in generation_kwargs.items() if name not in COMMON_KWARGS}
    if "logit_bias" in kwargs:
        bias = kwargs["logit_bias"]
        require(
            isinstance(bias, Mapping) and all(str(t).isdigit() and isinstance(b, int | float) for t, b in bias.items()),
            f"generation_kwargs has logit_bias={bias!r}, which must be a mapping of token ids to numbers.",
        )
        kwargs["logit_bias"] = {int(token): float(value) for token, value in bias.items()}  # keys in JSON are strings
    return kwargs
