"""transformers' arguments in a lowpeak run: their values, and which have an effect never or under a condition.

All others always act. A key of `NEVER_ACT` or `ACT_IF` may be missing in the installed transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from lowpeak.arguments.declare import NOT_NEGATIVE, Check, EffectCondition, above_zero, at_least, never, one_of

_LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]
_FRACTION = Check(lambda x: 0 <= x < 1, "must be in [0, 1)")
# Read by torch.utils.checkpoint, the last two by transformers.
_CHECKPOINT_NAMES = (
    *("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"),
    *("every_n_layers", "offload"),
)
_CHECKPOINT_KWARGS = Check(
    lambda x: x is None or isinstance(x, str) or (isinstance(x, Mapping) and x.keys() <= set(_CHECKPOINT_NAMES)),
    f"must be a mapping, which may have {', '.join(_CHECKPOINT_NAMES)}, and no other name",
)
INHERITED_CHECKS: dict[str, Check] = {
    "output_dir": Check(lambda x: str(x).strip() != "", "must be the path of a folder"),
    "per_device_train_batch_size": at_least(1),
    "gradient_accumulation_steps": at_least(1),
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": _FRACTION,
    "adam_beta2": _FRACTION,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": Check(lambda x: x >= 0, "must be 0 (no clipping) or more"),
    "optim_args": Check(
        lambda x: x is None or (isinstance(x, str) and all(pair.count("=") == 1 for pair in x.split(","))),
        "must be pairs such as 'momentum=0.9,nesterov=true', or None",
    ),
    "warmup_steps": NOT_NEGATIVE,
    "num_train_epochs": above_zero(),
    "max_steps": Check(lambda x: x == -1 or x >= 1, "must be at least 1 (or -1, to use num_train_epochs)"),
    "eval_delay": NOT_NEGATIVE,
    "save_total_limit": Check(lambda x: x is None or x >= 0, "must be 0 (keep all) or more, or None"),
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), _CHECKPOINT_KWARGS),
    "ddp_timeout": above_zero("a number of seconds"),
    "ddp_bucket_cap_mb": above_zero("a number of MB"),
    "log_level": one_of(_LogLevel),
    "log_level_replica": one_of(_LogLevel),
    "seed": Check(lambda x: 0 <= x < 2**32, "must be from 0 to 2**32 - 1"),
    "data_seed": Check(lambda x: x is None or 0 <= x < 2**32, "must be from 0 to 2**32 - 1, or None"),
}

_NO_LOADER = "a cursor draws the rows, there is no data loader; remove it"
_EVALUATION = "evaluation runs in micro-batches under a token budget, as training does; remove it"
_COMPILED = "batches differ in size, and each new size would recompile the model; remove it"
_NO_DDP = "replicas average their gradients once, after a step's last backward, without torch's DDP; remove it"
_NO_LABELS = "the loss uses the tokens' log-probs, not labels; remove it"

# Ignoring these would change what is learned, so they are errors.
_CHANGES_LEARNING: dict[str, str] = {
    "fp16": "its range is too narrow for log-probs and their gradients; set bf16=True, or remove it",
    "label_smoothing_factor": _NO_LABELS,
    "neftune_noise_alpha": "noise in the embeddings makes training log-probs differ from sampling log-probs; remove it",
    "average_tokens_across_devices": "losses are always normalised by the counts of the whole step; remove it",
    "ignore_data_skip": "a resumed run always continues at its position in the data; remove it",
    "train_sampling_strategy": "a cursor draws the rows, in order or shuffled; set shuffle_dataset in its place",
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
    "do_predict": "the trainer predicts nothing by itself; call predict() after training, and remove it",
    "label_names": _NO_LABELS,
    "use_liger_kernel": "the head already computes log-probs without full logits; remove it",
    "liger_kernel_config": "lowpeak uses no Liger kernel; remove it",
    "length_column_name": "micro-batches are formed under a token budget (micro_batch_tokens); remove it",
    "torch_empty_cache_steps": "the next step allocates the same memory again, so the peak stays; lower micro_batch_tokens",
    "save_on_each_node": "all ranks write one checkpoint to a folder that all hosts share; remove it",
    "use_cache": "generation always uses a KV cache and training never does; remove it",
    "include_num_input_tokens_seen": "num_tokens is always logged; remove it",
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb"), _NO_DDP),
    **dict.fromkeys(("ddp_broadcast_buffers", "ddp_static_graph"), _NO_DDP),
    "enable_jit_checkpoint": "SIGTERM and SIGINT always finish the step and save; remove it",
}
NEVER_ACT: dict[str, EffectCondition] = {
    **{name: never(reason, raises=True) for name, reason in _CHANGES_LEARNING.items()},
    **{name: never(reason) for name, reason in _CHANGES_NOTHING.items()},
}

# Optimizers, by the start of their names, that do not read an argument.
_NO_BETAS = ("adafactor", "sgd", "adagrad", "rmsprop", "galore", "grokadamw", "schedule_free_sgd")
_NO_EPSILON = (*_NO_BETAS, "lion", "paged_lion")
_NO_WEIGHT_DECAY = ("galore", "apollo")
_NO_OPTIM_ARGS = ("adafactor", "adamw_8bit", "adamw_bnb", "lion", "paged_adamw", "paged_lion")
_PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")
_TARGETS_MODULES = ("galore", "apollo")
# Trackers that do not read run_name.
_NAME_NO_RUNS = {"azure_ml", "clearml", "codecarbon", "dvclive", "flyte", "kubeflow", "neptune", "tensorboard"}


def _if(
    holds: Callable[[Any], Any], reason: str, *, raises: bool = False, keeps_value: bool = False
) -> EffectCondition:
    return EffectCondition(lambda args, facts: bool(holds(args)), reason, raises, keeps_value=keeps_value)


_MAKES_OPTIMIZER = EffectCondition(
    lambda args, facts: facts.passed_optimizer is None, "an optimizer was passed to the trainer; remove one of the two"
)
_MAKES_SCHEDULE = EffectCondition(
    lambda args, facts: not facts.passed_schedule, "a schedule was passed to the trainer; remove one of the two"
)


def _optimizer(holds: Callable[[Any], bool]) -> EffectCondition:
    """Return the condition of an argument that some optimizers of `optim` read."""
    return EffectCondition(
        lambda args, facts: _MAKES_OPTIMIZER.holds(args, facts) and holds(args),
        "the optimizer in use does not read it; remove it",
    )


def _schedule(holds: Callable[[Any], bool]) -> EffectCondition:
    """Return the condition of an argument that some schedules of `lr_scheduler_type` read."""
    return EffectCondition(
        lambda args, facts: _MAKES_SCHEDULE.holds(args, facts) and holds(args),
        "the schedule in use does not read it; remove it",
    )


def _evaluates(args: Any) -> bool:
    return bool(args.eval_strategy != "no")


def _warms_up(args: Any) -> bool:
    constant = args.lr_scheduler_type in ("constant", "reduce_lr_on_plateau", "greedy")
    return not constant or args.optim in ("schedule_free_adamw", "schedule_free_sgd")


_EVALUATING = _if(_evaluates, "eval_strategy is 'no', so nothing is evaluated during training; set it, or remove this")
_UPLOADING = "push_to_hub is off, so the run uploads nothing; set push_to_hub=True or remove it"
_ON_HUB = _if(lambda args: args.push_to_hub, _UPLOADING, keeps_value=True)
_TRACKIO = _if(
    lambda args: "trackio" in args.report_to, "report_to has no trackio; add it or remove this", keeps_value=True
)
_SEVERAL_PROCESSES = EffectCondition(
    lambda args, facts: facts.num_processes is None or facts.num_processes > 1, "the run has one process; remove it"
)
_CHECKPOINTED = _if(
    lambda args: args.checkpoints_activations, "activation checkpointing is off; turn it on or remove it"
)

ACT_IF: dict[str, EffectCondition] = {
    # On CPUs transformers sets it to False itself, so a copy by dataclasses.replace() passes it explicitly.
    "dataloader_pin_memory": _if(lambda args: args.use_cpu, _NO_LOADER),
    "data_seed": _if(lambda args: args.shuffle_dataset, "shuffle_dataset is off, so the rows are in order; remove it"),
    "num_train_epochs": _if(
        lambda args: args.max_steps <= 0, "max_steps sets the length of the run; remove one of the two"
    ),
    "do_eval": _if(lambda args: _evaluates(args) or args.eval_on_start, _EVALUATING.reason),
    "eval_steps": _if(
        lambda args: args.eval_strategy == "steps", "eval_strategy is not 'steps'; set it or remove this"
    ),
    **dict.fromkeys(("eval_delay", "load_best_model_at_end", "metric_for_best_model"), _EVALUATING),
    "greater_is_better": _if(
        lambda args: args.metric_for_best_model is not None and _evaluates(args),
        "no evaluation compares a metric; set metric_for_best_model and eval_strategy, or remove it",
    ),
    "resume_from_checkpoint": _if(
        lambda args: not (args.save_only_model and args.resume_from_checkpoint == "auto"),
        "save_only_model=True saves nothing that a run could resume from; remove one of them",
        raises=True,
    ),
    "save_strategy": _if(
        lambda args: args.save_strategy != "best" or _evaluates(args),
        "eval_strategy is 'no', so no checkpoint would be the best and none would be saved; set eval_strategy, or save_strategy to "
        "'steps'",
        raises=True,
    ),
    "save_steps": _if(
        lambda args: args.save_strategy == "steps", "save_strategy is not 'steps'; set it or remove this"
    ),
    **dict.fromkeys(("hub_strategy", "hub_always_push"), _ON_HUB),
    **dict.fromkeys(("hub_model_id", "hub_token", "hub_revision"), _ON_HUB),
    "hub_private_repo": _if(lambda args: args.push_to_hub or "trackio" in args.report_to, _UPLOADING, keeps_value=True),
    **dict.fromkeys(("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _TRACKIO),
    "run_name": _if(
        lambda args: any(str(each) not in _NAME_NO_RUNS and each is not None for each in args.report_to),
        "report_to has no tracker that reads it; add one, such as wandb, or remove it",
        keeps_value=True,
    ),
    "debug": _if(
        lambda args: not args.debug or "underflow_overflow" in args.debug, "lowpeak does not run on TPUs; remove it"
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _optimizer(lambda args: not args.optim.startswith(_NO_BETAS))),
    "adam_epsilon": _optimizer(lambda args: not args.optim.startswith(_NO_EPSILON)),
    "optim": _MAKES_OPTIMIZER,
    "weight_decay": EffectCondition(
        lambda args, facts: facts.passed_optimizer != "instance" and not args.optim.startswith(_NO_WEIGHT_DECAY),
        "the optimizer in use does not read it; remove it",
    ),
    "optim_args": _optimizer(lambda args: not args.optim.startswith(_NO_OPTIM_ARGS) and args.optim not in _PLAIN_ADAMW),
    "optim_target_modules": _optimizer(lambda args: args.optim.startswith(_TARGETS_MODULES)),
    "lr_scheduler_type": _MAKES_SCHEDULE,
    "lr_scheduler_kwargs": _schedule(lambda args: args.lr_scheduler_type not in ("constant", "constant_with_warmup")),
    "warmup_steps": _schedule(_warms_up),
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), _CHECKPOINTED),
    "fsdp_config": _if(lambda args: args.fsdp, "fsdp is not set; set fsdp=True or remove it"),
    **dict.fromkeys(("ddp_backend", "ddp_timeout", "log_level_replica", "log_on_each_node"), _SEVERAL_PROCESSES),
}
# Fields of accelerator_config without effect, with their defaults; None is also ignored.
_IDLE_OF_ACCELERATE = {
    "split_batches": False,
    "dispatch_batches": False,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}


def idle_of_accelerate(accelerator_config: Any) -> dict[str, str]:
    """Return the fields of accelerator_config without effect, as shown to the user, with the reason."""
    return {
        f"accelerator_config['{name}']={getattr(accelerator_config, name)!r}": _NO_LOADER
        for name, default in _IDLE_OF_ACCELERATE.items()
        if getattr(accelerator_config, name) not in (None, default)
    }
