"""The decode loop: one token for each row of the batch at a time; waiting rows enter where others have ended.

One small read per token, of the tokens and their log-probs, is all that waits for the device. Rows that have ended
leave the batch once they are enough to pay for moving the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lowpeak.config.rollout import Sampling
from lowpeak.records import Prompt
from lowpeak.rollout.native.batch import Batch
from lowpeak.rollout.native.slots import Waiting
from lowpeak.rollout.native.stop import Progress

_COMPACT_ONE_IN = 4  # the cache is compacted when one row in so many has ended


def decode(
    model: nn.Module, waiting: Waiting, prompts: Sequence[Prompt], sampling: Sampling, progress: Progress
) -> None:
    """Generate all rows of `waiting` into `progress`, whose row of completion c of prompt p is `p x generations + c`."""
    batch = Batch(model, prompts, sampling, progress, waiting.max_tokens)
    while True:
        kept = batch.running()
        entering = waiting.enter([batch.rows[i].prompt for i in kept])
        if entering:
            batch.enter(kept, entering)
            continue
        if not kept:
            return
        if (len(batch.rows) - len(kept)) * _COMPACT_ONE_IN >= len(batch.rows) or batch.is_full:
            batch.keep(kept)
        batch.step()
