"""One side's training steps, timed by phase: `python -m benchmarks.harness.stepping REQUEST`.

Completions are canned, or generated with lengths that are the same on both sides: W2's model counts down from a length
that our side draws and the peer is told (see counting.py); W1 samples, and writes about as much on either side. Every
row of a group has a reward of its own, so that no row's advantage is zero and none is left out.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from benchmarks.harness import shapes, task
from benchmarks.harness.canned import can_peer, our_rollouts
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.counting import Counting, length_scores
from benchmarks.harness.process import in_mb, resident_bytes
from benchmarks.harness.report import OURS, print_result


@dataclass(frozen=True)
class StepRequest:
    """What one side is to do.

    `lengths` are those of each step's completions, group by group: of W2's canned ones, and of those that the peer
    generates. `options` are more arguments of this side's trainer.
    """

    library: str
    shape: str
    canned: bool
    num_prompts: int
    prompt_length: int
    steps: int
    beta: float
    start: str
    folder: str
    lengths: list[list[int]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


class Stamps(TrainerCallback):
    """CPU seconds by phase, and all of them, when each step ends."""

    def __init__(self, clock: PhaseClock) -> None:
        self.clock = clock
        self.seen: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the seconds so far."""
        self.seen.append({**self.clock.seconds, "total": time.process_time()})


class Passes:
    """Tokens that each phase embeds, padding included, and in how many forwards."""

    def __init__(self, clock: PhaseClock) -> None:
        self.tokens: dict[str, int] = {}
        self.forwards: dict[str, int] = {}
        self._clock = clock

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count one forward of an embedding."""
        phase = self._clock.current
        self.tokens[phase] = self.tokens.get(phase, 0) + args[0].numel()
        self.forwards[phase] = self.forwards.get(phase, 0) + 1


def settings_of(request: StepRequest) -> dict[str, Any]:
    """The arguments of either library's trainer."""
    settings = task.trainer_settings("grpo", 0, request.steps, Path(request.folder))
    if request.shape == "w2":
        settings |= {
            "per_device_train_batch_size": shapes.NUM_GENERATIONS,
            "gradient_accumulation_steps": request.num_prompts,
            "max_completion_length": shapes.LONGEST,
            "learning_rate": 1e-6,
            "gradient_checkpointing": True,
        }
    more = {"beta": request.beta, "shuffle_dataset": False, "logging_steps": 1}
    return settings | more | request.options


def spread(lengths: list[list[int]]) -> Callable[..., list[float]]:
    """A reward that differs within each group; it notes the lengths of what it is given."""

    def spread_reward(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any) -> Any:
        lengths.append([len(ids) for ids in completion_ids])
        return [float(i % shapes.NUM_GENERATIONS) for i in range(len(completions))]

    return spread_reward


def make_data(request: StepRequest) -> Any:
    """As many prompts as the steps ask."""
    count = request.steps * request.num_prompts
    if request.shape == "w1":
        return task.noisy_sort.make_prompts(count, 0)
    from datasets import Dataset

    return Dataset.from_list([{"prompt": text} for text in shapes.make_prompts(count, request.prompt_length)])


def make_trainer(request: StepRequest, lengths: list[list[int]]) -> Any:
    """The trainer of either library, whose completions are canned or of forced lengths where asked."""
    package, ours = importlib.import_module(request.library), request.library == OURS
    given = iter(request.lengths)
    canned = our_rollouts if request.shape == "w1" else lambda prompts, trainer: our_countdowns(prompts, trainer, given)
    settings = settings_of(request)
    by_name = "model_init_kwargs" in settings  # which act on a model by name
    trainer = package.GRPOTrainer(
        model=request.start if by_name else AutoModelForCausalLM.from_pretrained(request.start),
        reward_funcs=spread(lengths),
        args=package.GRPOConfig(**settings),
        train_dataset=make_data(request),
        processing_class=PreTrainedTokenizerFast.from_pretrained(request.start),
        **({"rollout_func": canned} if ours and request.canned else {}),
    )
    if request.canned and not ours:
        if request.shape == "w1":
            can_peer(trainer, "grpo")
        else:
            trainer._generate_single_turn = lambda *_, **__: (list(map(shapes.countdown, next(given))), None)
    elif not request.canned and request.shape == "w2":
        force_lengths(trainer, None if ours else given)
    return trainer


def our_countdowns(prompts: Sequence[str], trainer: Any, given: Any) -> dict[str, list[Any]]:
    """lowpeak's `rollout_func`: each prompt comes once per completion."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = list(map(shapes.countdown, next(given)))
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": [[0.0] * len(row) for row in completions],  # on-policy, nothing reads them
    }


def force_lengths(trainer: Any, given: Any) -> None:
    """Let the model count down; the peer from the lengths that it is `given`."""
    counting = Counting(length_scores(trainer.model.config.vocab_size))
    trainer.model.register_forward_hook(counting, with_kwargs=True)
    if given is None:
        return
    inner = trainer._generate_single_turn

    def generate(*args: Any, **kwargs: Any) -> Any:
        counting.lengths = torch.tensor(next(given))
        return inner(*args, **kwargs)

    trainer._generate_single_turn = generate


def planned_steps(request: StepRequest) -> dict[str, Any]:
    """Train, and tell what each step took, what was resident before, and what was computed."""
    lengths: list[list[int]] = []
    importlib.import_module(request.library).GRPOTrainer  # noqa: B018, loads what is loaded lazily
    before = resident_bytes()
    trainer, clock = make_trainer(request, lengths), PhaseClock()
    watch_step(trainer, request.library, clock)
    found = trained(trainer, clock, request.library, request.folder, lengths)
    return {**found, "empty_rss_mb": None if before is None else in_mb(before)}


def trained(trainer: Any, clock: PhaseClock, library: str, folder: str, lengths: list[list[int]]) -> dict[str, Any]:
    """Train under the clock, and tell what it and the trainer say; `lengths` fill as completions are judged."""
    stamps, passes = Stamps(clock), Passes(clock)
    trainer.add_callback(stamps)
    for model in filter(None, (trainer.model, reference_of(trainer))):
        model.get_input_embeddings().register_forward_pre_hook(passes)
        for parameter in model.parameters():
            parameter.detach().sum()  # weights of a file are resident once they are read, and not before
    gc.collect()
    resident = resident_bytes()
    stamps.seen.append({"total": time.process_time()})
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log and "grad_norm" in log]
    return {
        "steps": [difference(*pair) for pair in zip(stamps.seen[:-1], stamps.seen[1:], strict=True)],
        "events": clock.events,
        "start_rss_mb": None if resident is None else in_mb(resident),
        "tokens": passes.tokens,
        "forwards": passes.forwards,
        "lengths": lengths,
        "loss": [log["loss"] for log in logs],
        "grad_norm": [log["grad_norm"] for log in logs],
        "model": dimensions(trainer.model),
        "own": own_numbers(trainer, Path(folder)) if library == OURS else {},
    }


def reference_of(trainer: Any) -> Any:
    """The reference model of either trainer, if it has one."""
    return getattr(trainer, "ref_model", None) or getattr(getattr(trainer, "parts", None), "reference_model", None)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each phase took in between."""
    return {name: round(seconds - before.get(name, 0.0), 4) for name, seconds in after.items()}


def dimensions(model: Any) -> dict[str, int]:
    """What the arithmetic of a forward depends on."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    inner = sum(p.numel() for p in model.parameters()) - head
    return {"body": inner, "head": head, "layers": config.num_hidden_layers, "hidden": config.hidden_size,
            "vocabulary": config.vocab_size}  # fmt: skip


def own_numbers(trainer: Any, folder: Path) -> dict[str, Any]:
    """What only lowpeak tells: its sizes, and the highest of its journal's peaks by phase and of its useful shares."""
    from lowpeak.journal import read_steps

    rows = read_steps(folder / "journal")
    peaks = {name: max(row.get(name, 0) for row in rows) for name in rows[-1] if name.startswith("peak_memory/")}
    useful = {name: rows[-1][name] for name in rows[-1] if name.startswith("useful_tokens/")}
    return {"sizes": trainer.run.sizes.as_dict(), "useful_tokens": useful,
            "peak_memory": {name.removeprefix("peak_memory/"): in_mb(int(peak)) for name, peak in peaks.items()}}  # fmt: skip


if __name__ == "__main__":
    print_result(planned_steps(StepRequest(**json.loads(sys.argv[1]))))
