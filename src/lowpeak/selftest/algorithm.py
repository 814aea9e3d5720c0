"""`lowpeak check`: the contract of an algorithm that a user wrote, and one training step on a tiny model on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback

from lowpeak.algorithms import Algorithm, call_advantages, call_select, check_losses, check_metrics
from lowpeak.errors import ArgumentError, files_of
from lowpeak.journal import read_steps
from lowpeak.records import Completion, Record, TokenBatch
from lowpeak.selftest.checks import TINY_RUN, Check, run_check
from lowpeak.selftest.models import even_share, make_model, make_prompts, make_tokenizer
from lowpeak.trainers import OnlineConfig, OnlineTrainer
from lowpeak.training import StepBatches, with_advantages

_ARGUMENTS: Mapping[str, Any] = {
    **TINY_RUN,
    "max_steps": 1,
    "max_completion_length": 7,
    "kv_cache_bytes": 1 << 24,
}


@dataclass
class _Check:
    """The trainer under check, the user's arguments for its config, and results of earlier checks."""

    trainer_class: type[OnlineTrainer]
    output_dir: str
    arguments: Mapping[str, Any] = field(init=False)
    trainer: OnlineTrainer = field(init=False)
    records: tuple[Record, ...] = field(init=False)
    tokens: TokenBatch = field(init=False)

    @property
    def algorithm(self) -> Algorithm:
        return self.trainer.run.algorithm


def check_algorithm(trainer_class: Any, read_arguments: Callable[[type], Mapping[str, Any]]) -> Iterator[Check]:
    """Yield the checks of a trainer, up to the first that fails."""
    with TemporaryDirectory(prefix="lowpeak-check-") as folder:
        check = _Check(trainer_class, folder)
        for name, run in _CHECKS.items():
            result = run_check(name, partial(run, check), partial(files_of, trainer_class))
            yield result
            if not result.passed:
                return
            if name == "trainer":
                # An unknown name is no fault of the algorithm.
                check.arguments = read_arguments(check.trainer_class.config_class)


def _check_class(check: _Check) -> str:
    found = check.trainer_class
    if not isinstance(found, type) or not issubclass(found, OnlineTrainer):
        raise ArgumentError(
            f"{found!r:.80} is neither an environment, which has a method reset, nor a class that inherits from "
            "lowpeak.OnlineTrainer."
        )
    config_class = getattr(found, "config_class", None)
    if not isinstance(config_class, type) or not issubclass(config_class, OnlineConfig):
        raise ArgumentError(
            f"config_class of {found.__name__} is {config_class!r:.80}: set it to a class that inherits from lowpeak.OnlineConfig."
        )
    return f"{found.__name__} is a lowpeak.OnlineTrainer with the arguments of {config_class.__name__}"


def _make_trainer(check: _Check) -> str:
    config_class = check.trainer_class.config_class
    given = check.arguments
    num_generations = given.get("num_generations", config_class.num_generations)
    settings = {**_ARGUMENTS, "output_dir": check.output_dir, "per_device_train_batch_size": 4 * num_generations}
    check.trainer = check.trainer_class(
        model=make_model(hidden=32),
        reward_funcs=even_share,
        args=config_class(**{**settings, **given}),
        train_dataset=Dataset.from_list(make_prompts(64)),
        processing_class=make_tokenizer(),
    )
    check.trainer.remove_callback(PrinterCallback)
    needs = ", ".join(sorted(check.algorithm.needs)) or "no scores"
    return f"make_algorithm returns {check.algorithm.name!r}: a loss per {check.algorithm.unit}, needs {needs}"


def _select(check: _Check) -> str:
    made = _make_records(check.algorithm, check.trainer.num_generations)
    selection = call_select(check.algorithm.select, made)
    check.records = tuple(made[i] for i in selection.indices) or made
    return f"trains on {len(selection.indices)} of {len(made)} completions of three prompts, one without rewards"


def _make_records(algorithm: Algorithm, num_generations: int) -> tuple[Record, ...]:
    """Return completions of three prompts: with different rewards, with equal ones, and without any."""
    generator = torch.Generator().manual_seed(0)
    records = []
    for group, rewards in enumerate((range(num_generations), [1.0] * num_generations, [torch.nan] * num_generations)):
        for i, reward in enumerate(rewards):
            length = 3 + (group + i) % 5
            scores: dict[str, Any] = {
                need: -torch.rand(length, generator=generator) for need in sorted(algorithm.needs)
            }
            ids = torch.randint(2, 13, (length,), generator=generator, dtype=torch.int32)
            completion = Completion(ids, -torch.rand(length, generator=generator), ids > 0, "stop")
            records.append(Record(group, (2, 3, 4), completion, (float(reward),), float(reward), **scores))
    return tuple(records)


def _advantages(check: _Check) -> str:
    advantages = call_advantages(check.algorithm.advantages, check.records, check.algorithm.coefficients())
    check.records = with_advantages(check.records, advantages)
    if check.trainer.collector.settings.rollout.num_steps == 1:  # as in a run: old is the policy's own log-prob
        check.records = tuple(replace(record, old=None) for record in check.records)
    return f"a finite number for each token of {len(check.records)} completions"


def _loss(check: _Check) -> str:
    algorithm = check.algorithm
    packed = StepBatches.pack(check.trainer.run, check.records, range(len(check.records)), 0)
    check.tokens = tokens = replace(packed.micro_batches[0].tokens, coefficients=algorithm.coefficients())
    if algorithm.loss is None:
        return "the algorithm trains values alone"
    generator = torch.Generator().manual_seed(1)
    logprobs_T = (-torch.rand(len(tokens.sequences_T), generator=generator)).requires_grad_()
    losses_U = check_losses(algorithm.loss(logprobs_T, tokens), algorithm.loss, tokens.weights_U, logprobs_T)
    (gradient_T,) = torch.autograd.grad(losses_U.sum(), logprobs_T)
    if not bool(losses_U.isfinite().all() and gradient_T.isfinite().all()):
        raise ArgumentError(
            "loss returned a number, or has a gradient, that is not finite, for log-probs from -1 to 0."
        )
    if algorithm.unit == "token" and not algorithm.needs_full_sequence:
        half = len(tokens.sequences_T) // 2
        if not torch.allclose(algorithm.loss(logprobs_T[:half], tokens.slice(0, half)), losses_U[:half]):
            raise ArgumentError(
                "loss depends on other tokens than its own: the model's head calls it on slices of the tokens. Make it "
                "elementwise, or set needs_full_sequence=True."
            )
    return f"a finite number with a gradient for each of {len(losses_U)} units"


def _measure(check: _Check) -> str:
    algorithm, num_tokens = check.algorithm, len(check.tokens.sequences_T)
    logprobs_T, entropy_T = -torch.ones(num_tokens), torch.ones(num_tokens)
    metrics = check_metrics(algorithm.measure(logprobs_T, entropy_T, check.tokens), algorithm.measure)
    return ", ".join(metrics) or "none"


def _train(check: _Check) -> str:
    check.trainer.train()
    step = read_steps(Path(check.output_dir) / "journal")[-1]
    if not step["grad_norm"]:
        raise ArgumentError(
            f"the gradient of the step is 0, so nothing is trained (the loss is {step['loss']:.4g}): look at the advantages, and "
            "at the weights that reduction returns."
        )
    return f"reward {step['reward']:.4g}, loss {step['loss']:.4g}, gradient norm {step['grad_norm']:.4g}"


_CHECKS: Mapping[str, Callable[[_Check], str]] = {
    "trainer": _check_class,
    "algorithm": _make_trainer,
    "select": _select,
    "advantages": _advantages,
    "loss": _loss,
    "metrics": _measure,
    "training step": _train,
}
