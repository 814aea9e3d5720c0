"""Arguments of every trainer, and the values that transformers' arguments may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from lowpeak.arguments.declare import (
    FINITE,
    MAPPING,
    NOT_NEGATIVE,
    Check,
    EffectCondition,
    Hardware,
    RunFacts,
    argument,
    at_least,
    data_argument,
    evaluation_argument,
    logging_argument,
    make_settings,
    memory_argument,
    model_argument,
    never,
    require,
    training_argument,
)
from lowpeak.arguments.inherited import ACT_IF, INHERITED_CHECKS, NEVER_ACT, idle_of_accelerate
from lowpeak.arguments.storage import StorageFormat, dtype_argument, resolve_adapter_storage, resolve_storage
from lowpeak.arguments.text import parse_bytes
from lowpeak.arguments.validation import check_values, reset_idle_arguments


def padding_multiple(value: Any) -> int | None:
    """Return the multiple that rows are padded to: 1 for "auto" and None, as in TRL; None for invalid values."""
    text = str(value).lower()
    if text in ("auto", "none", "null"):
        return 1
    return int(text) if text.isdigit() and int(text) >= 1 else None


def parse_budget(value: Any) -> float | str | None:
    """Return a memory budget: "auto", a number up to 1 (a fraction), or more (bytes); None for an invalid value."""
    text = str(value).strip()
    if text == "auto":
        return text
    try:
        number = float(text)
    except ValueError:
        return parse_bytes(text) or None
    if 0 < number <= 1:
        return number
    return int(number) if 1 < number < float("inf") and number.is_integer() else None


HAS_DEVICE_MEMORY = EffectCondition(
    lambda args, facts: facts.has_device_memory is not False, "the device uses host memory; remove it"
)

_ON_CUDA = EffectCondition(lambda args, facts: facts.is_cuda is not False, "cuDNN is for NVIDIA GPUs; remove it")
_NO_COLOCATED_VLLM = EffectCondition(
    lambda args, facts: not getattr(args, "use_vllm", False) or args.vllm_mode != "colocate",
    "a vLLM in this process turns it off; remove it, or set vllm_mode='server'",
)
# Without eval_steps, transformers evaluates every logging_steps.
_HAS_STEPS = EffectCondition(
    lambda args, facts: (
        args.logging_strategy == "steps" or (args.eval_strategy == "steps" and args.eval_steps == args.logging_steps)
    ),
    "logging_strategy is not 'steps'; set it or remove this",
)


@dataclass(repr=False)
class CommonArguments:
    """Arguments of every trainer, and transformers' arguments with another default.

    `bf16` None is True if the GPU supports bf16, else False. Activation checkpointing is on by default.
    """

    never_act: ClassVar[Mapping[str, EffectCondition]] = {**NEVER_ACT, **ACT_IF}
    inherited_checks: ClassVar[Mapping[str, Check]] = INHERITED_CHECKS

    learning_rate: float = training_argument(
        1e-6,
        "The optimizer's learning rate.",
        FINITE,
        EffectCondition(
            lambda args, facts: facts.passed_optimizer is None, "the optimizer that was passed has its own; remove it"
        ),
    )
    logging_steps: float = logging_argument(
        10, "Steps between logs (below 1: as a fraction of all steps).", acts_if=_HAS_STEPS
    )
    bf16: bool | None = training_argument(None, "Compute in bf16 (None: if the GPU supports it).")
    gradient_checkpointing: bool | None = memory_argument(
        None, "Recompute activations in the backward pass (None: True); newer name: activation_checkpointing."
    )
    remove_unused_columns: bool = data_argument(
        False,
        "Always False: rows keep all of their columns.",
        acts_if=never("rows keep all of their columns; remove it"),
    )
    per_device_eval_batch_size: int | None = evaluation_argument(
        None, "Completions generated together in evaluation (None: as many as fit in the KV cache).", at_least(1)
    )
    resume_from_checkpoint: Annotated[str | None, bool] = logging_argument(
        None,
        "What to resume from: auto (output_dir's last undamaged checkpoint, else a new run), true (its last one), or a folder.",
    )
    strict_arguments: bool = training_argument(
        False, "Raise an error for arguments without effect in the run (False: log a warning)."
    )
    activation_offloading: bool = memory_argument(
        False,
        "Keep saved activations in host memory until the backward pass uses them (GPUs).",
        acts_if=HAS_DEVICE_MEMORY,
    )
    model_init_kwargs: dict[str, Any] | str | None = model_argument(
        None,
        "Keyword arguments of from_pretrained, if the model is a name or a path (JSON on the command line).",
        MAPPING,
    )
    trust_remote_code: bool = model_argument(False, "Allow code from the model's repository to run.")
    disable_dropout: bool = model_argument(
        True, "Set the model's dropout to 0, and route without noise; adapters keep lora_dropout."
    )
    cast_lm_head_to_fp32: bool = model_argument(
        False,
        "Compute the LM head's matrix product in fp32.",
        acts_if=EffectCondition(lambda args, facts: not facts.in_fp32, "the run already computes in fp32; remove it"),
    )
    dataset_num_proc: int | None = data_argument(None, "No effect.", acts_if=never("rows are tokenised on demand"))
    chat_template_kwargs: dict[str, Any] | str | None = data_argument(
        None, "Keyword arguments of the chat template (JSON).", MAPPING
    )
    shuffle_dataset: bool = data_argument(True, "Shuffle the rows, anew in each epoch.")
    micro_batch_tokens: int | None = memory_argument(
        None, "Tokens of a micro-batch, padding included (None: set from free memory).", at_least(2, "tokens")
    )
    logprob_chunk_size: int | None = memory_argument(
        None, "Tokens whose logits are in memory at a time (None: set from free memory).", at_least(1, "token")
    )
    pad_to_multiple_of: int | str | None = memory_argument(
        "auto",
        "Round a micro-batch's padded length up to a multiple of this (auto, None: no rounding).",
        Check(
            lambda x: (padding_multiple(x) or 0) in range(1, 2**20),
            "must be an integer from 1 to 2**20 - 1, 'auto', or None",
        ),
    )
    padding_free: bool | None = memory_argument(
        None, "Concatenate the sequences of a micro-batch without padding (None: if the model's attention supports it)."
    )
    cudnn_attention: bool = memory_argument(
        False,
        "Let torch use cuDNN's attention on GPUs. It builds a plan for each new shape, which costs time and host memory.",
        acts_if=(_ON_CUDA, _NO_COLOCATED_VLLM),
    )
    router_aux_loss_coef: float | None = argument(
        None,
        "Weight of the load-balancing loss of a mixture of experts (None: from the model config; 0: off).",
        NOT_NEGATIVE,
    )
    log_entropy: bool = logging_argument(True, "Compute and log the policy's entropy.")
    log_all: bool = logging_argument(
        False, "Print every metric of a log (False: at most eight numbers; the journal and report_to get all)."
    )
    plan_memory: bool | None = memory_argument(
        None,
        "Plan the memory of each phase in another process while the first steps train, and write it into the journal beside the "
        "measured peaks (None: on GPUs, and with memory_budget, for which the plan is made at the start).",
    )
    memory_budget: float | str | None = memory_argument(
        None,
        "Memory of a device that each rank may take: 20GiB, a number of bytes, a fraction of the device's memory such as 0.9, or "
        "auto, all that is free; sizes that are not set follow from a plan (None: no plan, they are shares of free memory).",
        Check(
            lambda x: x is None or parse_budget(x) is not None,
            "must be a number of bytes, a size such as '20GiB', a fraction above 0 and up to 1, or 'auto'",
        ),
    )
    weight_bits: int | None = memory_argument(
        None,
        "Bits of a trained weight: 32, 24 or 16 (rounded stochastically), of which the model runs on the first 16, as bf16 (None: "
        "32 with dtype bfloat16, else fp32 weights).",
        Check(lambda x: x in (None, 16, 24, 32), "must be 16, 24, 32 or None"),
    )
    state_bits: int | None = memory_argument(
        None,
        "Bits of each of AdamW's two optimizer states, 8 or 32 (None: 8 with bf16 weights, else 32).",
        Check(lambda x: x in (None, 8, 32), "must be 8, 32 or None"),
    )
    gradient_bits: int | None = memory_argument(
        None,
        "Bits of a gradient that is summed over micro-batches, 16 (bf16) or 32 (None: 16 with bf16 weights, but 32 with "
        "offload_optimizer; else 32).",
        Check(lambda x: x in (None, 16, 32), "must be 16, 32 or None"),
    )
    offload_optimizer: bool = memory_argument(
        False,
        "Keep gradient sums, optimizer states and low bits in host memory: gradients leave the device as they are formed, and "
        "states visit it piece by piece in the optimizer step (GPUs).",
        acts_if=HAS_DEVICE_MEMORY,
    )
    shard_optimizer_states: bool = memory_argument(
        False,
        "Under DDP, store on each rank the optimizer states and low bits of its share of the rows alone (ZeRO-1).",
        acts_if=EffectCondition(
            lambda args, facts: facts.replicated is not False, "no two ranks have the same parameters; remove it"
        ),
    )


@dataclass(frozen=True)
class ModelSettings:
    """Settings of loading models, and of changes in a loaded model.

    `model_init_kwargs` and `trust_remote_code` act on models that are given by name or path. `storage` is the format of trained
    weights and optimizer states, `adapter_storage` the one if all trained weights are an adapter's, which are fp32 whatever
    `weight_bits`; None: an optimizer that the user chose stores them, on fp32 weights or, if the user asked for
    them, on bf16 weights (`keeps_bf16`).
    """

    model_init_kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may have an access token
    trust_remote_code: bool = False
    disable_dropout: bool = False
    cast_lm_head_to_fp32: bool = False
    storage: StorageFormat | None = None
    adapter_storage: StorageFormat | None = None
    weight_bits: int | None = None
    state_bits: int | None = None
    gradient_bits: int | None = None
    keeps_bf16: bool = False

    @property
    def trains_bf16(self) -> bool:
        """Whether the model is trained on bf16 weights."""
        return self.keeps_bf16 or (self.storage is not None and self.storage.weight_bits is not None)

    def with_users_optimizer(self) -> ModelSettings:
        """Return the settings for a user's optimizer, which stores states and rounds weights itself."""
        return replace(self, storage=None, adapter_storage=None, keeps_bf16=self.trains_bf16)

    def of_base(self) -> ModelSettings:
        """Return the settings for a frozen base under an adapter: `weight_bits` leaves it in the checkpoint's dtype."""
        return replace(self, model_init_kwargs={"dtype": "auto", **self.model_init_kwargs})

    @property
    def storage_name(self) -> str:
        """The format of trained weights and optimizer states, in words; a resumed run is told of a change."""
        own = f"weights in {'bf16' if self.keeps_bf16 else 'fp32'}, optimizer states as optim stores them"
        return own if self.storage is None else str(self.storage)

    @property
    def load_kwargs(self) -> dict[str, Any]:
        """The keyword arguments of `from_pretrained`; the dtype is the checkpoint's unless the user sets another."""
        dtype = "bfloat16" if self.trains_bf16 else "auto"
        return {"trust_remote_code": self.trust_remote_code, "dtype": dtype, **self.model_init_kwargs}


@dataclass(frozen=True)
class MemorySettings:
    """Sizes that bound memory, and the layout of sequences; None is `auto`, resolved once and then checkpointed.

    `memory_budget` is "auto", a fraction of a device's memory (up to 1) or bytes (above 1); None plans nothing at the start.
    `gather_budget` is the bytes of a sharded model that stay gathered during generation. `offload_frozen_models` keeps frozen
    models in host memory; `offload_during_rollout` moves training state there during a rollout. `packing`, like `padding_free`
    True, requires sequences without padding.
    """

    micro_batch_tokens: int | None = None
    logprob_chunk_size: int | None = None
    kv_cache_bytes: int | None = None
    pad_to_multiple_of: int = 1
    padding_free: bool | None = None
    packing: bool = False
    share_prompt: bool | None = None
    activation_offloading: bool = False
    gather_budget: int | None = None
    offload_frozen_models: bool = False
    offload_during_rollout: bool = False
    plan_memory: bool = False
    memory_budget: float | str | None = None


@dataclass(frozen=True)
class PassSettings:
    """Settings of forward passes: load-balancing loss, entropy, temperature of log-probs, and attention's kernels."""

    router_aux_loss_coef: float | None = None
    cudnn_attention: bool = False
    log_entropy: bool = True
    temperature: float = 1.0


@dataclass(frozen=True)
class RunSettings:
    """Settings of every run: models, memory, forward passes, and whether the console shows every metric."""

    model: ModelSettings
    memory: MemorySettings
    passes: PassSettings
    log_all: bool


def resolve_model(args: Any) -> ModelSettings:
    """Return the settings of loading models."""
    kwargs, storage = args.model_init_kwargs or {}, resolve_storage(args)
    keeps_bf16 = storage is None and dtype_argument(args) == "bfloat16" and not args.uses_deepspeed
    return make_settings(
        ModelSettings,
        args,
        model_init_kwargs=kwargs,
        storage=storage,
        adapter_storage=storage and resolve_adapter_storage(args),
        keeps_bf16=keeps_bf16,
    )


def resolve_passes(args: CommonArguments) -> PassSettings:
    """Return the settings of forward passes; supervised trainers have no temperature."""
    return make_settings(PassSettings, args)


def check_and_reset_arguments(args: Any, hardware: Hardware | None = None) -> Any:
    """Check the arguments of a trainer without rollouts; return them with defaults for those without effect on the hardware."""
    check_values(args)
    return reset_idle_arguments(args, run_facts(args, hardware))


def run_facts(args: Any, hardware: Hardware | None = None, **known: Any) -> RunFacts:
    """Return `known` facts with those of accelerator_config and of the hardware (None: this process's)."""
    hardware = hardware or args.hardware
    idle = idle_of_accelerate(args.accelerator_config)
    kwargs = args.accelerator_config.gradient_accumulation_kwargs
    require(
        not kwargs,
        f"accelerator_config has gradient_accumulation_kwargs={kwargs!r}, without effect: set gradient_accumulation_steps instead.",
    )
    return RunFacts(
        num_processes=hardware.num_processes,
        has_device_memory=hardware.device not in ("cpu", "mps"),
        is_cuda=hardware.device == "cuda",
        replicated=hardware.has_replicas,
        idle=idle,
        **known,
    )


def resolve_memory(args: Any, hardware: Hardware | None = None, **computed: Any) -> MemorySettings:
    """Return the memory settings; ArgumentError for layouts that contradict each other."""
    share_prompt = getattr(args, "share_prompt", False)  # supervised sequences share no prompts
    require(
        not (share_prompt and args.padding_free is False),
        "share_prompt=True contradicts padding_free=False: sequences that share a prompt have no padding; remove one of the two.",
    )
    budget = None if args.memory_budget is None else parse_budget(args.memory_budget)
    on_cuda = (hardware or args.hardware).device == "cuda"
    plans = on_cuda or budget is not None if args.plan_memory is None else args.plan_memory
    return make_settings(
        MemorySettings,
        args,
        pad_to_multiple_of=padding_multiple(args.pad_to_multiple_of) or 1,
        share_prompt=share_prompt,
        plan_memory=plans,
        memory_budget=budget,
        **computed,
    )
