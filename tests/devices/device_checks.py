"""What a process with the second device is asked beside whole runs; each function is called in one that is started for it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from device_runs import AWAY, CASES, FILTERED, KL, Case, build, refused, twin, wide
from second_device import TwinModule, ledger, refused_dtypes
from torch import nn

from lowpeak.device_kind import rehearse_device
from lowpeak.memory.phases import Phase
from lowpeak.rewards.model import ModelReward
from tiny_models import digest, footprint


def refuse_and_count(name: str, place: Path) -> None:
    device = twin()
    ours, host = torch.ones(2, 3, device=device), torch.ones(2, 3)
    index = torch.tensor([1, 0])
    refused = {
        "add": lambda: ours + host,
        "in place": lambda: host.add_(ours),
        "linear": lambda: nn.functional.linear(ours, host),
        "stack": lambda: torch.stack([ours[0, 0], host[0, 0]]),
        "embedding": lambda: nn.functional.embedding(index, ours),
        "gather": lambda: ours.gather(0, index[None]),
        "module": lambda: nn.Linear(3, 3)(ours),
        "numpy": lambda: ours.numpy(),
        "a table": lambda: torch.arange(3)[index.to(device)],
        "a number written to": lambda: host[0, 0].add_(ours[0, 0]),
        "out": lambda: torch.add(ours, ours, out=host),
    }
    allowed = {
        "a number": lambda: ours * host[0, 0],
        "an index": lambda: ours[index],
        "a copy": lambda: host.copy_(ours),
    }
    messages = {what: _message(call) for what, call in {**refused, **allowed}.items()}
    assert {what for what, words in messages.items() if words} == set(refused), messages
    assert all("same device" in messages[what] for what in refused if what != "numpy"), messages
    reading = {
        "item": lambda: ours.sum().item(),
        "bool": lambda: bool(ours.any()),
        "tolist": lambda: ours.tolist(),
        "cpu": lambda: ours.cpu(),
        "nonzero": lambda: ours.nonzero(),
        "mask": lambda: ours[ours > 0],
        "equal": lambda: torch.equal(ours, ours),
    }
    silent = {
        "cpu, not waiting": lambda: ours.to("cpu", non_blocking=True),
        "where": lambda: torch.where(ours > 0, ours, 0),
    }
    reads = {what: _reads(call) for what, call in {**reading, **silent}.items()}
    assert reads == {**dict.fromkeys(reading, 1), **dict.fromkeys(silent, 0)}, reads
    storage = ours.untyped_storage()
    before = TwinModule.memory_allocated()
    storage.resize_(0)
    assert before - TwinModule.memory_allocated() == ours.numel() * 4
    assert "storage" in _message(lambda: ours + 1)


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def _reads(call: Callable[[], Any]) -> int:
    ledger.clear()
    call()
    return sum(ledger.reads.values())


def leave_on_host(case: str, place: Path) -> None:
    """A run whose reference or reward model was left on the host is refused; where the run puts them, they are on the device."""
    device, parts = twin(), CASES["parts: rewards: a model"].parts
    for what in ("reference", "reward"):
        trainer = build(Case(args=KL, parts=parts), place / what, device)
        reward = next(reward for reward in trainer.parts.rewards if isinstance(reward, ModelReward))
        frozen = {"reference": trainer.run.reference.model, "reward": reward.model}
        placed = {name: {p.device.type for p in model.parameters()} for name, model in frozen.items()}
        assert placed == {"reference": {"twin"}, "reward": {"twin"}}, placed
        frozen[what].to("cpu")
        words = _message(trainer.train)
        assert "same device" in words, words


def leave_by_exception(case: str, place: Path) -> None:
    """An exception in the middle of a rollout leaves everything as it was before, and the rollout can be made again."""
    device = twin()
    for what in ("a layer", "a reward", "generate()"):
        raise_and_make_again(what, place / what, device)


def raise_and_make_again(what: str, place: Path, device: torch.device) -> None:
    model = refused if what == "generate()" else wide
    case = Case(args={"beta": 0.1, "max_steps": 1}, device_args={} if what == "generate()" else AWAY, model=model)
    expected = build(case, place / "expected", device)
    expected.train()
    rollout(expected)  # of the prompts that the one below is given when it raises
    tokens = rollout(expected)

    trainer = build(case, place / "run", device)
    trainer.train()
    before = state(trainer)
    broken = Breaking(trainer, what)
    words = _message(lambda: rollout(trainer))
    broken.mend()
    assert words == "out of luck", words
    after = state(trainer)
    assert not (changed := {key for key in before if after[key] != before[key]}), (what, changed)
    assert rollout(trainer) == tokens, what
    assert digest(trainer.model) == digest(expected.model), what


def rollout(trainer: Any) -> list[list[int]]:
    made = trainer.collector.collect(1, trainer.state.global_step, trainer.state)
    return [record.completion.ids.tolist() for record in made.records]


def state(trainer: Any) -> dict[str, Any]:
    """All that a rollout may change for its time: modules, configs, where storages are, and every value."""
    gc.collect()
    models = [trainer.model, trainer.run.reference.model]
    states = [value for each in trainer.optimizer.state.values() for value in each.values()]
    return {
        "modules": [footprint(model) for model in models],
        "configs": [(model.config.to_dict(), model.generation_config.to_dict()) for model in models],
        "values": [digest(model) for model in models],
        "states": [(value.device.type, value.untyped_storage().nbytes(), value.tolist()) for value in states],
        "gradients": [p.requires_grad for model in models for p in model.parameters()],
        "allocated": TwinModule.memory_allocated(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


class Breaking:
    """Lets a part of a rollout raise: a reward, or a layer when it is called for the third time."""

    def __init__(self, trainer: Any, what: str) -> None:
        self._calls = 0
        panel = trainer.collector.panel
        if what == "a reward":
            compute_rewards = panel.compute_rewards

            def mend() -> None:
                panel.compute_rewards = compute_rewards

            panel.compute_rewards = self._raise
            self.mend = mend
            return
        self.mend = trainer.model.model.layers[1].register_forward_pre_hook(self._count).remove

    def _count(self, module: nn.Module, args: Any) -> None:
        self._calls += 1
        if self._calls == 3:
            raise RuntimeError("out of luck")

    def _raise(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")


def train_without_float64(name: str, place: Path) -> None:
    """A device without float64, as Apple's: steps with filtered and with plain sampling, and their metrics."""
    device = twin()
    for number, sampling in enumerate((FILTERED, {})):
        case = Case(args={"beta": 0.1, "padding_free": False, "temperature": 0.9, **sampling})
        trainers = [build(case, place / f"{number}{kind}", device) for kind in ("plain", "mps")]
        trainers[0].train()
        refused_dtypes.add(torch.float64)
        try:
            assert "float64" in _message(lambda: torch.zeros(2, device=device).double())
            with rehearse_device("mps"):
                trainers[1].train()
        finally:
            refused_dtypes.clear()
        expected, found = ([row["loss"] for row in t.state.log_history if "loss" in row] for t in trainers)
        assert len(found) == 2, found
        assert all(abs(a - b) <= 1e-4 * abs(a) for a, b in zip(expected, found, strict=True)), (expected, found)


def measure_all(names: list[str], place: Path) -> None:
    """What `measure` finds of each of these runs."""
    device = twin()
    (place / "peaks.json").write_text(json.dumps({name: measure(name, place / name, device) for name in names}))


def measure(name: str, place: Path, device: torch.device) -> list[dict[str, Any]]:
    """The peaks of a run's phases and the bytes that crossed, without and with its offloads, and the bytes of its reference."""
    gc.collect()
    case, found = CASES[name], []
    for args in ({}, case.device_args):
        trainer = build(replace(case, device_args=args), place / f"run{len(found)}", device)
        reference = getattr(trainer.run.reference, "model", None)
        size = 0 if reference is None else sum(p.nbytes for p in reference.parameters())
        ledger.clear()
        trainer.train()
        rows = [row for row in trainer.state.log_history if "step_time" in row]
        peaks = [{k: v for k, v in row.items() if k.startswith(("peak_memory/", "offload/"))} for row in rows]
        crossed = {"down": sum(ledger.downloaded.values()), "up": sum(ledger.uploaded.values())}
        found.append({"peaks": peaks, "reference": size, **crossed})
    return found


def offload_when_nothing_is_smaller(name: str, place: Path) -> None:
    """Training that does not fit with a sequence a micro-batch moves activations to the host, as a run told to do so does."""
    device, case = twin(), CASES["offloads: activations, all of them"]
    sizes = {"micro_batch_tokens": 2, "logprob_chunk_size": 16, "max_steps": 2}
    least = replace(case, args={**case.args, **sizes})
    away, trainer = (
        build(replace(least, device_args=args), place / f"run{number}", device)
        for number, args in enumerate((case.device_args, {}))
    )
    away.train()
    phase = trainer.run.tracker.phase

    @contextmanager
    def full_without_offload(each: Phase) -> Iterator[None]:
        with phase(each):
            if each is Phase.TRAIN and trainer.run.logprob_settings.activation_context is nullcontext:
                raise torch.OutOfMemoryError("activations do not fit")
            yield

    trainer.run.tracker.phase = full_without_offload
    trainer.train()
    assert trainer.run.sizes.lowered == {"activation_offloading"}, trainer.run.sizes
    assert digest(trainer.model) == digest(away.model)
