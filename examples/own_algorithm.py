"""An algorithm of one's own, in one file: REINFORCE whose baseline is a moving average of the rewards so far.

    A = reward - beta * sum(KL of the row's tokens) - baseline      fixed for the rollout
    L = -A * logprob                                                of a token, summed over its row, mean over rows
    baseline = average / weight,  average <- decay * average + (1 - decay) * mean(reward),  weight <- decay * weight + 1 - decay

Williams 1992 (doi 10.1007/BF00992696, equation 11) with the reinforcement comparison of its section 4; the division by `weight`
is Adam's correction of an average that starts at 0. The first rollout has the baseline 0. One completion a prompt is enough.
Run `make quickstart` first: it makes what `main` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from datasets import load_dataset
from torch import Tensor

from lowpeak.algorithms import (
    Advantages,
    Algorithm,
    Need,
    counted_tokens,
    kl_estimate,
    measure_pass,
    reward_metrics,
    select_all,
    sequence_mean,
)
from lowpeak.config import CORRECTION, ActsWhen, Check, OnlineSettings, in_algorithm, never, redeclared, require
from lowpeak.records import Metric, Record, TokenBatch
from lowpeak.training import OnlineConfig, OnlineTrainer, refuses_unknown

# 1. What it can be told.


@refuses_unknown
@dataclass
class ReinforceConfig(OnlineConfig):
    """Arguments of REINFORCE with a moving baseline; all others are those of every online run."""

    never_act: ClassVar[Mapping[str, ActsWhen]] = {
        "epsilon": never("there is no ratio to clip; remove it"),
        "epsilon_high": never("there is no ratio to clip; remove it"),
        "dynamic_sampling_rounds": never("groups whose rewards are equal are learned from; remove it", raises=True),
        **dict.fromkeys(CORRECTION, never("no completion is weighed by who sampled it; remove it")),
    }

    num_generations: int = redeclared(OnlineConfig, "num_generations", 1)
    kl_estimator: str = redeclared(OnlineConfig, "kl_estimator", "k1")
    baseline_decay: float = in_algorithm(
        0.9, "How much of the baseline a rollout leaves.", Check(lambda x: 0 <= x < 1, "must be in [0, 1)")
    )
    vllm_importance_sampling_correction: bool = redeclared(OnlineConfig, "vllm_importance_sampling_correction", False)


@dataclass(frozen=True)
class ReinforceSettings:
    """The algorithm's own part of the arguments, in which what cannot matter cannot be said."""

    beta: float
    kl_estimator: str
    decay: float


def resolve_reinforce(args: ReinforceConfig, online: OnlineSettings) -> ReinforceSettings:
    """The settings; ArgumentError for rollouts that serve several steps."""
    require(
        online.rollout.num_steps == 1,
        "REINFORCE is on-policy, so a rollout serves one step: leave num_iterations and steps_per_generation out.",
    )
    return ReinforceSettings(args.beta, args.kl_estimator, args.baseline_decay)


# 2. What it is: functions of records and tensors, in a record.


def make_reinforce(settings: ReinforceSettings) -> Algorithm:
    """REINFORCE; its own numbers are the average and its weight, which are checkpointed with the run."""
    needs: tuple[Need, ...] = ("old", "reference") if settings.beta else ()
    return Algorithm(
        name="reinforce",
        unit="token",
        needs=frozenset(needs),
        select=select_all,
        advantages=partial(advantages, settings),
        reduction=sequence_mean,  # 1 / rows, for each token: sums over a row
        loss=loss,
        measure=measure,
        idle=True,
        state={"average": 0.0, "weight": 0.0},
        update=partial(next_state, settings),
    )


def baseline_of(state: Mapping[str, float]) -> float:
    """The rewards' average; 0 before the first."""
    return state["average"] / state["weight"] if state["weight"] else 0.0


def advantages(settings: ReinforceSettings, records: Sequence[Record], state: Mapping[str, float]) -> Advantages:
    """One number for all of a row's tokens; 0 for a row that nobody scored."""
    baseline = baseline_of(state)
    kl = [row_kl(settings, record) for record in records]
    rows = [record.reward - settings.beta * each - baseline for record, each in zip(records, kl, strict=True)]
    metrics = {**reward_metrics(records), "baseline": Metric(baseline)}
    if settings.beta:
        metrics["objective/kl"] = Metric(sum(kl), float(len(kl)))
    per_token = (torch.full((len(record.completion),), row) for record, row in zip(records, rows, strict=True))
    return Advantages(tuple(row.nan_to_num(nan=0.0) for row in per_token), metrics)


def row_kl(settings: ReinforceSettings, record: Record) -> float:
    """The KL of a row, summed over the tokens that count."""
    if record.old is None or record.reference is None:
        return 0.0
    kl = kl_estimate(record.old.double(), record.reference.double(), settings.kl_estimator)
    return float(kl[record.completion.loss_mask].sum())


def loss(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """`-A * logprob` of each token: [T]."""
    return -tokens.advantages_T * logprobs_T


def measure(logprobs_T: Tensor, entropy_T: Tensor | None, tokens: TokenBatch) -> dict[str, Metric]:
    """Entropy, and the drift of the sampler."""
    return measure_pass(None, logprobs_T, entropy_T, tokens, counted_tokens(tokens, "token"))


def next_state(
    settings: ReinforceSettings, state: Mapping[str, float], metrics: Mapping[str, float]
) -> Mapping[str, float]:
    """The average with the step's mean reward in it."""
    reward, decay = metrics["reward"], settings.decay
    if reward != reward:
        return state  # nobody scored a row
    return {
        "average": decay * state["average"] + (1.0 - decay) * reward,
        "weight": decay * state["weight"] + 1.0 - decay,
    }


# 3. Its trainer, which says which algorithm it is.


class ReinforceTrainer(OnlineTrainer):
    """Takes what GRPOTrainer takes."""

    config_class: ClassVar[type[OnlineConfig]] = ReinforceConfig

    @staticmethod
    def make_algorithm(args: Any, settings: OnlineSettings) -> Algorithm:
        """REINFORCE as the arguments describe it."""
        return make_reinforce(resolve_reinforce(args, settings))


def main() -> None:
    """Train the quickstart's warm-started model."""
    from noisy_sort import sorted_exactly

    files = {"train": "runs/quickstart/prompts.jsonl", "test": "runs/quickstart/held_out.jsonl"}
    data = load_dataset("json", data_files=files)
    args = ReinforceConfig(
        output_dir="runs/own_algorithm",
        max_steps=160,
        per_device_train_batch_size=256,
        num_generations=8,
        max_completion_length=7,
        learning_rate=5e-4,
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=40,
    )
    trainer = ReinforceTrainer(
        model="runs/quickstart/warm_start",
        reward_funcs=sorted_exactly,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
