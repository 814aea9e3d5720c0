"""Records for the tests of batching."""

from __future__ import annotations

import torch

from lowpeak.records import Completion, Record


def make_record(prompt, ids, mask=None, group=0, branches=(), **values):
    """Return a record with these prompt and completion ids; `mask` is the loss mask (None: all tokens)."""
    ids = torch.tensor(ids, dtype=torch.int32)
    mask = torch.ones(len(ids), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    logprobs = -torch.arange(1.0, len(ids) + 1)
    return Record(
        group, tuple(prompt), Completion(ids, logprobs, mask, "stop", branches=branches), (0.0,), 0.0, **values
    )
