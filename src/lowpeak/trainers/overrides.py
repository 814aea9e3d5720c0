"""Refusal of subclasses that override a method of TRL or transformers which lowpeak's trainers never call."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType
from typing import Any

from transformers import Trainer

from lowpeak.errors import ArgumentError

# Methods of TRL's trainers that neither transformers nor lowpeak has.
TRL_ONLINE_METHODS = frozenset(
    (
        *("_compute_loss", "_get_per_token_logps_and_entropies", "_forward", "beta", "get_high_entropy_mask"),
        *("get_off_policy_mask", "get_gamma_weights", "_calculate_rewards", "_calculate_rewards_from_functions"),
        *("_generate", "_generate_single_turn", "_generate_and_score_completions", "_get_tool_suffix_ids"),
        *("_tool_call_loop", "_log_metric", "_log_completion_extra", "_tokenize_prompts", "tokenize_row"),
        *("_generate_vllm", "_generate_vllm_server", "_generate_vllm_colocate", "_move_model_to_vllm"),
        *("_move_model_to_vllm_inner", "_fix_param_name_to_vllm", "_sync_fsdp1_params_to_vllm"),
        *("_sync_fsdp2_params_to_vllm", "_enable_gradient_checkpointing", "process_vision_row"),
    )
)
TRL_OFFLINE_METHODS = frozenset(("_prepare_dataset", "_reject_skip_prepare_without_labels"))

_ENTRY_POINTS = {"__init__", "train", "evaluate", "predict", "save_model", "push_to_hub"}
# The place where the code belongs, by words in a method's name.
_PLACES = (
    (("reward", "_log_"), "write a reward function, which may call log_metric and log_extra"),
    (("vllm", "checkpointing", "save"), "the trainer does this itself, as its arguments say; use a callback"),
    (("generat", "tool"), "pass a rollout_func, or set generation_kwargs"),
    (("eval", "prediction", "test_"), "override evaluate or predict, or use a callback's on_evaluate"),
    (("loss", "logps", "forward", "mask", "weights", "beta", "num_items", "autocast"),
     "the model's head computes the loss: define it in make_algorithm (docs/algorithms.md)"),
    (("",), "the trainer reads rows itself: prepare train_dataset before you pass it, and set shuffle_dataset"),
)  # fmt: skip


def check_overrides(trainer: type, trl_methods: frozenset[str]) -> None:
    """Raise ArgumentError if a user's subclass of a trainer overrides a method that is never called."""
    base = next(each for each in trainer.__mro__ if _is_ours(each))
    for owner in trainer.__mro__[: trainer.__mro__.index(base)]:
        never_called = uncalled_methods(base) | {name for name in trl_methods if not hasattr(base, name)}
        for name in sorted(never_called & vars(owner).keys()):
            place = next(place for words, place in _PLACES if any(word in name for word in words))
            raise ArgumentError(
                f"{owner.__name__} overrides {name}, which {base.__name__} never calls, so it would have no effect: {place}. "
                "Rename it if it is a helper of your own."
            )


@functools.cache
def uncalled_methods(trainer: type) -> frozenset[str]:
    """Return the methods that transformers' Trainer calls and this trainer does not, by the names in their code."""
    methods = {name: _names_in(value.__code__) for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    called = {name for caller, names in methods.items() for name in names & methods.keys() if name != caller}
    # A public method that transformers never calls is for users.
    names, waiting = set[str](), list(_ENTRY_POINTS | {name for name in dir(trainer) if name[0] != "_"} - called)
    functions = set[FunctionType]()
    while waiting:
        names.add(name := waiting.pop())
        found = _implementations(trainer, name)
        while found:
            functions.add(function := found.pop())
            words = _names_in(function.__code__)
            waiting += words - names
            helpers = [each for word in words if inspect.isfunction(each := inspect.unwrap(function.__globals__.get(word)))]
            found += [each for each in helpers if _is_ours(each) and each not in functions]
    # The trainer's own data loader counts steps; nothing reads its batches.
    return frozenset(called - names | {"get_train_dataloader"})


def _implementations(trainer: type, name: str) -> list[FunctionType]:
    """Return a method's function, with those of the base classes that it calls by `super()`."""
    functions: list[FunctionType] = []
    for owner in trainer.__mro__:
        value: Any = vars(owner).get(name)
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", value))
        if inspect.isfunction(function):
            functions.append(function)
            if "super" not in _names_in(function.__code__):
                break
    return functions


def _names_in(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _is_ours(value: Any) -> bool:
    return str(value.__module__).startswith("lowpeak.")
