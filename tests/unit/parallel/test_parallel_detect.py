"""The fractions of a model on each device, from accelerate's settings before the model is sharded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch.distributed.device_mesh import init_device_mesh

from lowpeak.cli.accelerate_config import PRESET_FOLDER
from lowpeak.parallel.detect import DeviceFractions, device_fractions
from lowpeak.plan.rehearsal.fake_ranks import fake_process_group

RANKS = 8


def accelerator(kind, **more):
    """The attributes that are read of an Accelerator, which would connect to real ranks."""
    plugins = {name: more.pop(name, None) for name in ("deepspeed_plugin", "fsdp_plugin")}
    attributes = {"parallelism_config": None, **more}
    return SimpleNamespace(state=SimpleNamespace(**plugins), distributed_type=kind, num_processes=RANKS, **attributes)


def stage(number, section):
    return {"train_batch_size": "auto", "zero_optimization": {"stage": number, section: {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("zero1", DeviceFractions(1.0, 1.0, 1 / 8)),
        ("zero2", DeviceFractions(1.0, 1 / 8, 1 / 8)),
        ("zero3", DeviceFractions(1 / 8, 1 / 8, 1 / 8)),
        ("zero3-offload", DeviceFractions(0.0, 0.0, 0.0)),
        (stage(1, "offload_optimizer"), DeviceFractions(1.0, 1.0, 0.0)),
        (stage(2, "offload_optimizer"), DeviceFractions(1.0, 0.0, 0.0)),
        (stage(3, "offload_optimizer"), DeviceFractions(1 / 8, 0.0, 0.0)),
        (stage(3, "offload_param"), DeviceFractions(0.0, 1 / 8, 1 / 8)),
    ],
)
def test_zero_shards_by_its_stage_and_reduces_gradients_on_the_optimizers_device(config, expected):
    preset = json.loads((PRESET_FOLDER / f"{config}.json").read_text()) if isinstance(config, str) else config
    plugin = DeepSpeedPlugin(hf_ds_config=preset)
    assert device_fractions(accelerator(DistributedType.DEEPSPEED, deepspeed_plugin=plugin)) == expected


def test_fsdp_shards_over_all_ranks_or_offloads_everything_and_ddp_replicates():
    for offload, part in ((False, 1 / 8), (True, 0.0)):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
        assert device_fractions(accelerator(DistributedType.FSDP, fsdp_plugin=plugin)) == DeviceFractions(
            part, part, part
        )
    assert device_fractions(accelerator(DistributedType.MULTI_CPU)) == DeviceFractions(1.0, 1.0, 1.0)


def test_hsdp_shards_each_replica_over_its_ranks():
    names = ("dp_replicate", "dp_shard")
    with fake_process_group(RANKS):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
        parts = SimpleNamespace(fsdp_dim_names=names)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        more = {"fsdp_plugin": plugin, "torch_device_mesh": mesh, "parallelism_config": parts}
        assert device_fractions(accelerator(DistributedType.FSDP, **more)) == DeviceFractions(1 / 4, 1 / 4, 1 / 4)
    assert not dist.is_initialized()
