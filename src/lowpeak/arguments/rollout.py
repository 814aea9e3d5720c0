"""Rollouts: arguments and settings of their size, sampling and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd, lcm
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
_TRAINS_APART = EffectCondition(
    lambda args, facts: not args.max_staleness,
    "the policy trains while rollouts are generated (max_staleness); remove one of the two",
    raises=True,
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
        None, "Minimum probability of a token, relative to the most likely token (None: 0).", within(0, 1)
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
        acts_if=(_TRAINS_APART, _NO_SERVER, HAS_DEVICE_MEMORY, _HAS_OFFLOADABLE),
    )
    share_prompt: bool | None = memory_argument(
        None, "Forward a prompt once for all of its completions (None: if it saves computation)."
    )


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
        f"{_nearest_valid_sizes(args, rows)}, or {larger}.",
    )
    return make_settings(
        RolloutSettings,
        args,
        num_prompts=rows // args.num_generations,
        rows_per_step=batch * accumulation,
        steps_per_pass=per_generation // accumulation,
        max_refills=args.dynamic_sampling_rounds,
    )


def _nearest_valid_sizes(args: Any, rows: int) -> str:
    """Return the nearest sizes with which a rollout has whole groups and serves as many steps as before."""
    group, names, texts = args.num_generations, ["per_device_train_batch_size", "gradient_accumulation_steps"], []
    names = [] if args.generation_batch_size else names[:1] if args.steps_per_generation else names
    for name in [*names, "num_generations"]:
        now, least = getattr(args, name), 2 if name == "num_generations" else 1
        fits = [n for n in range(least, rows + group) if (rows % n if least == 2 else n * (rows // now) % group) == 0]
        near = sorted(n for _, n in sorted((abs(n - now), n) for n in fits)[:2])
        texts += [f"{name}={' or '.join(map(str, near))}"] if near else []
    return ", ".join(texts)


def _larger_rollout(args: Any, batch: int) -> str:
    """Return the least rollout with whole groups and whole steps as an argument, with the steps that it would serve."""
    name = "generation_batch_size" if args.generation_batch_size else shown_name(args, "steps_per_generation")
    batches = lcm(args.num_generations // gcd(args.num_generations, batch), args.gradient_accumulation_steps)
    steps = batches // args.gradient_accumulation_steps  # of PPO, mini-batches
    size = {"num_mini_batches": steps, "generation_batch_size": batch * batches}.get(name, batches)
    served = f"{steps} steps, off-policy after the first" if steps > 1 else "one step"
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
