"""A user's own algorithm in one file: REINFORCE whose baseline is a moving average of the rewards.

    A = reward - beta * sum(KL of the completion's tokens) - baseline      fixed for the rollout
    L = -A * logprob                                                       per token; sum over a completion, mean over completions
    baseline = average / weight, with average <- decay * average + (1 - decay) * mean(reward)
                                 and  weight  <- decay * weight  + (1 - decay)

Williams 1992 (doi 10.1007/BF00992696, equation 11) with the reinforcement comparison of its section 4; the division by `weight`
is Adam's correction of an average that starts at 0. Run `make quickstart MODEL=tiny` first: it writes this file's data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import lowpeak
from lowpeak import Advantages, Metric, OnlineConfig, Record, TokenBatch, never, redeclared


@lowpeak.config_dataclass
class ReinforceConfig(OnlineConfig):
    """Arguments of REINFORCE, beside those of every online run; `never_act` names those without effect here."""

    never_act: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("epsilon", "epsilon_high", "old_policy"), never("there is no ratio to clip; remove it")),
        "max_staleness": never("stale completions would have to be reweighted; remove it", raises=True),
        "dynamic_sampling_rounds": never("groups with equal rewards are trained on; remove it", raises=True),
        "vllm_importance_sampling_correction": never("completions are not reweighted; remove it"),
    }

    num_generations: int = redeclared(OnlineConfig, "num_generations", 1)
    kl_estimator: str = redeclared(OnlineConfig, "kl_estimator", "k1")
    baseline_decay: float = lowpeak.argument(
        0.9, "Decay of the baseline's average.", lowpeak.Check(lambda x: 0 <= x < 1, "must be in [0, 1)")
    )


def advantages(args: ReinforceConfig, records: Sequence[Record], coefficients: Mapping[str, float]) -> Advantages:
    """Return one advantage for all tokens of a completion; 0 if no function rewarded it."""
    baseline = coefficients["average"] / coefficients["weight"] if coefficients["weight"] else 0.0
    metrics = {**lowpeak.reward_metrics(records), "baseline": Metric(baseline)}
    kl = [sequence_kl(args.kl_estimator, record) if args.beta else 0.0 for record in records]
    if args.beta:
        metrics["objective/kl"] = Metric(sum(kl), float(len(kl)))
    values = [record.reward - args.beta * each - baseline for record, each in zip(records, kl, strict=True)]
    per_token = (torch.full((len(record.completion),), value) for record, value in zip(records, values, strict=True))
    return Advantages(tuple(value.nan_to_num(nan=0.0) for value in per_token), metrics)


def sequence_kl(estimator: Any, record: Any) -> float:
    """Return the KL of a completion, summed over the tokens that the policy wrote."""
    kl = lowpeak.kl_estimate(record.old.double(), record.reference.double(), estimator)
    return float(kl[record.completion.loss_mask].sum())


def loss(logprobs_T: Tensor, tokens: TokenBatch) -> Tensor:
    """Return `-A * logprob` of each token: [T]."""
    return -tokens.advantages_T * logprobs_T


def next_state(decay: float, state: Mapping[str, float], metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return the state with the step's mean reward in its average; unchanged if no completion was rewarded."""
    if metrics["reward"] != metrics["reward"]:
        return state
    reward, added = metrics["reward"], 1.0 - decay
    return {"average": decay * state["average"] + added * reward, "weight": decay * state["weight"] + added}


class ReinforceTrainer(lowpeak.OnlineTrainer):
    """REINFORCE with a moving baseline; its constructor is GRPOTrainer's."""

    config_class: ClassVar[type[OnlineConfig]] = ReinforceConfig

    @staticmethod
    def make_algorithm(args: Any, settings: lowpeak.OnlineSettings) -> lowpeak.Algorithm:
        if settings.rollout.num_steps > 1:
            raise lowpeak.ArgumentError(
                "REINFORCE is on-policy: leave num_iterations and steps_per_generation out, so that a rollout serves one step."
            )
        return lowpeak.Algorithm(
            name="reinforce",
            unit="token",
            needs=frozenset({"old", "reference"} if args.beta else ()),
            select=lowpeak.select_all,
            advantages=partial(advantages, args),
            reduction=lowpeak.sequence_mean,  # each token weighs 1 / completions, so a completion's tokens are summed
            loss=loss,
            measure=lowpeak.measure_pass,
            skip_zero_advantage=True,  # a completion whose advantages are all 0 is not trained on
            state={"average": 0.0, "weight": 0.0},  # saved in checkpoints
            update=partial(next_state, args.baseline_decay),
        )


if __name__ == "__main__":
    from datasets import load_dataset
    from noisy_sort import sorted_exactly

    data = load_dataset("json", data_files="runs/quickstart/prompts.jsonl", split="train")
    args = ReinforceConfig(
        "runs/own_algorithm", max_steps=160, per_device_train_batch_size=256, num_generations=8, max_completion_length=7,
        learning_rate=5e-4, warmup_steps=10,
    )  # fmt: skip
    trainer = ReinforceTrainer("runs/quickstart/warm_start", reward_funcs=sorted_exactly, args=args, train_dataset=data)
    trainer.train()
