"""The decode loop: one token for each row of the batch at a time; waiting rows enter as soon as others have ended.

One small read per token, of which rows have ended, is all that waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.batch import Batch
from lowpeak.rollout.native.slots import Waiting
from lowpeak.rollout.native.stop import Progress


def decode(
    model: nn.Module,
    waiting: Waiting,
    kv_cache_bytes: int,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    progress: Progress,
) -> None:
    """Generate all rows of `waiting` into `progress`, whose row of completion c of prompt p is `p x generations + c`."""
    batch = Batch(model, waiting, kv_cache_bytes, prompts, sampling, progress)
    while batch.fill():
        batch.step()
