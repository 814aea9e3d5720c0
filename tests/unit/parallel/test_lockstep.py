"""Forwards of ranks in lockstep."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import nn

from lowpeak.parallel.lockstep import Lockstep, lockstep_forwards
from lowpeak.plan.rehearsal.fake_ranks import fake_process_group


class Model(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return input_ids


def test_a_kv_cache_and_buffers_are_freed_after_lockstep():
    model, ids = Model(), torch.zeros(1, 1)
    with fake_process_group(2):
        lockstep = Lockstep(torch.device("cpu"))
        cache, buffer = torch.zeros(1), torch.zeros(1)
        lockstep.register(buffer.sum, partial(torch.add, buffer, 1))
        lockstep.register(model.forward, lambda: lockstep)
        freed = weakref.ref(cache), weakref.ref(buffer)
        with lockstep_forwards(model, lockstep):
            model(input_ids=ids, past_key_values=cache)
        del cache, buffer
        assert [each() for each in freed] == [None, None]
