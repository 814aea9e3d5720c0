"""Construction of rewards from `reward_funcs`, and of rewards and judges from names on a command line.

`reward_funcs` takes callables, models, or a list of them, as in TRL. A name is that of a function in a file or a module, of
a built-in reward, or of a model.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lowpeak.errors import ArgumentError, RewardError, closest_name
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.model import ModelReward
from lowpeak.rewards.reward import Reward

logger = logging.getLogger(__name__)

BUILTIN_REWARDS: dict[str, str] = {
    name: f"lowpeak.rewards.builtin.{name}"
    for name in (
        *("exact_match", "numeric_match", "think_answer_format", "hash_answer_format", "length_penalty"),
        *("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"),
    )
} | {"get_soft_overlong_punishment": "lowpeak.rewards.builtin.soft_overlong_punishment"}
REWARD_FACTORIES: dict[str, str] = {
    "format_reward": "lowpeak.rewards.builtin.format_reward",
    "linear_length": "lowpeak.rewards.builtin.LinearLength",
    "soft_overlong": "lowpeak.rewards.builtin.SoftOverlong",
    **{
        name: f"lowpeak.rewards.builtin.{name}"
        for name in ("get_soft_overlong_punishment", "get_cosine_scaled_reward", "get_repetition_penalty_reward")
    },
}


def make_rewards(
    reward_funcs: Any,
    reward_processing_classes: Any = None,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> list[Reward]:
    """Return one reward for each callable, model, or model's name or path, with unique names.

    A processing class in a function's position is named in a warning. `model_kwargs` are the arguments of the reward models'
    `from_pretrained`, `chat_template_kwargs` those of their chat templates. If `device` is given, a parallel strategy will
    place the models there and send their weights from rank 0. Otherwise every rank loads them completely.

    Raises:
        ArgumentError: there is no reward, an item is none of these, or the processing classes are not one for each.
        ModelError: a reward model or its tokenizer cannot be loaded.
    """
    items = as_list(reward_funcs)
    if not items:
        raise ArgumentError("There is no reward: pass at least one in `reward_funcs`.")
    tokenizers = [None] * len(items) if reward_processing_classes is None else as_list(reward_processing_classes)
    if len(tokenizers) != len(items):
        raise ArgumentError(
            f"There are {len(tokenizers)} reward_processing_classes for {len(items)} reward_funcs; give one for each, "
            "None for functions."
        )

    make_model = partial(
        ModelReward, model_kwargs=model_kwargs, chat_template_kwargs=chat_template_kwargs, device=device
    )
    rewards = [_make_reward(item, tokenizer, make_model) for item, tokenizer in zip(items, tokenizers, strict=True)]
    for reward, name in zip(rewards, unique_names([reward.name for reward in rewards]), strict=True):
        reward.name = name
    return list(rewards)


def _make_reward(
    item: Any, tokenizer: Any, make_model: Callable[[Any, Any], ModelReward]
) -> FunctionReward | ModelReward:
    if isinstance(item, FunctionReward | ModelReward):
        return copy.copy(item)  # because it may be renamed
    if isinstance(item, str) and item in BUILTIN_REWARDS:
        item = load_reward(item)
    if isinstance(item, str | os.PathLike | nn.Module):
        return make_model(item, tokenizer)
    if callable(item):
        reward = FunctionReward(item)
        if tokenizer is not None:
            logger.warning(
                "reward_processing_classes has a tokenizer for the function %r, which has no effect; pass None in its place.",
                reward.name,
            )
        return reward
    raise ArgumentError(
        f"Each of reward_funcs must be a function, a reward model, or a model's name or path, got {item!r} "
        f"of type {type(item).__name__}."
    )


def check_rewards(reward_funcs: Any, columns: Iterable[str], where: str) -> None:
    """Raise an error for a misspelt built-in reward, or a function that needs another column or a missing package."""
    for item in as_list(reward_funcs):
        if isinstance(item, str) and not os.path.exists(item):
            _check_spelling(item)
            item = load_reward(item) if item in BUILTIN_REWARDS else item
        if callable(item) and not isinstance(item, FunctionReward | ModelReward | nn.Module):
            try:
                FunctionReward(item).check_columns(columns)
            except RewardError as error:
                raise RewardError(f"{where}: {error}") from error


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names; a repeated one gets the first free number from 2: `name_2`."""
    unique: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        unique[next(x for x in numbered if x not in unique and x not in names) if name in unique else name] = None
    return tuple(unique)


def as_list(items: Any) -> list[Any]:
    """Return a list of one item or of several; None is an empty list."""
    if items is None:
        return []
    return list(items) if isinstance(items, list | tuple) else [items]


def load_reward(spec: str) -> Callable[..., Any] | str:
    """Return the reward of a command line's `spec`, for `reward_funcs`.

    `spec` is `path/to/file.py:function`, `package.module.function`, `package.module:object.method`, a name in
    `BUILTIN_REWARDS`, or one in `REWARD_FACTORIES` with its arguments, as in `soft_overlong(512, 128)`. A folder or an
    `owner/name` on the hub is a reward model: it is returned unchanged, because models are loaded with the trainer's settings.

    Raises:
        ArgumentError: the file or module is missing or does not import, or has no such callable.
    """
    _check_spelling(spec.partition("(")[0].strip())
    spec = BUILTIN_REWARDS.get(spec, spec)
    if spec.partition("(")[0].strip() in REWARD_FACTORIES:
        return _call_factory(spec)
    if _names_model(spec):
        return spec
    names = ", ".join([*BUILTIN_REWARDS, *(f"{name}(...)" for name in REWARD_FACTORIES)])
    reward = load_object(spec, "Reward", f", or one of {names}")
    if not callable(reward) or inspect.isclass(reward):
        kind = "a class; name an object or function" if inspect.isclass(reward) else f"of type {type(reward).__name__}"
        raise ArgumentError(f"Reward '{spec}' must be callable, but it is {kind}.")
    return reward


def _check_spelling(name: str) -> None:
    known = BUILTIN_REWARDS | REWARD_FACTORIES
    if name not in known and (hint := closest_name(name, known)):
        raise ArgumentError(f"Reward {name!r} does not exist: {hint}")


def _names_model(spec: str) -> bool:
    """Return whether a name is that of a reward model: a folder, or owner/name on the hub."""
    return bool(spec) and ":" not in spec and not spec.endswith(".py") and ("/" in spec or Path(spec).is_dir())


def _call_factory(spec: str) -> Callable[..., Any]:
    name = spec.partition("(")[0].strip()
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("it has no arguments")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        module, _, factory = REWARD_FACTORIES[name].rpartition(".")
        return getattr(importlib.import_module(module), factory)(*arguments, **keywords)
    except ArgumentError:
        raise
    except (SyntaxError, ValueError, TypeError) as error:
        # literal_eval names an object of Python for what is no literal.
        reason = "its arguments must be numbers or texts in quotes" if isinstance(error, ValueError) else error
        raise ArgumentError(f"Reward '{spec}' cannot be created: {reason}; write '{name}(...)' with them.") from error


def load_object(spec: str, role: str, alternatives: str = "") -> Any:
    """Return the object at `path/to/file.py:object` or `package.module.object`, which errors call `role`.

    Raises:
        ArgumentError: the file or module is missing or does not import, or has no such object.
    """
    source, colon, name = spec.rpartition(":")
    if not colon:
        source, _, name = spec.rpartition(".")
    if colon and source.endswith(".py"):
        module = _import_file(Path(source), role)
    elif spec.endswith(".py"):
        raise ArgumentError(f"{role} '{spec}' is a file: name an object in it, as in '{spec}:object'.")
    elif source:
        module = _import_module(source, spec, role)
    else:
        raise ArgumentError(
            f"Cannot resolve {role.lower()} '{spec}': use path/to/file.py:object, package.module.object{alternatives}."
        )
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            hint = closest_name(part, dir(target)) or "check the name."
            raise ArgumentError(f"{role} '{spec}' does not exist: there is no '{name}' in '{module.__file__}'; {hint}")
        target = getattr(target, part)
    return target


def _import_file(path: Path, role: str) -> ModuleType:
    """Return the file as a module; it is run once per process and content."""
    if not path.is_file():
        hint = closest_name(path.name, [file.name for file in path.parent.glob("*.py")]) or "check the path."
        raise ArgumentError(f"{role} file '{path}' does not exist: {hint}")
    path = path.resolve()
    source = path.read_bytes()
    content = hashlib.sha256(bytes(path) + source).hexdigest()[:12]
    name = f"lowpeak_reward_{path.stem}_{content}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    # Before it runs, because dataclasses and pickle look the module up there.
    sys.modules[name] = module
    # As for a script: the file may import its neighbours.
    sys.path.insert(0, str(path.parent))
    try:
        # The loader would take the bytecode of an earlier content of the same size, if it was written within the same second.
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ArgumentError(f"{role} file '{path}' does not import: {_error_with_line(error, str(path))}.") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _import_module(name: str, spec: str, role: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_part_of_name = missing is not None and f"{name}.".startswith(f"{missing}.")
        reason = f"there is no module '{missing}'" if is_part_of_name else _error_with_line(error, None)
        raise ArgumentError(f"{role} '{spec}' does not import: {reason}.") from error


def _error_with_line(error: BaseException, path: str | None) -> str:
    """Return the exception and the line that raised it, preferably the last line in the file at `path`."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    last = ([frame for frame in frames if frame.filename == path] or frames)[-1]
    line = f"line {last.lineno}" if path else f"{last.filename}, line {last.lineno}"
    return f"{line}: {type(error).__name__}: {error}"
