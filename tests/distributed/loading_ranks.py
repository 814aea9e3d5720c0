"""What ranks do in the tests of loading: each loads a model that will not train, for a device of its own or for the host."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from fault_ranks import note, rank
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowpeak.pretrained import from_pretrained
from lowpeak.rewards.make import make_rewards
from lowpeak.strategies.accelerated import Replicated


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


def weights_of(strategy: Any, model: Any) -> dict[str, torch.Tensor]:
    """Every parameter, put together from all ranks' parts."""
    found: dict[str, list[torch.Tensor]] = {}
    for piece in strategy.slices(model, 1 << 20, None):
        found.setdefault(piece.name, []).append(piece.values.clone())
    return {name: torch.cat(parts) for name, parts in found.items()}


def same(found: dict[str, torch.Tensor], folder: str, dtype: torch.dtype) -> bool:
    """Whether these are the file's weights."""
    expected = load_file(f"{folder}/model.safetensors")
    return all(torch.equal(values, expected[name].to(dtype).view(-1)) for name, values in found.items())


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
            "same": same(weights_of(strategy, frozen.model), folder, dtype),
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
    note(place, own=own, same=same(weights_of(strategy, frozen.model), folder, torch.bfloat16))
