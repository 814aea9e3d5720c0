"""Arguments of every trainer, and transformers' arguments that have no effect in lowpeak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowpeak.arguments.declare import (
    FINITE,
    MAPPING,
    NOT_NEGATIVE,
    Check,
    EffectCondition,
    RunFacts,
    above_zero,
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
from lowpeak.arguments.validation import check_values, reset_idle_arguments

_NO_LOADER = "a cursor draws the rows, there is no data loader; remove it"
_EVALUATION = "evaluation runs in micro-batches under a token budget, as training does; remove it"
_COMPILED = "the engine's growing KV caches would recompile at each token; remove it"
_NO_LABELS = "the loss uses the tokens' log-probs, not labels; remove it"

# Ignoring these would change what is learned, so they are errors.
_CHANGES_LEARNING: dict[str, str] = {
    "fp16": "log-ratios need fp32 or bf16's range; set bf16=True or remove both",
    "label_smoothing_factor": _NO_LABELS,
    "neftune_noise_alpha": "noise in the embeddings makes training log-probs differ from sampling log-probs; remove it",
    "use_liger_kernel": "it replaces the LM head, which already computes log-probs without full logits; remove it",
    "average_tokens_across_devices": "losses are always normalised by the counts of the whole step; remove it",
    "ignore_data_skip": "a resumed run always continues at its position in the data; remove it",
    "train_sampling_strategy": "use shuffle_dataset; remove it",
}
_CHANGES_NOTHING: dict[str, str] = {
    **dict.fromkeys(
        ("fp16_full_eval", "bf16_full_eval", "prediction_loss_only", "eval_do_concat_batches"), _EVALUATION
    ),
    **dict.fromkeys(("include_for_metrics", "eval_accumulation_steps", "eval_use_gather_object"), _EVALUATION),
    "batch_eval_metrics": _EVALUATION,
    **dict.fromkeys(("dataloader_drop_last", "dataloader_num_workers", "dataloader_persistent_workers"), _NO_LOADER),
    **dict.fromkeys(("dataloader_prefetch_factor", "dataloader_multiprocessing_context"), _NO_LOADER),
    "dataloader_in_order": _NO_LOADER,
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILED),
    "auto_find_batch_size": "it would change the rollout's size; set micro_batch_tokens, which changes only memory",
    "label_names": _NO_LABELS,
    "liger_kernel_config": "lowpeak uses no Liger kernel; remove it",
    "length_column_name": "micro-batches are formed under a token budget (micro_batch_tokens); remove it",
    "torch_empty_cache_steps": "the next step allocates the same memory again, so the peak stays; lower micro_batch_tokens",
    "save_on_each_node": "all ranks write one checkpoint to a folder that all hosts share; remove it",
    "use_cache": "generation always uses a KV cache and training never does; remove it",
    "include_num_input_tokens_seen": "num_tokens is always logged; remove it",
    "enable_jit_checkpoint": "send SIGINT to finish the step and save; remove it",
}
# transformers' arguments that have no effect in lowpeak.
IDLE_INHERITED: dict[str, EffectCondition] = {
    **{name: never(because, raises=True) for name, because in _CHANGES_LEARNING.items()},
    **{name: never(because) for name, because in _CHANGES_NOTHING.items()},
    # On CPUs transformers sets it to False itself, so a copy by dataclasses.replace() passes it explicitly.
    "dataloader_pin_memory": EffectCondition(lambda args, facts: args.use_cpu, _NO_LOADER),
}
# Fields of accelerator_config without effect, with their defaults; None is also ignored.
_IDLE_OF_ACCELERATE = {
    "split_batches": False,
    "dispatch_batches": False,
    "even_batches": True,
    "use_seedable_sampler": True,
}

_FRACTION = Check(lambda x: 0 <= x < 1, "must be in [0, 1)")
INHERITED_CHECKS: dict[str, Check] = {
    "output_dir": Check(lambda x: str(x).strip() != "", "must be the path of a folder"),
    "per_device_train_batch_size": at_least(1),
    "gradient_accumulation_steps": at_least(1),
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": _FRACTION,
    "adam_beta2": _FRACTION,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": Check(lambda x: x >= 0, "must be 0 (no clipping) or more"),
    "warmup_steps": NOT_NEGATIVE,
    "num_train_epochs": above_zero(),
    "max_steps": Check(lambda x: x == -1 or x >= 1, "must be at least 1 (or -1, to use num_train_epochs)"),
    "eval_delay": NOT_NEGATIVE,
    "save_total_limit": Check(lambda x: x is None or x >= 0, "must be 0 (keep all) or more, or None"),
    "ddp_timeout": above_zero("a number of seconds"),
    "ddp_bucket_cap_mb": above_zero("a number of MB"),
    "seed": Check(lambda x: 0 <= x < 2**32, "must be from 0 to 2**32 - 1"),
    "data_seed": Check(lambda x: x is None or 0 <= x < 2**32, "must be from 0 to 2**32 - 1, or None"),
}


def padding_multiple(value: Any) -> int | None:
    """Return the multiple that rows are padded to: 1 for "auto" and None, as in TRL; None for invalid values."""
    text = str(value).lower()
    if text in ("auto", "none", "null"):
        return 1
    return int(text) if text.isdigit() and int(text) >= 1 else None


HAS_DEVICE_MEMORY = EffectCondition(
    lambda args, facts: facts.has_device_memory is not False, "the device uses host memory; remove it"
)


@dataclass(repr=False)
class CommonArguments:
    """Arguments of every trainer, and transformers' arguments with another default.

    `bf16` None is True if the GPU supports bf16, else False. Activation checkpointing is on by default.
    """

    never_act: ClassVar[Mapping[str, EffectCondition]] = IDLE_INHERITED
    inherited_checks: ClassVar[Mapping[str, Check]] = INHERITED_CHECKS

    learning_rate: float = training_argument(1e-6, "The optimizer's learning rate.", FINITE)
    logging_steps: float = logging_argument(10, "Steps between logs (below 1: as a fraction of all steps).")
    bf16: bool | None = training_argument(None, "Compute in bf16 (None: if the GPU supports it).")
    gradient_checkpointing: bool | None = memory_argument(
        None, "Recompute activations in the backward pass (None: True); newer name: activation_checkpointing."
    )
    remove_unused_columns: bool = data_argument(
        False,
        "Always False: rows keep all of their columns.",
        acts=never("rows keep all of their columns; remove it"),
    )
    per_device_eval_batch_size: int | None = evaluation_argument(
        None, "Completions generated together in evaluation (None: as many as fit in the KV cache).", at_least(1)
    )
    strict_arguments: bool = training_argument(
        False, "Raise an error for arguments without effect in the run (False: log a warning)."
    )
    activation_offloading: bool = memory_argument(
        False, "Keep saved activations in host memory until the backward pass uses them (GPUs).", acts=HAS_DEVICE_MEMORY
    )
    model_init_kwargs: dict | str | None = model_argument(
        None,
        "Keyword arguments of from_pretrained, if the model is a name or a path (JSON on the command line).",
        MAPPING,
    )
    trust_remote_code: bool = model_argument(False, "Allow code from the model's repository to run.")
    disable_dropout: bool = model_argument(False, "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = model_argument(
        False,
        "Compute the LM head's matrix product in fp32.",
        acts=EffectCondition(lambda args, facts: not facts.in_fp32, "the run already computes in fp32; remove it"),
    )
    chat_template_kwargs: dict | str | None = data_argument(
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
        Check(lambda x: padding_multiple(x) is not None, "must be an integer of 1 or more, 'auto', or None"),
    )
    padding_free: bool | None = memory_argument(
        None, "Concatenate the sequences of a micro-batch without padding (None: if the model's attention supports it)."
    )
    router_aux_loss_coef: float | None = argument(
        None,
        "Weight of the load-balancing loss of a mixture of experts (None: from the model config; 0: off).",
        NOT_NEGATIVE,
    )
    log_entropy: bool = logging_argument(True, "Compute and log the policy's entropy.")


@dataclass(frozen=True)
class MemorySettings:
    """Sizes that bound memory, and the layout of sequences; None is `auto`, resolved once and then checkpointed.

    `gather_budget` is the bytes of a sharded model that stay gathered during generation. `frozen_on_host` keeps frozen models
    in host memory; `idle_on_host` offloads training state to host memory during a rollout. `packing`, like `padding_free` True,
    requires sequences without padding.
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
    frozen_on_host: bool = False
    idle_on_host: bool = False


@dataclass(frozen=True)
class PassSettings:
    """Settings of forward passes: the load-balancing loss, the entropy, and the temperature of log-probs."""

    router_aux_loss_coef: float | None = None
    log_entropy: bool = True
    temperature: float = 1.0


def resolve_passes(args: Any) -> PassSettings:
    """Return the settings of forward passes; supervised trainers have no temperature."""
    return make_settings(PassSettings, args)


def resolve_common(args: Any) -> Any:
    """Check the arguments of a trainer without rollouts; return them with defaults for those without effect."""
    check_values(args)
    return reset_idle_arguments(args, run_facts(args))


def run_facts(args: Any, **known: Any) -> RunFacts:
    """Return `known` facts with those of the device and of accelerator_config."""
    idle = {
        f"accelerator_config['{name}']={getattr(args.accelerator_config, name)!r}": _NO_LOADER
        for name, default in _IDLE_OF_ACCELERATE.items()
        if getattr(args.accelerator_config, name) not in (None, default)
    }
    kwargs = args.accelerator_config.gradient_accumulation_kwargs
    require(
        not kwargs,
        f"accelerator_config has gradient_accumulation_kwargs={kwargs!r}, which has no effect: set gradient_accumulation_steps "
        "instead.",
    )
    return RunFacts(has_device_memory=args.device.type not in ("cpu", "mps"), idle=idle, **known)


def resolve_memory(args: Any, **computed: Any) -> MemorySettings:
    """Return the memory settings; ArgumentError for layouts that contradict each other."""
    share_prompt = getattr(args, "share_prompt", False)  # supervised sequences share no prompts
    require(
        not (share_prompt and args.padding_free is False),
        "share_prompt=True contradicts padding_free=False: sequences that share a prompt are concatenated without padding; remove "
        "one of the two.",
    )
    return make_settings(
        MemorySettings,
        args,
        pad_to_multiple_of=padding_multiple(args.pad_to_multiple_of) or 1,
        share_prompt=share_prompt,
        **computed,
    )
