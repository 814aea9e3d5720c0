"""The phases of a run: named spans, each with a memory peak.

The policy's weights are in memory in all phases; each comment lists what comes on top.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """A named span of a run; its value is the key in `time/`, `peak_memory/` and `planned_memory/<phase>`."""

    SYNC = "sync"  # weight slices that are sent to the engine, a few MB at a time
    ROLLOUT = "rollout"  # one wave's KV cache, the logits of its last tokens; optimizer states unless offloaded
    REWARD = "reward"  # a reward model and one batch of its activations; nothing for a reward function
    SCORE = "score"  # one layer's activations without gradients, one chunk of logits, the reference
    TRAIN = "train"  # gradients, one micro-batch's activations, one chunk of logits, optimizer states
    OPTIMIZER = "optimizer"  # gradients, optimizer states and temporaries
    EVALUATE = "evaluate"  # as in rollout, reward and score, for the evaluation data
    SAVE = "save"  # the state dict of one shard while it is written
