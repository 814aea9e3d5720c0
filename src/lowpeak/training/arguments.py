"""The face: GRPOConfig, RLOOConfig and SFTConfig, flat dataclasses over transformers' TrainingArguments.

Names are TRL's where the meaning is the same. They stay thin: `config/resolve.py` turns them into the records that the
code works with and raises for what cannot act.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from lowpeak.config.algorithm import SupervisedLossType
from lowpeak.config.asked import (
    WHOLE,
    Cut,
    is_on,
    refuse_fsdp1,
    refuse_half_precision,
    refuse_other_parallelism,
    require_deepspeed,
    settle_deepspeed,
    settled_cut,
    take_fsdp_over,
)
from lowpeak.config.ranges import Range, check_finite, check_range, one_of
from lowpeak.config.rollout import SAID_BY_ARGUMENTS
from lowpeak.config.secrets import hide_secrets
from lowpeak.errors import ArgumentError
from lowpeak.rendezvous import limit_collectives_on_cpu, meet_anew
from lowpeak.training.fields import argument, refuses_unknown
from lowpeak.training.vllm_arguments import VllmArguments

logger = logging.getLogger(__name__)

_JSON_FIELDS = ("model_init_kwargs", "chat_template_kwargs", "generation_kwargs", "vllm_engine_kwargs")
_RENAMED = (
    ("gradient_checkpointing", "activation_checkpointing"),
    ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)


def _json_object(name: str, text: str) -> dict[str, Any]:
    """The mapping that the text of an argument is; ArgumentError where it is none."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise ArgumentError(f"{name} is not a JSON object: write it as '{{\"name\": value}}'.")
    return found


@dataclass(repr=False)
class CommonConfig(TrainingArguments):
    """What every lowpeak trainer takes, and where its defaults differ from transformers'.

    `bf16` None is True where the GPU computes in bf16, else False. Activation checkpointing is on unless turned off.
    """

    saves_no_tokens: ClassVar[bool] = False  # whether a pickle is without access tokens

    learning_rate: float = argument(1e-6, "training", "The optimizer's learning rate.")
    logging_steps: float = argument(10, "logging", "Log every so many steps (below 1: share of all steps).")
    bf16: bool | None = argument(None, "training", "Compute in bf16 (None: where the GPU can).")
    gradient_checkpointing: bool | None = argument(
        None, "memory", "Recompute activations in the backward pass (None: yes); newer name: activation_checkpointing."
    )
    remove_unused_columns: bool = argument(False, "data", "Always False: columns go to the rewards.")
    per_device_eval_batch_size: int | None = argument(
        None, "evaluation", "Rows generated together in evaluation (None: as many as the KV cache budget allows)."
    )
    activation_offloading: bool = argument(
        False, "memory", "Keep what the backward pass needs in host memory until it is used (GPUs)."
    )
    model_init_kwargs: dict | str | None = argument(
        None,
        "model",
        "Keywords for from_pretrained when the model is given by name or path (JSON on the command line).",
    )
    trust_remote_code: bool = argument(False, "model", "Allow code from the model's repository to run.")
    disable_dropout: bool = argument(False, "model", "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = argument(False, "model", "Run the head's product in fp32.")
    chat_template_kwargs: dict | str | None = argument(None, "data", "Keywords for the chat template (JSON).")
    shuffle_dataset: bool = argument(True, "data", "Draw rows in a random order, new in each epoch.")
    micro_batch_tokens: int | None = argument(
        None, "memory", "Tokens, padding included, of one forward and backward (None: from free memory)."
    )
    logprob_chunk_size: int | None = argument(
        None, "memory", "Tokens whose logits exist at a time (None: from free memory)."
    )
    pad_to_multiple_of: int | str | None = argument(
        "auto", "memory", "Round a micro-batch's padded length up to a multiple of this (auto, None: no multiple)."
    )
    padding_free: bool | None = argument(
        None, "memory", "Rows one after another without padding (None: where the model's attention can)."
    )
    router_aux_loss_coef: float | None = argument(
        None, "algorithm", "Weight of a mixture of experts' load-balancing loss (None: the model config's; 0: off)."
    )
    log_entropy: bool = argument(True, "logging", "Compute and log the policy's entropy.")

    def __post_init__(self) -> None:
        for name in _JSON_FIELDS:
            value = getattr(self, name, None)
            if isinstance(value, str):
                setattr(self, name, _json_object(name, value))
        if self.bf16 is None:
            self.bf16 = not self.use_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        self._default_checkpointing()
        self._settle_sharding()
        meet_anew()
        check_range(self, "ddp_timeout")  # used at once, by transformers too
        if self.use_cpu or is_on(os.environ, "ACCELERATE_USE_CPU"):
            limit_collectives_on_cpu(self.ddp_timeout, self.ddp_backend)
        check_finite(self, ("logging_steps", "eval_steps", "save_steps"))  # transformers makes them whole
        super().__post_init__()
        if self.fsdp_plugin_args is not None:
            refuse_fsdp1(self.fsdp_plugin_args["fsdp_version"], "fsdp_config")
        use_one_device(self)
        if self.deepspeed_plugin is not None:
            settle_deepspeed(self.deepspeed_plugin.hf_ds_config.config, self)

    @property
    def eval_batch_size(self) -> int:
        """Rows that transformers reports of an evaluation's batch: a training batch's, unless they are set."""
        return (self.per_device_eval_batch_size or self.per_device_train_batch_size) * max(1, self.n_gpu)

    @property
    def cut(self) -> Cut:
        """How tensor parallelism cuts the policy where it is loaded."""
        return settled_cut(os.environ, self.parallelism_config)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether activations are recomputed, by whichever name the installed transformers has for it."""
        return bool(getattr(self, "activation_checkpointing", None) or self.gradient_checkpointing)

    def __str__(self) -> str:
        shown = hide_secrets({field.name: getattr(self, field.name) for field in fields(self)})
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        return hide_secrets(self.__dict__, None) if self.saves_no_tokens else self.__dict__

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as trackers show them, without access tokens."""
        return hide_secrets(super().to_dict())

    def _settle_sharding(self) -> None:
        """ArgumentError for what was asked of accelerate, here or in the environment, and lowpeak does not run."""
        loading = self.model_init_kwargs if isinstance(self.model_init_kwargs, dict) else {}
        refuse_other_parallelism(os.environ, loading)
        refuse_half_precision(os.environ)
        deepspeed = bool(self.deepspeed) or is_on(os.environ, "ACCELERATE_USE_DEEPSPEED")
        beside = "DeepSpeed" if deepspeed else "the argument fsdp" if self.fsdp else ""
        if settled_cut(os.environ, self.parallelism_config, beside) != WHOLE:
            take_fsdp_over(os.environ)
        if deepspeed:
            require_deepspeed("a run under DeepSpeed needs")
        if is_on(os.environ, "ACCELERATE_USE_FSDP"):
            refuse_fsdp1(os.environ.get("FSDP_VERSION", "1"), "the environment (accelerate's config, or FSDP_VERSION)")
        given: Any = self  # transformers' own types are those of its command line
        if str(given.fsdp).lower() == "true":
            given.fsdp = True

    def _default_checkpointing(self) -> None:
        """Activation checkpointing on by default, under the name that the installed transformers has for it."""
        if any(f.name == "activation_checkpointing" for f in fields(TrainingArguments)):
            for old, new in _RENAMED:
                if getattr(self, new) is None:
                    setattr(self, new, getattr(self, old))
                setattr(self, old, None)
            if getattr(self, "activation_checkpointing") is None:  # noqa: B009
                setattr(self, "activation_checkpointing", True)  # noqa: B010
        elif self.gradient_checkpointing is None:
            self.gradient_checkpointing = True


@dataclass(repr=False)
class OnlineConfig(VllmArguments, CommonConfig):
    """What GRPO and RLOO share: rollouts, rewards, reference, evaluation.

    `other_names` maps TRL's names of some arguments to ours; a value that is given by another name is that argument's.
    """

    other_names: ClassVar[Mapping[str, str]] = {"max_new_tokens": "max_completion_length"}

    num_generations: int = argument(8, "generation", "Completions of each prompt (G).")
    num_generations_eval: int | None = argument(None, "evaluation", "Sampled completions of each prompt in evaluation.")
    max_completion_length: int = argument(512, "generation", "Most tokens of a completion.")
    max_new_tokens: int | None = argument(None, "generation", "Other name of max_completion_length.")
    generation_batch_size: int | None = argument(
        None, "generation", "Completions of a rollout, over all ranks (in place of steps_per_generation)."
    )
    steps_per_generation: int | None = argument(
        None, "generation", "Batches of per_device_train_batch_size that a rollout holds (None: one step's)."
    )
    temperature: float = argument(1.0, "generation", "Softmax temperature of sampling and of every log-prob.")
    top_p: float = argument(1.0, "generation", "Sample among the likeliest tokens of this total probability.")
    top_k: int = argument(0, "generation", "Sample among this many likeliest tokens (0: all).")
    min_p: float | None = argument(None, "generation", "Least probability, as a share of the likeliest token's.")
    repetition_penalty: float = argument(1.0, "generation", "Above 1 makes tokens that were seen less likely.")
    generation_kwargs: dict | str | None = argument(
        None,
        "generation",
        "More of generation: stop_strings, stop_token_ids, eos_token_id, seed, transformers' names of sampling arguments; vLLM's "
        "own parameters (JSON).",
    )
    kv_cache_bytes: int | None = argument(None, "memory", "Bytes of the engine's KV cache (None: from free memory).")
    gather_budget: str | int | None = argument(
        None,
        "memory",
        "Bytes of a sharded model (FSDP2, ZeRO-3) that stay gathered while it generates: 8GiB, 0, or auto (None: auto).",
    )
    ds3_gather_for_generation: bool | None = argument(
        None, "memory", "True: gather all of a sharded model to generate; False: a layer at a time (gather_budget 0)."
    )
    disable_unwrapping_for_generation: bool | None = argument(
        None, "memory", "Older name: True is ds3_gather_for_generation=False."
    )
    offload_frozen_models: bool = argument(
        False, "memory", "Keep reference and reward models in host memory, on the device a layer at a time (GPUs)."
    )
    offload_during_rollout: bool = argument(
        False,
        "memory",
        "Gradients, optimizer states and frozen models wait in host memory while completions are generated (GPUs).",
    )
    share_prompt: bool | None = argument(
        None, "memory", "Forward a prompt once for all of its completions (None: where it pays)."
    )
    overlong_prompts: str = argument(
        "error", "data", "A prompt longer than fits: 'error', or 'drop' and count (in the log)."
    )
    beta: float = argument(0.0, "algorithm", "KL coefficient; 0 loads no reference model.")
    kl_estimator: str = argument("k3", "algorithm", "KL estimate per token: k1, k2 or k3.")
    num_iterations: int = argument(1, "algorithm", "Passes over each rollout.")
    epsilon: float = argument(0.2, "algorithm", "The ratio's clip range below 1.")
    epsilon_high: float | None = argument(None, "algorithm", "The clip range above 1 (None: epsilon).")
    reward_weights: list[float] | None = argument(None, "rewards", "A weight for each reward (None: all 1).")
    reward_timeout: float | None = argument(None, "rewards", "Seconds that one call of a reward may take.")
    reward_failures: str = argument(
        "raise", "rewards", "A reward that fails: 'raise', or 'none': the row counts as not scored, and is counted."
    )
    mask_truncated_completions: bool = argument(
        False, "algorithm", "Completions cut at max_completion_length take no part in the loss."
    )
    dynamic_sampling_rounds: int = argument(
        0, "algorithm", "Ask again at most so often for groups whose rewards are all equal (DAPO)."
    )
    sync_ref_model: bool = argument(False, "algorithm", "Move the reference towards the policy as training goes on.")
    ref_model_mixup_alpha: float = argument(0.6, "algorithm", "The policy's share in that move.")
    ref_model_sync_steps: int = argument(512, "algorithm", "Steps between two such moves.")
    success_reward: str | None = argument(
        None, "evaluation", "Name of the reward that says whether a completion succeeds (None: the first)."
    )
    success_threshold: float = argument(1.0, "evaluation", "A completion succeeds from this reward on.")
    log_completions: bool = argument(False, "logging", "Print a table of completions when metrics are logged.")
    num_completions_to_print: int | None = argument(None, "logging", "Rows of that table (None: all).")
    log_unique_prompts: bool = argument(False, "logging", "One row per prompt in that table.")

    def __post_init__(self) -> None:
        self.said_as: dict[str, str] = {}
        for name, ours in self.other_names.items():
            self._set_by(name, ours, getattr(self, name))
        super().__post_init__()
        told = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        for name, ours in SAID_BY_ARGUMENTS.items():
            self._set_by(f"generation_kwargs[{name!r}]", ours, told.get(name))

    def _set_by(self, name: str, ours: str, value: float | None) -> None:
        """Set an argument by another name; ArgumentError if its own name was given another value."""
        if value is None:
            return
        given: frozenset[str] = getattr(self, "given", frozenset())
        if ours in given and getattr(self, ours) != value:
            value, own = getattr(self, name, value), getattr(self, ours)
            raise ArgumentError(f"{name}={value!r} and {ours}={own!r} say the same thing; give one.")
        setattr(self, ours, value)
        self.said_as[ours] = name


@refuses_unknown
@dataclass(repr=False)
class GRPOConfig(OnlineConfig):
    """Arguments of GRPO and its family (DeepSeekMath, arXiv 2402.03300; Dr. GRPO, DAPO, GSPO, CISPO)."""

    loss_type: str = argument("dapo", "algorithm", "grpo, bnpo, dr_grpo, dapo or cispo.")
    importance_sampling_level: str = argument("token", "algorithm", "The ratio's unit: token, or sequence (GSPO).")
    delta: float | None = argument(None, "algorithm", "Ceiling of the ratio where the advantage is negative.")
    scale_rewards: str | bool = argument("group", "algorithm", "Divide advantages by the std of: group, batch, none.")
    multi_objective_aggregation: str = argument(
        "sum_then_normalize", "algorithm", "Several rewards: sum_then_normalize or normalize_then_sum."
    )
    use_bias_correction_kl: bool = argument(True, "algorithm", "Weigh the KL in the loss by the ratio.")
    top_entropy_quantile: float = argument(1.0, "algorithm", "Share of tokens, by entropy, that the policy term takes.")
    entropy_coef: float = argument(0.0, "algorithm", "Weight of an entropy bonus.")
    use_adaptive_entropy: bool = argument(False, "algorithm", "Steer entropy_coef towards entropy_target.")
    entropy_coef_min: float = argument(0.0, "algorithm", "Least adaptive coefficient.")
    entropy_coef_max: float = argument(1.0, "algorithm", "Greatest adaptive coefficient.")
    entropy_coef_delta: float = argument(0.005, "algorithm", "Change of the adaptive coefficient a step.")
    entropy_target: float = argument(0.2, "algorithm", "Entropy that the adaptive coefficient aims at.")


@refuses_unknown
@dataclass(repr=False)
class RLOOConfig(OnlineConfig):
    """Arguments of RLOO (Ahmadian et al. 2024, arXiv 2402.14740)."""

    num_generations: int = argument(2, "generation", "Completions of each prompt (G), at least 2.")
    beta: float = argument(0.05, "algorithm", "Weight of the KL in the reward; 0 loads no reference model.")
    kl_estimator: str = argument("k1", "algorithm", "KL estimate per token: k1, k2 or k3.")
    normalize_advantages: bool = argument(False, "algorithm", "Centre and scale advantages over the rollout.")
    reward_clip_range: tuple[float, float] | None = argument(None, "algorithm", "Clip rewards to [low, high].")


@dataclass(repr=False)
class OfflineConfig(CommonConfig):
    """What supervised and reward training share: changes of the tokenizer, made in a copy of it."""

    eos_token: str | None = argument(None, "model", "The tokenizer's end-of-sequence token (None: its own).")
    pad_token: str | None = argument(None, "model", "The tokenizer's padding token (None: its own).")
    chat_template_path: str | None = argument(None, "data", "A .jinja or .j2 file with the chat template.")


@refuses_unknown
@dataclass(repr=False)
class SFTConfig(OfflineConfig):
    """Arguments of supervised training."""

    ranges: ClassVar[Mapping[str, Range]] = {"loss_type": one_of(SupervisedLossType)}

    learning_rate: float = argument(2e-5, "training", "The optimizer's learning rate.")
    dataset_text_field: str = argument("text", "data", "Column of plain text rows.")
    max_length: int | None = argument(
        1024, "data", "Most tokens of a row; longer ones are cut at the end (None: no limit)."
    )
    completion_only_loss: bool | None = argument(
        None, "data", "Loss on the completion alone (None: where there is a prompt)."
    )
    assistant_only_loss: bool = argument(False, "data", "Loss on the assistant's messages alone.")
    loss_type: str = argument(
        "nll", "algorithm", "nll (negative log-likelihood), or dft (weighed by the token's probability)."
    )
    packing: bool = argument(
        False,
        "data",
        "Rows one after another without padding, as they are by default; True: an error where they cannot.",
    )
    packing_strategy: str = argument(
        "bfd", "data", "With packing: 'bfd', which cuts rows longer than max_length at their end."
    )
    eval_packing: bool | None = argument(None, "data", "Changes nothing: evaluation lays rows as training does.")


def use_one_device(args: TrainingArguments) -> None:
    """Train on the first of several devices that a process sees, and say so: transformers would cut a padded batch over them."""
    if args.n_gpu > 1:
        logger.warning(
            "One process sees %d devices and trains on the first: start one for each with --accelerate_config ddp (or fsdp2), "
            "`accelerate launch` or torchrun, or set CUDA_VISIBLE_DEVICES.",
            args.n_gpu,
        )
        args._n_gpu = 1
