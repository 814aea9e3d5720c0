"""OnlineDPOConfig: the arguments of Online DPO, TRL's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lowpeak.config.online_dpo import RANGES, REJECTED
from lowpeak.config.ranges import Range
from lowpeak.training.arguments import OnlineConfig
from lowpeak.training.fields import argument, refuses_unknown


@refuses_unknown
@dataclass(repr=False)
class OnlineDPOConfig(OnlineConfig):
    """Arguments of Online DPO (Guo et al. 2024, arXiv 2402.04792).

    Sizes count completions as everywhere here, where TRL's per_device_train_batch_size counts prompts.
    """

    ranges: ClassVar[Mapping[str, Range]] = RANGES
    rejected: ClassVar[Mapping[str, str]] = REJECTED

    learning_rate: float = argument(5e-7, "training", "The optimizer's learning rate.")
    disable_dropout: bool = argument(True, "model", "Set every dropout probability to 0.")
    num_generations: int = argument(
        2, "generation", "Completions of each prompt (G): the best and the worst are a pair."
    )
    max_completion_length: int = argument(64, "generation", "Most tokens of a completion.")
    beta: float | list[float] = argument(  # type: ignore[assignment]
        0.1,
        "algorithm",
        "Pull towards the reference (IPO's tau); a list has one for each epoch, and the last one stays.",
    )
    loss_type: str = argument("sigmoid", "algorithm", "The loss of a pair: sigmoid (DPO's) or ipo.")
    missing_eos_penalty: float | None = argument(
        None, "rewards", "What a completion that did not end by itself loses of its reward."
    )
    vllm_gpu_memory_utilization: float = argument(0.55, "vllm", "Colocated: the engine's share of the device's memory.")
    vllm_importance_sampling_correction: bool = argument(
        False, "vllm", "Always False: a pair is compared by policy and reference, whoever sampled it."
    )
