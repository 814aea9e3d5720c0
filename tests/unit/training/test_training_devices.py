"""Arguments that concern sharded models or devices with memory of their own, in a run that has neither."""

from __future__ import annotations

import pytest

from lowpeak.errors import ArgumentError
from small_runs import make


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"gather_budget": "1GiB"}, "gather_budget='1GiB'"),
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False"),
        ({"offload_during_rollout": True}, "offload_during_rollout=True"),
        ({"offload_frozen_models": True, "beta": 0.1}, "offload_frozen_models=True"),
        (
            {"offload_frozen_models": True, "beta": 0.1, "sync_ref_model": True},
            "sync_ref_model=True .*offload_frozen_models=True",
        ),
    ],
)
def test_arguments_of_sharded_models_or_devices_are_refused_without_them(tmp_path, changes, names):
    with pytest.raises(ArgumentError, match=names):
        make("GRPO", tmp_path, **changes)
