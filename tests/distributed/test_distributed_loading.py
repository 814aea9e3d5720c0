"""Models that do not train under DDP and ZeRO-1/2: a host holds one copy of a checkpoint, not one for each of its ranks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from setups import joined, named_models, note, rank, seen
from transformers import AutoModelForCausalLM

from child_processes import succeed_on_ranks
from lowpeak.models.pretrained import from_pretrained
from lowpeak.parallel.base import Replicated
from lowpeak.rewards.factory import make_rewards
from tiny_models import tiny_model


def own_mb(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and by how many MB the memory that is this process's own (no file's pages) rose at most."""
    before, seen, over = _anonymous(), [0.0], threading.Event()

    def look() -> None:
        while not over.is_set():
            seen.append(_anonymous() - before)
            time.sleep(0.002)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        result = call()
    finally:
        over.set()
        watch.join()
    return result, max(*seen, _anonymous() - before)


def _anonymous() -> float:
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def load(folder: str, frozen_on: str, **options: Any) -> Any:
    """A model in a folder, as the trainer loads a reference."""
    return from_pretrained(AutoModelForCausalLM, folder, frozen_on=torch.device(frozen_on), **options)


def same(found: dict[str, torch.Tensor], folder: str, dtype: torch.dtype) -> bool:
    expected = load_file(f"{folder}/model.safetensors")
    return all(torch.equal(values, expected[name].to(dtype)) for name, values in found.items())


def hand_out(place: Path, folder: str, judge: str) -> None:
    """For devices of their own (then a CPU plays one), in another dtype than the file: a replica, then parts."""
    strategy, found = Replicated(Accelerator(cpu=True)), {}
    device, dtype = f"cuda:{rank()}", torch.float32
    warm = strategy.prepare_frozen(load(folder, "cpu", dtype="auto"), 1 << 40, False)
    del warm
    for name, room in (("replica", 1 << 40), ("parts", 0)):
        model, loading = own_mb(lambda: load(folder, device, dtype=dtype))
        read = not any(p.is_meta for p in model.parameters())
        frozen, preparing = own_mb(lambda model=model, room=room: strategy.prepare_frozen(model, room, False))
        found[name] = {
            "read": read,
            "loading": loading,
            "preparing": preparing,
            "same": same(joined(strategy, frozen.model, 1 << 20), folder, dtype),
        }
        del model, frozen
    reward = make_rewards([judge], device=torch.device(device))[0]
    found["judge"] = {"read": not any(p.is_meta for p in reward.model.parameters())}
    note(place, **found)


def share_the_file(place: Path, folder: str) -> None:
    """On CPUs, in the file's dtype: the weights are the file's pages, of which the host has one copy."""
    strategy = Replicated(Accelerator(cpu=True))
    load(folder, "cpu", dtype="auto")
    frozen, own = own_mb(lambda: strategy.prepare_frozen(load(folder, "cpu", dtype="auto"), 1 << 40, False))
    note(place, own=own, same=same(joined(strategy, frozen.model, 1 << 20), folder, torch.bfloat16))


MODEL_MB = 94.0  # in fp32; half of it in the file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    model = tiny_model(2048, hidden=512, layers=10, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) * 4 == pytest.approx(MODEL_MB * 2**20, rel=0.1)
    model.save_pretrained(place)
    return str(place)


def test_one_rank_reads_frozen_models_for_devices_and_the_others_have_no_copy_in_host_memory(tmp_path, folder):
    _, judge = named_models(tmp_path / "named")
    succeed_on_ranks(hand_out, tmp_path, folder, judge)
    first, second = seen(tmp_path)
    for name in ("replica", "parts", "judge"):
        assert first[name]["read"]
        assert not second[name]["read"]
    for name in ("replica", "parts"):
        assert first[name]["same"]
        assert second[name]["same"]
        assert first[name]["loading"] > 0.9 * MODEL_MB  # cast from the file's dtype, so it is rank 0's own
        assert second[name]["loading"] < 0.1 * MODEL_MB
    assert second["replica"]["preparing"] < 1.2 * MODEL_MB
    assert second["parts"]["preparing"] < 0.8 * MODEL_MB  # its half, and a layer on the way


def test_ranks_on_cpus_share_the_pages_of_the_file(tmp_path, folder):
    succeed_on_ranks(share_the_file, tmp_path, folder)
    for found in seen(tmp_path):
        assert found["same"]
        assert found["own"] < 0.05 * MODEL_MB
