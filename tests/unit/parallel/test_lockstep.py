"""Forwards of ranks in lockstep."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from lowpeak.parallel.lockstep import Lockstep, lockstep_forwards
from lowpeak.plan.rehearsal.fake_ranks import fake_process_group


class Model(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return input_ids


def test_the_cache_of_a_forward_is_freed_with_its_last_reference_outside():
    model, ids = Model(), torch.zeros(1, 1)
    with fake_process_group(2):
        lockstep = Lockstep(torch.device("cpu"))
        with lockstep_forwards(model, lockstep):
            cache = torch.zeros(1)
            freed = weakref.ref(cache)
            model(input_ids=ids, past_key_values=cache)
            del cache
            assert freed() is None
