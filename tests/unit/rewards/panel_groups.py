"""Groups for tests of the panel; token i is the character of code i."""

from __future__ import annotations

import torch

from lowpeak.records import Completion, Group, Prompt
from lowpeak.rewards.factory import make_rewards
from lowpeak.rewards.panel import RewardPanel, RewardSettings


def decode(ids):
    return "".join(chr(token) for token in ids)


def completion(text, prompt_ids=None, **extra):
    num = len(text)
    ids = torch.tensor([ord(letter) for letter in text], dtype=torch.int32)
    return Completion(ids, torch.zeros(num), torch.ones(num, dtype=torch.bool), "stop", prompt_ids, extra)


def group(source, *texts, serial=0, **columns):
    prompt = Prompt(serial, (7, 8), source, columns)
    return Group(prompt, tuple(text if isinstance(text, Completion) else completion(text) for text in texts))


def panel(*functions, weights=None, **settings):
    weights = weights or (1.0,) * len(functions)
    return RewardPanel(make_rewards(list(functions)), RewardSettings(weights, **settings), decode)


def compute_rewards(*functions, groups=None, weights=None, **settings):
    return panel(*functions, weights=weights, **settings).compute_rewards(
        groups or [group("p", "a", "bb"), group("q", "ccc", "")]
    )
