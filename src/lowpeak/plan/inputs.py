"""The parts of a run, made of its arguments and its model's config alone, for a rehearsal on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import lowpeak
from lowpeak.algorithms import Algorithm, Need
from lowpeak.arguments import (
    CLASS_PREFIXES,
    ColocateSettings,
    ModelParallel,
    StorageFormat,
    check_and_reset_arguments,
    refuse_teacher_under_tp,
    resolve_critic,
    resolve_dpo,
    resolve_kto,
    resolve_online,
    resolve_reward_model,
    resolve_supervised,
)
from lowpeak.attention import check_spans, install_attention, packing_unsupported_reason
from lowpeak.batching import TokenBudget
from lowpeak.errors import ArgumentError
from lowpeak.heads import load_balance_of, transformers_model
from lowpeak.models import (
    LOGPROB_HEAD,
    SCORE_HEAD,
    add_training_adapter,
    check_tensor_parallel,
    context_length,
    convert_trainable,
    refuse_adapter_under_tp,
    require_tensor_parallel,
)
from lowpeak.plan.derived_configs import shard_config, with_layers
from lowpeak.plan.fake_models import (
    adapts_quantized,
    convert_by_assignment,
    make_classifier,
    make_model,
    make_teacher,
    quantize,
    without_warnings,
    without_weights,
)
from lowpeak.plan.model_counts import ModelCounts
from lowpeak.plan.planned_batches import longest_record, step_batches
from lowpeak.plan.rehearsal import RehearsedRollout, RewardPass
from lowpeak.plan.request import PlanRequest
from lowpeak.records import MicroBatch, Prompt
from lowpeak.rewards import REWARD_BATCH_TOKENS
from lowpeak.rollout.native import sequence_bytes
from lowpeak.setup import attach_critic, describe_generation
from lowpeak.sizes import LayoutChoice, ModelShape, Sizes, choose_layout
from lowpeak.training import LogprobSettings

OFFLINE = {"sft": resolve_supervised, "reward": resolve_reward_model, "dpo": resolve_dpo, "kto": resolve_kto}
Split = Callable[[nn.Module], nn.Module]


class RunInputs:
    """Settings, models and micro-batches of a planned run, as its trainer would make them.

    `sizes` are the run's, with `auto` resolved from `free_bytes`.
    """

    def __init__(self, request: PlanRequest, free_bytes: Callable[[RunInputs], int] = lambda inputs: 0) -> None:
        self.args = request.acting_args
        self.settings, self.algorithm = _resolve(request, self.args)
        if request.kind in OFFLINE:
            # The run truncates or skips longer rows; a row has a token after its prompt.
            request = replace(request, prompt_tokens=min(request.prompt_tokens, self._longest_row(request) - 1))
        elif self.settings.vllm is not None and self.settings.vllm.may_use_nccl:
            request = replace(request, machine=replace(request.machine, sends_by_nccl=True))
        self.request = request
        self.config = shard_config(request.config, request.tensor_parallel)
        self._free_bytes = free_bytes
        self.counts: Any = None  # ModelCounts, once the model was counted
        self.streamed: dict[tuple[str, torch.dtype], int] = {}  # by phase and the checkpoint's dtype, once computed
        self._batches: dict[tuple[int, str, int, int], list[MicroBatch]] = {}

    def share_model_of(self, other: RunInputs) -> None:
        """Share models and micro-batches with a run that has the same ones, so that neither is made twice."""
        self.counts, self._plain_model = other.counts, other._plain_model
        self._packing_unsupported, self._batches = other._packing_unsupported, other._batches
        self.streamed = other.streamed

    def with_layers(self, layers: Sequence[int]) -> RunInputs:
        """Return the same run with some of its layers: its sizes stay, the KV cache holds as many sequences."""
        sizes, layout = self.sizes, self.layout_choice
        fewer = copy.copy(self)
        fewer.config = with_layers(self.config, layers)
        fewer.request = replace(self.request, config=with_layers(self.request.config, layers))
        fewer.__dict__.pop("_plain_model", None)
        cache = sizes.kv_cache_bytes * fewer.least_cache_bytes // self.least_cache_bytes if self.is_online else 0
        fewer.sizes = replace(sizes, kv_cache_bytes=cache)
        fewer.layout_choice = layout
        return fewer

    @property
    def compute(self) -> torch.dtype | None:
        return torch.bfloat16 if self.args.bf16 else None

    @property
    def storage(self) -> StorageFormat | None:
        model: Any = self.settings.model
        if not self.request.sharding.has_formats:
            return None
        return model.storage if self.request.peft_config is None else model.adapter_storage

    @property
    def checkpoint_dtype(self) -> torch.dtype:
        """Return the dtype in which the model is loaded."""
        model = self.settings.model
        wanted = (model if self.request.peft_config is None else model.of_base()).load_kwargs["dtype"]
        named = self.config.dtype or torch.float32 if wanted in ("auto", None) else wanted
        return getattr(torch, named) if isinstance(named, str) else named

    @property
    def has_graphs(self) -> bool:
        """Whether the native engine decodes by CUDA graphs."""
        request, is_on = self.request, self.is_online and self.settings.cuda_graphs
        is_whole = request.tensor_parallel == 1 and not request.sharding.sends_weights(request.world_size)
        return is_on and is_whole and request.quantized_bits is None

    @property
    def is_online(self) -> bool:
        return self.request.kind not in OFFLINE

    @property
    def generated_share(self) -> float:
        """The share of an online run's prompts whose completions the policy writes; the dataset has the others'."""
        teacher = self.request.teacher
        return 1.0 if teacher is None else 1.0 - teacher.dataset_share

    @property
    def generates_natively(self) -> bool:
        """Whether the native engine generates completions."""
        return self.is_online and self.settings.vllm is None and self.generated_share > 0

    @property
    def scores_mismatched(self) -> bool:
        """Whether policy and reference score mismatched pairs of a step's prompts and completions, as KTO does."""
        return self.request.kind == "kto" and bool(self.settings.objective.estimates_kl)

    @property
    def frees_reference(self) -> bool:
        """Whether the reference scores the data before the first step, and is freed then."""
        return bool(getattr(self.settings, "precompute_ref_log_probs", False))

    @property
    def scoring_needs(self) -> frozenset[Need]:
        """Return the scores of all passes: those that the algorithm needs in a step, and those of other passes."""
        mismatched: frozenset[Need] = frozenset({"old"} if self.scores_mismatched else ())
        return self.algorithm.needs | mismatched | ({"reference"} if self.frees_reference else set())

    @property
    def colocated(self) -> ColocateSettings | None:
        """The settings of a vLLM on the run's devices."""
        where = self.settings.vllm.where if self.is_online and self.settings.vllm is not None else None
        return where if isinstance(where, ColocateSettings) else None

    @property
    def has_separate_reference(self) -> bool:
        uses = "reference" in self.scoring_needs or self.algorithm.divergence is not None
        is_live = self.request.teacher is not None and self.request.teacher.kind == "live"
        return self.request.teacher_config is not None or (uses and self.request.peft_config is None and not is_live)

    @cached_property
    def reference_counts(self) -> ModelCounts:
        """Return the numbers of a separate reference, which are the policy's, or of the teacher."""
        return self.counts if self.request.teacher_config is None else ModelCounts.of(self.make_reference)

    # models, made under fake tensors

    @convert_by_assignment()
    @without_warnings()
    def make_policy(self, split: Split | None = None) -> nn.Module:
        """Return the policy as its trainer prepares it: adapter, critic, dtype, head, attention, checkpointing.

        Under tensor parallelism it is a smaller model, of one device's size; with `split`, the whole model, split.
        """
        model = self._load_policy(split)
        if self.request.kind == "ppo":
            critic = resolve_critic(self.args)
            classifier = make_classifier(self.config, self.checkpoint_dtype) if critic.critic == "model" else None
            attach_critic(model, model, classifier, replace(critic, value_model_path=None))
        convert_trainable(model, self.settings.model)
        if self.args.bf16 and not self.request.sharding.has_formats:
            model.bfloat16()  # DeepSpeed computes with bf16 weights
        head = SCORE_HEAD if self.request.kind == "reward" else LOGPROB_HEAD
        head.install(model, cast_head_to_fp32=self.settings.model.cast_lm_head_to_fp32)
        if self.layout_choice.layout != "padded":
            install_attention(model)
        if self.args.checkpoints_activations:
            kwargs = self.args.gradient_checkpointing_kwargs or {"use_reentrant": False}
            enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable(dict(kwargs))
        return model

    def _load_policy(self, split: Split | None) -> nn.Module:
        in_fp32 = split is not None and not self.settings.model.trains_bf16  # as `load_policy` loads a split one
        model = self._from_config(split, torch.float32 if in_fp32 else self.checkpoint_dtype)
        if self.request.quantized_bits is not None:
            quantize(model.requires_grad_(False), self.request.quantized_bits)
        adapter = self.request.peft_config
        return model if adapter is None else add_training_adapter(model, adapts_quantized(adapter))

    def _from_config(self, split: Split | None, dtype: torch.dtype) -> nn.Module:
        config = self.config if split is None else self.request.config
        if self.request.kind == "reward":
            model = make_classifier(config, dtype)
        else:
            model = make_model(AutoModelForCausalLM, copy.deepcopy(config), dtype)
        return model if split is None else split(model)

    def make_reference(self, split: Split | None = None) -> nn.Module:
        """Return a separate reference, or the teacher; `split` as for `make_policy`."""
        teacher = self.request.teacher_config
        own, loading = teacher is None, getattr(self.args, "teacher_model_init_kwargs", None) or {}
        model = self._from_config(split, self.checkpoint_dtype) if own else make_teacher(teacher, loading)
        LOGPROB_HEAD.install(model, cast_head_to_fp32=self.settings.model.cast_lm_head_to_fp32)
        if self.layout_choice.layout != "padded":
            install_attention(model)
        return model

    @property
    def rewards(self) -> list[RewardPass]:
        """Return the largest batch of each reward model; `dtype` is its checkpoint's."""
        length = longest_record(self)
        rows = max(1, min(self.sequences_of_rank, REWARD_BATCH_TOKENS // length))
        return [
            RewardPass(partial(make_classifier, config, config.dtype or torch.float32), (rows, length))
            for config in self.request.reward_configs
        ]

    # sizes and micro-batches

    @cached_property
    def _plain_model(self) -> Any:
        """Return the model without weights, for questions about its architecture."""
        auto = AutoModelForSequenceClassification if self.request.kind == "reward" else AutoModelForCausalLM
        model = without_weights(self.config, auto)
        if self.is_online:
            check_spans(model)
        return model

    def check_tensor_parallel(self, sizes: ModelParallel) -> None:
        """Raise ArgumentError if the model cannot be split over these sizes, MissingPackageError for old transformers."""
        require_tensor_parallel()
        refuse_adapter_under_tp(self.request.peft_config, self.request.quantized_bits is not None)
        refuse_teacher_under_tp(1 if self.request.teacher is None else sizes.tensor)
        whole = self.request.tensor_parallel == 1
        check_tensor_parallel(self._plain_model if whole else without_weights(self.request.config), sizes)

    @cached_property
    def layout_choice(self) -> LayoutChoice:
        return choose_layout(self.settings.memory, self._packing_unsupported)

    @cached_property
    def _packing_unsupported(self) -> str | None:
        return packing_unsupported_reason(self._plain_model)

    @property
    def generation(self) -> str:
        """Describe the generation path, as `describe_generation`; empty for an offline run."""
        return describe_generation(self._plain_model, self.settings.vllm) if self.is_online else ""

    @cached_property
    def sizes(self) -> Sizes:
        memory = self.settings.memory
        itemsize = 2 if self.args.bf16 else 4
        stream = max(itemsize, self.trained_dtype.itemsize if self.request.peft_config is None else 2)
        return Sizes.resolve(
            memory,
            ModelShape.of(self.config, itemsize, stream),
            max(0, self._free_bytes(self)),
            self.layout_choice,
            self.args.checkpoints_activations,
        )

    @property
    def trained_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.settings.model.trains_bf16 else torch.float32

    @property
    def budget(self) -> TokenBudget:
        return self.sizes.budget(self.settings.memory, 0, self.config)

    @property
    def logprobs(self) -> LogprobSettings:
        passes = self.settings.passes
        balance = load_balance_of(transformers_model(self._plain_model), passes.router_aux_loss_coef)
        chunk, cpu = self.sizes.logprob_chunk_size, torch.device("cpu")
        return LogprobSettings(passes.temperature, chunk, cpu, passes.log_entropy, load_balance=balance)

    @property
    def completion_tokens(self) -> int:
        """Return the tokens of a completion; of an offline run, those of a row after its prompt."""
        if self.is_online:
            return int(self.settings.sampling.max_new_tokens)
        return self._longest_row(self.request) - self.request.prompt_tokens

    def _longest_row(self, request: PlanRequest) -> int:
        model: Any = SimpleNamespace(config=request.config)
        context, length = context_length(model), int(self.settings.max_length or 1024)
        reserved = int(request.kind == "reward")  # a position for the end token
        return max(2, length if context is None else min(length, context - reserved))

    @property
    def longest_sequence(self) -> int:
        return int(self.request.prompt_tokens) + self.completion_tokens

    @property
    def token_sizes(self) -> list[int]:
        """Return the powers of two from the longest record to all tokens of a rank in a step."""
        rows = -(-self.rows_per_step // self.request.world_size)
        longest = longest_record(self)
        return [1 << power for power in range(31) if longest <= 1 << power <= 2 * rows * longest]

    @property
    def rows_per_step(self) -> int:
        """Return the sequences of a step over all ranks."""
        if self.is_online:
            return int(self.settings.rollout.rows_per_step)
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.request.world_size
        return int(rows) * self.group_size

    @property
    def group_size(self) -> int:
        """Return the sequences of a prompt."""
        if self.is_online:
            return int(self.settings.rollout.num_generations)
        return 2 if self.algorithm.unit == "pair" else 1

    @property
    def sequences_of_rank(self) -> int:
        """Return the sequences that one rank generates and rewards for a rollout."""
        return -(-self.settings.rollout.num_sequences // self.request.world_size) if self.is_online else 0

    def step_batches(self, tokens: int | None = None) -> list[MicroBatch]:
        """Return all micro-batches of rank 0 in a step of sequences of maximal length.

        `tokens` replaces the run's micro_batch_tokens.
        """
        ranks, rows = self.request.world_size, self.rows_per_step
        budget = replace(self.budget, max_tokens=tokens or self.sizes.micro_batch_tokens)
        key = (budget.max_tokens, budget.layout, ranks, rows)
        if key not in self._batches:
            self._batches[key] = step_batches(self, budget)
        return self._batches[key]

    def rollout(self, gather_budget: int) -> RehearsedRollout | None:
        """Return the rollout of rank 0's native engine; None if nothing is generated, and for vLLM."""
        if not self.generates_natively:
            return None
        given, least = self.settings.memory.kv_cache_bytes, self.least_cache_bytes
        if given is not None and given < least:
            raise ArgumentError(
                f"kv_cache_bytes={given} has no room for one sequence of {self.longest_sequence:,} tokens, which takes {least:,} "
                "bytes: raise it, or shorten completions."
            )
        generations = self.settings.sampling.num_generations
        num_prompts = max(1, -(-self.sequences_of_rank // generations))
        prompts = [Prompt(i, (1,) * self.request.prompt_tokens, "") for i in range(num_prompts)]
        cache_bytes = max(self.sizes.kv_cache_bytes, least)
        return RehearsedRollout(prompts, self.settings.sampling, cache_bytes, gather_budget, self.has_graphs)

    @property
    def least_cache_bytes(self) -> int:
        """Return the bytes that the engine asks for one sequence: keys and values in the weights' dtype."""
        dtype = torch.bfloat16 if self.storage is not None and self.settings.model.trains_bf16 else torch.float32
        return self.sequence_bytes(self.longest_sequence, dtype)

    def sequence_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of a sequence of so many tokens in a KV cache of this dtype."""
        return sequence_bytes(self._plain_model, num_tokens, dtype)


def _resolve(request: PlanRequest, args: Any) -> tuple[Any, Algorithm]:
    if request.kind not in CLASS_PREFIXES:
        raise ArgumentError(f"{request.kind!r} is not an algorithm; use one of {', '.join(CLASS_PREFIXES)}.")
    hardware, trainer = request.hardware, getattr(lowpeak, f"{CLASS_PREFIXES[request.kind]}Trainer")
    if request.kind in OFFLINE:
        settings = OFFLINE[request.kind](check_and_reset_arguments(args, hardware), hardware)
        return settings, trainer.make_algorithm(settings)
    known = request.has_tools, None, request.peft_config is not None
    online = resolve_online(args, request.world_size, request.num_rewards, hardware, 0, *known)
    return online, trainer.make_algorithm(args, online)
