"""One side's steps of Online DPO on W2, timed by phase: `python -m benchmarks.harness.pairing REQUEST`.

Two completions of each prompt, of which the second is better. They are canned, or the model counts down (counting.py)
from lengths that our side draws and the peer is told.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.harness import shapes
from benchmarks.harness.clock import PhaseClock, watch_step
from benchmarks.harness.counting import Counting
from benchmarks.harness.report import OURS, print_result
from benchmarks.harness.stepping import trained

PAIR = 2


@dataclass(frozen=True)
class PairRequest:
    """What one side is to do: `num_prompts` a step, of which the peer takes `prompts_at_once`; `lengths` by step, pair by pair."""

    library: str
    canned: bool
    num_prompts: int
    prompts_at_once: int
    prompt_length: int
    steps: int
    start: str
    folder: str
    lengths: list[list[int]]
    options: dict[str, Any] = field(default_factory=dict)


def settings_of(request: PairRequest) -> dict[str, Any]:
    """The arguments of either library's trainer: the peer's sizes count prompts, and ours completions."""
    ours = request.library == OURS
    settings = {
        "output_dir": request.folder,
        "max_steps": request.steps,
        "gradient_accumulation_steps": request.num_prompts // request.prompts_at_once,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "beta": 0.1,
        "gradient_checkpointing": True,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }
    own: dict[str, Any]
    if ours:
        own = {"per_device_train_batch_size": PAIR * request.prompts_at_once, "num_generations": PAIR,
               "max_completion_length": shapes.LONGEST, "shuffle_dataset": False}  # fmt: skip
    else:
        own = {"per_device_train_batch_size": request.prompts_at_once, "max_new_tokens": shapes.LONGEST,
               "train_sampling_strategy": "sequential",
               "max_length": request.prompt_length + shapes.LONGEST}  # fmt: skip
    return {**settings, **own, **request.options}


def second_is_better(ours: bool, seen: list[list[int]]) -> Callable[..., list[float]]:
    """The reward; it notes the lengths of what it is given. The peer's rows are all first ones, then all second ones."""

    def second_reward(
        completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float]:
        seen.append([len(ids) for ids in completion_ids])
        count = len(completions)
        return [float(i % PAIR if ours else i >= count // PAIR) for i in range(count)]

    return second_reward


def make_trainer(request: PairRequest, seen: list[list[int]]) -> Any:
    """The trainer of either library, whose completions are canned or of forced lengths."""
    ours = request.library == OURS
    package = importlib.import_module("lowpeak" if ours else "trl.experimental.online_dpo")
    count = request.steps * request.num_prompts
    data = Dataset.from_list([{"prompt": text} for text in shapes.make_prompts(count, request.prompt_length)])
    given = iter(request.lengths)
    canned = {"rollout_func": lambda prompts, trainer: our_countdowns(prompts, trainer, next(given))}
    trainer = package.OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(request.start),
        reward_funcs=second_is_better(ours, seen),
        args=package.OnlineDPOConfig(**settings_of(request)),
        train_dataset=data,
        processing_class=PreTrainedTokenizerFast.from_pretrained(request.start),
        **(canned if ours and request.canned else {}),
    )
    if not ours:
        steer_peer(trainer, request, portions(request))
    elif not request.canned:
        trainer.model.register_forward_hook(Counting(), with_kwargs=True)
    return trainer


def portions(request: PairRequest) -> Iterator[list[int]]:
    """The lengths of each of the peer's calls: of so many pairs, all first ones, then all second ones."""
    size = PAIR * request.prompts_at_once
    for step in request.lengths:
        for start in range(0, len(step), size):
            part = step[start : start + size]
            yield part[0::PAIR] + part[1::PAIR]


def our_countdowns(prompts: Sequence[str], trainer: Any, lengths: Sequence[int]) -> dict[str, list[Any]]:
    """lowpeak's `rollout_func`: each prompt comes once per completion."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = list(map(shapes.countdown, lengths))
    logprobs = [[0.0] * len(row) for row in completions]  # nothing reads them
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": logprobs,
    }


def steer_peer(trainer: Any, request: PairRequest, given: Iterator[list[int]]) -> None:
    """The peer's completions: canned, or counted down while it generates, since its training passes give logits too."""
    inner, counting = trainer._generate, Counting()

    def generate(model: Any, prompts: Sequence[str], images: Any = None) -> Any:
        lengths = next(given)
        if request.canned:
            return canned_batch(trainer, prompts, lengths)
        counting.lengths = torch.tensor(lengths)
        handle = trainer.model.register_forward_hook(counting, with_kwargs=True)
        try:
            return inner(model, prompts, images)
        finally:
            handle.remove()

    trainer._generate = generate


def canned_batch(trainer: Any, prompts: Sequence[str], lengths: Sequence[int]) -> tuple[Any, ...]:
    """What the peer's `_generate` gives: ids and masks of equally long prompts and of padded completions."""
    ids_PL = torch.tensor([trainer.processing_class(prompt)["input_ids"] for prompt in prompts]).repeat(PAIR, 1)
    rows = [torch.tensor(shapes.countdown(length)) for length in lengths]
    completions_NC = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids_PL, torch.ones_like(ids_PL), completions_NC, (completions_NC != 0).long(), None


def watch(trainer: Any, library: str, clock: PhaseClock) -> None:
    """`rollout`, `score` (the reference's pass) and `train`; of the peer its policy's one."""
    if library == OURS:
        watch_step(trainer, library, clock)
        return
    clock.watch(trainer, "_generate", "rollout")
    clock.watch(trainer, "_forward", "score", when=lambda: not torch.is_grad_enabled())
    clock.watch(trainer, "training_step", "train")


def planned_steps(request: PairRequest) -> dict[str, Any]:
    """Train, and tell what each step took, what was resident before, and what was computed."""
    seen: list[list[int]] = []
    trainer, clock = make_trainer(request, seen), PhaseClock()
    watch(trainer, request.library, clock)
    return trained(trainer, clock, request.library, request.folder, seen)


if __name__ == "__main__":
    print_result(planned_steps(PairRequest(**json.loads(sys.argv[1]))))
