"""Two gloo processes, DDP and FSDP2: gradients of the core inside the wrapped forward equal one process's."""

from __future__ import annotations

import itertools
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from closeness import assert_each_close_to_largest
from lowpeak.logprobs.head import HeadRequest, install_head
from lowpeak.logprobs.verify import verify_head
from tiny import tiny_model

NUM_IDS, WORLD_SIZE, ROWS, LENGTH = 37, 2, 4, 6


def token_loss(logprobs, entropy, start, stop):
    return (logprobs.exp() + 0.1 * entropy).sum()


def loss_of(model, ids, one_visit):
    positions = torch.arange(ids.numel()).view(ids.shape)[:, 1:-1].flatten()
    request = HeadRequest(
        positions, ids.flatten()[positions + 1], temperature=0.9, chunk_size=3, entropy=True, entropy_grad=True,
        loss=token_loss if one_visit else None,
    )  # fmt: skip
    answer = model(input_ids=ids, head_request=request)
    return answer["loss"] if one_visit else token_loss(answer["logprobs"], answer["entropy"], 0, len(positions))


def all_ids():
    return torch.randint(2, NUM_IDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def replicated(model):
    return DistributedDataParallel(install_head(model))


def sharded(model):
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(install_head(model), mesh=mesh)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


WRAPS = {"DDP": replicated, "FSDP2": sharded}


def work(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    found = {}
    for way, tied in itertools.product(WRAPS, (True, False)):
        model = WRAPS[way](tiny_model(NUM_IDS, tied=tied))
        assert verify_head(model) < 1e-5
        for one_visit in (True, False):
            model.zero_grad(set_to_none=True)
            mine = all_ids().chunk(WORLD_SIZE)[rank]
            (loss_of(model, mine, one_visit) * WORLD_SIZE).backward()  # both average
            found[way, tied, one_visit] = {
                n.removeprefix("module."): whole(p.grad) for n, p in model.named_parameters()
            }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_of_two_wrapped_processes_equal_those_of_one(tmp_path):
    context = mp.spawn(work, args=(str(tmp_path),), nprocs=WORLD_SIZE, join=False)
    try:
        deadline = time.monotonic() + 600
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, "the two processes did not finish"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    for tied in (True, False):
        alone = install_head(tiny_model(NUM_IDS, tied=tied))
        for one_visit in (True, False):
            alone.zero_grad(set_to_none=True)
            loss_of(alone, all_ids(), one_visit).backward()
            for rank, way in itertools.product(range(WORLD_SIZE), WRAPS):
                found = torch.load(tmp_path / f"{rank}.pt")[way, tied, one_visit]
                assert_each_close_to_largest(found, {name: p.grad for name, p in alone.named_parameters()}, 8e-6)
