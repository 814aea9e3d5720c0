"""The phases of a step: named spans with their own memory peak, and what is alive in each.

Weights of the policy are alive in all of them; each line says what comes on top.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A named span of a run; its value is the key in `peak_memory/<phase>` and in the plan."""

    SYNC = "sync"  # weight slices on their way to the engine, a few MB at a time
    ROLLOUT = "rollout"  # one wave's KV cache, the logits of its last tokens, the optimizer's states unless moved out
    REWARD = "reward"  # the reward model in use and one batch of its activations; nothing for a function
    SCORE = "score"  # one layer's activations without gradients, one chunk of logits, the reference
    TRAIN = "train"  # gradients, one micro-batch's activations, one chunk of logits, the optimizer's states
    OPTIMIZER = "optimizer"  # gradients, the optimizer's states and its temporaries
    EVALUATE = "evaluate"  # as rollout and reward, for the evaluation prompts
    SAVE = "save"  # the state dict of one shard on its way to the disk
