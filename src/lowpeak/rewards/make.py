"""From what users pass in as `reward_funcs` to rewards, as TRL takes it: callables, models, or a list of them."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowpeak.errors import ArgumentError
from lowpeak.rewards.function import FunctionReward
from lowpeak.rewards.load import SHIPPED, load_reward
from lowpeak.rewards.model import ModelReward
from lowpeak.rewards.reward import Reward


def make_rewards(
    reward_funcs: Any,
    reward_processing_classes: Any = None,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> list[Reward]:
    """Return one reward for each callable, model, or model's name or path, under names that differ.

    A processing class that stands at a function's place is not used, as in TRL. `model_kwargs` are the reward models'
    own `from_pretrained` arguments; `chat_template_kwargs` go to their chat templates. `device` is where a strategy will put
    them, which then has their weights from rank 0; None loads them whole on every rank.

    Raises:
        ArgumentError: nothing is given, an item is none of these, or the processing classes are not one for each.
        ModelError: a reward model or its tokenizer cannot be loaded.
    """
    items = listed(reward_funcs)
    if not items:
        raise ArgumentError("There is no reward: pass at least one in `reward_funcs`.")
    tokenizers = [None] * len(items) if reward_processing_classes is None else listed(reward_processing_classes)
    if len(tokenizers) != len(items):
        raise ArgumentError(
            f"There are {len(tokenizers)} reward_processing_classes for {len(items)} reward_funcs; give one for each, "
            "None for those that are functions."
        )

    def make(item: Any, tokenizer: Any) -> FunctionReward | ModelReward:
        if isinstance(item, FunctionReward | ModelReward):
            return copy.copy(item)  # it may get another name here
        if isinstance(item, str) and item in SHIPPED:
            item = load_reward(item)
        if isinstance(item, str | os.PathLike | nn.Module):
            return ModelReward(
                item, tokenizer, model_kwargs=model_kwargs, chat_template_kwargs=chat_template_kwargs, device=device
            )
        if callable(item):
            return FunctionReward(item)
        raise ArgumentError(
            f"A reward must be a function, a reward model, or a model's name or path, not {item!r} "
            f"of type {type(item).__name__}."
        )

    rewards = [make(item, tokenizer) for item, tokenizer in zip(items, tokenizers, strict=True)]
    for reward, name in zip(rewards, unique_names([reward.name for reward in rewards]), strict=True):
        reward.name = name
    return list(rewards)


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, each later one that is taken already with the first free number from 2: `name_2`."""
    taken: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        taken[next(x for x in numbered if x not in taken and x not in names) if name in taken else name] = None
    return tuple(taken)


def listed(items: Any) -> list[Any]:
    """Return one item or a list of them as a list; None is none."""
    if items is None:
        return []
    return list(items) if isinstance(items, list | tuple) else [items]
