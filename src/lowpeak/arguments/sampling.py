"""Sampling: its settings, and generation_kwargs in transformers' and vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from lowpeak.arguments.declare import make_settings, require

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
