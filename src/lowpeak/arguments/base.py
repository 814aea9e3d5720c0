"""The arguments of every trainer, and what of transformers' own arguments cannot act in a step of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lowpeak.arguments.declare import (
    FINITE,
    MAPPING,
    NOT_NEGATIVE,
    ActsWhen,
    Check,
    Facts,
    above_zero,
    argument,
    at_least,
    fill,
    in_data,
    in_evaluation,
    in_logging,
    in_memory,
    in_model,
    in_training,
    never,
    require,
)
from lowpeak.arguments.validation import acting, check_values

_NO_LOADER = "rows are drawn by a cursor, there is no data loader; remove it"
_EVALUATION = "an evaluation runs as training does, in micro-batches under a token budget; remove it"
_COMPILED = "the engine's growing caches would recompile at each token; remove it"
_NO_LABELS = "the loss is of the tokens' own log-probs, and no label is taken beside them; remove it"

# Without these what is learned would be another: they are errors.
_CHANGES_LEARNING: dict[str, str] = {
    "fp16": "log-ratios need bf16's range or fp32; set bf16=True or leave both out",
    "label_smoothing_factor": _NO_LABELS,
    "neftune_noise_alpha": "noise in the embeddings makes training log-probs differ from sampling ones; remove it",
    "use_liger_kernel": "it replaces the head that the log-prob core runs in; remove it, the core never forms the logits",
    "average_tokens_across_devices": "losses are always normalised by the whole step's counts; remove it",
    "ignore_data_skip": "a resumed run takes up the prompts where it left them; remove it",
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
    "auto_find_batch_size": "it would change the rollout's size; set micro_batch_tokens, which changes memory alone",
    "label_names": _NO_LABELS,
    "liger_kernel_config": "there is no liger kernel to configure; remove it",
    "length_column_name": "micro-batches are cut under a token budget (micro_batch_tokens); remove it",
    "torch_empty_cache_steps": "what a step frees the next one takes again, so the peak stays; lower micro_batch_tokens",
    "save_on_each_node": "ranks write parts of one checkpoint, into one folder that all hosts see; remove it",
    "use_cache": "generation always uses a cache and training never does; remove it",
    "include_num_input_tokens_seen": "num_tokens is always logged; remove it",
    "enable_jit_checkpoint": "send SIGINT: the step is finished and saved; remove it",
}
# transformers' arguments that have no place in a step of ours.
IDLE_INHERITED: dict[str, ActsWhen] = {
    **{name: never(because, raises=True) for name, because in _CHANGES_LEARNING.items()},
    **{name: never(because) for name, because in _CHANGES_NOTHING.items()},
    # transformers turns it off itself on CPUs, and a copy by dataclasses.replace() gives it on
    "dataloader_pin_memory": ActsWhen(lambda args, facts: args.use_cpu, _NO_LOADER),
}
# Fields of accelerator_config, and the value that asks for nothing; so does None.
_IDLE_OF_ACCELERATE = {
    "split_batches": False,
    "dispatch_batches": False,
    "even_batches": True,
    "use_seedable_sampler": True,
}

_FRACTION = Check(lambda x: 0 <= x < 1, "must be in [0, 1)")
INHERITED_CHECKS: dict[str, Check] = {
    "output_dir": Check(lambda x: str(x).strip() != "", "must name a folder"),
    "per_device_train_batch_size": at_least(1),
    "gradient_accumulation_steps": at_least(1),
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": _FRACTION,
    "adam_beta2": _FRACTION,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": Check(lambda x: x >= 0, "must be 0 (gradients are not clipped) or more"),
    "warmup_steps": NOT_NEGATIVE,
    "num_train_epochs": above_zero(),
    "max_steps": Check(lambda x: x == -1 or x >= 1, "must be at least 1 (or -1, to go by num_train_epochs)"),
    "eval_delay": NOT_NEGATIVE,
    "save_total_limit": Check(lambda x: x is None or x >= 0, "must be 0 (all are kept) or more, or None"),
    "ddp_timeout": above_zero("a number of seconds"),
    "ddp_bucket_cap_mb": above_zero("a number of MB"),
    "seed": Check(lambda x: 0 <= x < 2**32, "must be from 0 to 2**32 - 1"),
    "data_seed": Check(lambda x: x is None or 0 <= x < 2**32, "must be from 0 to 2**32 - 1, or None"),
}


def padding_multiple(value: Any) -> int | None:
    """Return the multiple that rows are padded to; 1 for "auto" and None, as in TRL on CPUs and GPUs; None for anything else."""
    text = str(value).lower()
    if text in ("auto", "none", "null"):
        return 1
    return int(text) if text.isdigit() and int(text) >= 1 else None


OWN_MEMORY = ActsWhen(lambda args, facts: facts.own_memory is not False, "the device's memory is the host's; remove it")


@dataclass(repr=False)
class CommonArguments:
    """What every lowpeak trainer takes, and where its defaults differ from transformers'.

    `bf16` None is True where the GPU computes in bf16, else False. Activation checkpointing is on unless turned off.
    """

    never_act: ClassVar[Mapping[str, ActsWhen]] = IDLE_INHERITED
    inherited_checks: ClassVar[Mapping[str, Check]] = INHERITED_CHECKS

    learning_rate: float = in_training(1e-6, "The optimizer's learning rate.", FINITE)
    logging_steps: float = in_logging(10, "Log every so many steps (below 1: share of all steps).")
    bf16: bool | None = in_training(None, "Compute in bf16 (None: where the GPU can).")
    gradient_checkpointing: bool | None = in_memory(
        None, "Recompute activations in the backward pass (None: yes); newer name: activation_checkpointing."
    )
    remove_unused_columns: bool = in_data(
        False,
        "Always False: rows are read with all of their columns.",
        acts=never("rows are read with all of their columns; remove it"),
    )
    per_device_eval_batch_size: int | None = in_evaluation(
        None, "Rows generated together in evaluation (None: as many as the KV cache budget allows).", at_least(1)
    )
    strict_arguments: bool = in_training(
        False, "An argument that has no effect in the run is an error (False: a warning names all of them)."
    )
    activation_offloading: bool = in_memory(
        False, "Keep what the backward pass needs in host memory until it is used (GPUs).", acts=OWN_MEMORY
    )
    model_init_kwargs: dict | str | None = in_model(
        None,
        "Keywords for from_pretrained when the model is given by name or path (JSON on the command line).",
        MAPPING,
    )
    trust_remote_code: bool = in_model(False, "Allow code from the model's repository to run.")
    disable_dropout: bool = in_model(False, "Set every dropout probability to 0.")
    cast_lm_head_to_fp32: bool = in_model(
        False,
        "Run the head's product in fp32.",
        acts=ActsWhen(lambda args, facts: not facts.in_fp32, "the run computes in fp32 already; remove it"),
    )
    chat_template_kwargs: dict | str | None = in_data(None, "Keywords for the chat template (JSON).", MAPPING)
    shuffle_dataset: bool = in_data(True, "Draw rows in a random order, new in each epoch.")
    micro_batch_tokens: int | None = in_memory(
        None, "Tokens, padding included, of one forward and backward (None: from free memory).", at_least(2, "tokens")
    )
    logprob_chunk_size: int | None = in_memory(
        None, "Tokens whose logits exist at a time (None: from free memory).", at_least(1, "token")
    )
    pad_to_multiple_of: int | str | None = in_memory(
        "auto",
        "Round a micro-batch's padded length up to a multiple of this (auto, None: no multiple).",
        Check(lambda x: padding_multiple(x) is not None, "must be a whole number of 1 or more, 'auto', or None"),
    )
    padding_free: bool | None = in_memory(
        None, "Rows one after another without padding (None: where the model's attention can)."
    )
    router_aux_loss_coef: float | None = argument(
        None, "Weight of a mixture of experts' load-balancing loss (None: the model config's; 0: off).", NOT_NEGATIVE
    )
    log_entropy: bool = in_logging(True, "Compute and log the policy's entropy.")


@dataclass(frozen=True)
class MemorySettings:
    """Sizes that bound memory, and how rows are laid out; None is `auto`, resolved once and then checkpointed.

    `gather_budget` is how many bytes of a sharded model stay gathered while it generates. `frozen_on_host` keeps frozen
    models in host memory; `idle_on_host` sends what generating does not need there while a rollout is made. `packing` asks
    for rows without padding, as `padding_free` True does.
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


def acting_common(args: Any) -> Any:
    """Return the checked arguments of a trainer without rollouts; those that have no effect have their defaults."""
    check_values(args)
    return acting(args, facts_of(args))


def facts_of(args: Any, **known: Any) -> Facts:
    """Return what is `known` before anything loads, with the device and what accelerate was configured with."""
    idle = {
        f"accelerator_config['{name}']={getattr(args.accelerator_config, name)!r}": _NO_LOADER
        for name, default in _IDLE_OF_ACCELERATE.items()
        if getattr(args.accelerator_config, name) not in (None, default)
    }
    kwargs = args.accelerator_config.gradient_accumulation_kwargs
    require(
        not kwargs,
        f"accelerator_config has gradient_accumulation_kwargs={kwargs!r}, which cannot act: set gradient_accumulation_steps in "
        "its place.",
    )
    return Facts(own_memory=args.device.type not in ("cpu", "mps"), idle=idle, **known)


def resolve_memory(args: Any, **computed: Any) -> MemorySettings:
    """Return sizes and layout as the arguments have them; ArgumentError for layouts that contradict each other."""
    share_prompt = getattr(args, "share_prompt", False)  # supervised rows have prompts of their own
    require(
        not (share_prompt and args.padding_free is False),
        "share_prompt=True with padding_free=False: rows that share a prompt stand in one row without padding; remove "
        "padding_free=False, or share_prompt=True.",
    )
    return fill(
        MemorySettings,
        args,
        pad_to_multiple_of=padding_multiple(args.pad_to_multiple_of) or 1,
        share_prompt=share_prompt,
        **computed,
    )
