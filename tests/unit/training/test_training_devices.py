"""Arguments that concern sharded models or devices with memory of their own, in a run that has neither."""

from __future__ import annotations

import pytest
from datasets import Dataset

from lowpeak import GRPOConfig, GRPOTrainer
from lowpeak.errors import ArgumentError
from tiny import char_tokenizer, tiny_model


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"gather_budget": "1GiB"}, "gather_budget='1GiB' cannot act: parameters are whole on every rank"),
        ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation=False cannot act"),
        ({"offload_during_rollout": True}, "offload_during_rollout=True cannot act: the device's memory is the host's"),
        ({"offload_frozen_models": True, "beta": 0.1}, "the device's memory is the host's"),
        (
            {"offload_frozen_models": True, "beta": 0.1, "sync_ref_model": True},
            "sync_ref_model=True cannot act beside offload_frozen_models=True on one device",
        ),
    ],
)
def test_what_concerns_sharded_models_or_devices_is_refused_without_them(tmp_path, said, told):
    tokenizer = char_tokenizer()
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=8, max_steps=1, **said
    )
    with pytest.raises(ArgumentError, match=told):
        GRPOTrainer(
            model=tiny_model(len(tokenizer)),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "1="}] * 4),
            processing_class=tokenizer,
        )
