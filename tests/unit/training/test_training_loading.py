"""Into which memory a policy is read: its device's at once, unless something else cuts or places it."""

from __future__ import annotations

import os

import pytest
import torch

from lowpeak.loading import straight_to
from lowpeak.training.models import load_policy
from tiny import tiny_model

DEVICE = torch.device("meta")  # apart from the host's memory, as a GPU is


@pytest.fixture
def environment():
    """An environment that is put back."""
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


def test_a_policy_that_trains_whole_is_read_into_the_memory_of_its_device(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    for device, expected in ((DEVICE, "meta"), (torch.device("cpu"), "cpu"), (None, "cpu")):
        policy = load_policy(str(tmp_path), {"dtype": "float32"}, trust_remote_code=False, device=device)
        assert {parameter.device.type for parameter in policy.parameters()} == {expected}


def test_one_that_fsdp_will_cut_is_not(environment):
    assert straight_to(DEVICE, {}) == {"device_map": {"": DEVICE}}
    environment["ACCELERATE_USE_FSDP"] = "true"
    assert straight_to(DEVICE, {}) == {}


@pytest.mark.parametrize("given", ["device_map", "quantization_config"])
def test_one_that_the_user_or_a_quantiser_places_is_not(given):
    assert straight_to(DEVICE, {given: object()}) == {}
