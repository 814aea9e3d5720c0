"""The group of an update by NCCL ends with the update, however that ended; groups are scripted here."""

from __future__ import annotations

import threading

import pytest
import torch

from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.transports.nccl import NcclInlet, NcclSender, usable

CPU = torch.device("cpu")


class Group:
    """Counts its ends."""

    def __init__(self):
        self.ends = 0

    def destroy(self):
        self.ends += 1


def sender(form, timeout=10.0):
    return NcclSender(64, CPU, "127.0.0.1", 2, timeout, form=form)


def test_both_ends_of_an_update_free_their_communicator_once():
    theirs, ours, formed = Group(), Group(), []

    def form(host, port, rank, world_size, device):
        formed.append((host, port, rank, world_size))
        return ours if rank == 0 else theirs

    one = sender(form)
    one.joined()
    given = one.invitation()
    assert given.pop("transport") == "nccl"
    other = NcclInlet(**given, rank=2, device=CPU, form=form)
    for end in (one, other, one, other):
        end.close()
    assert (ours.ends, theirs.ends) == (1, 1)
    assert formed == [("127.0.0.1", given["port"], 0, 3), ("127.0.0.1", given["port"], 2, 3)]


def test_a_group_that_forms_after_its_update_was_given_up_ends_at_once():
    group, late, ended = Group(), threading.Event(), threading.Event()
    group.destroy = ended.set

    def form(*meeting):
        late.wait(10)
        return group

    one = sender(form, timeout=0.01)
    with pytest.raises(EngineError, match=r"did not form \(not within 0 s\): set vllm_transport='tcp'"):
        one.joined()
    one.close()
    assert not ended.is_set()
    late.set()
    assert ended.wait(10)


def test_why_a_group_did_not_form_is_told():
    def form(*meeting):
        raise OSError("Address already in use")

    with pytest.raises(EngineError, match=r"did not form \(Address already in use\)"):
        sender(form).joined()


def test_a_communicator_that_broadcasts_nothing_is_none():
    group = Group()
    assert usable(group) is group
    group.disabled = True
    with pytest.raises(EngineError, match="no NCCL library"):
        usable(group)
