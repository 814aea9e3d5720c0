"""Arguments that cannot act: those of transformers that have no place in a step of ours, and those a run leaves idle.

Each entry is a sentence with the remedy. What is listed here raises; nothing is ignored.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from lowpeak.config.rejected import TRL_DEFAULTS
from lowpeak.config.secrets import show
from lowpeak.errors import ArgumentError

_BATCHES = "micro-batches are cut under a token budget (micro_batch_tokens); remove it"
_NO_LOADER = "rows are drawn by a cursor, there is no data loader; remove it"
_NO_LABELS = "the loss is of the tokens' own log-probs, and no label is taken beside them; remove it"
_EVALUATION = "an evaluation runs as training does, in micro-batches under a token budget; remove it"

REFUSED_INHERITED: dict[str, str] = {
    "fp16": "log-ratios need bf16's range or fp32; set bf16=True or leave both out",
    "fp16_full_eval": _EVALUATION,
    "bf16_full_eval": _EVALUATION,
    "auto_find_batch_size": "it would change the rollout's size; set micro_batch_tokens, which changes memory alone",
    "label_smoothing_factor": _NO_LABELS,
    "label_names": _NO_LABELS,
    "prediction_loss_only": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "neftune_noise_alpha": "noise in the embeddings makes training log-probs differ from sampling ones; remove it",
    "use_liger_kernel": "it replaces the head that the log-prob core runs in; remove it, the core never forms the logits",
    "liger_kernel_config": "it replaces the head that the log-prob core runs in; remove it",
    "torch_compile": "the engine's growing caches would recompile at each token; remove it",
    "torch_compile_backend": "torch_compile is not taken; remove it",
    "torch_compile_mode": "torch_compile is not taken; remove it",
    "average_tokens_across_devices": "losses are always normalised by the whole step's counts; remove it",
    "ignore_data_skip": "a resumed run takes up the prompts where it left them; remove it",
    "train_sampling_strategy": "use shuffle_dataset; remove it",
    "length_column_name": _BATCHES,
    "dataloader_drop_last": _NO_LOADER,
    "dataloader_num_workers": _NO_LOADER,
    "dataloader_pin_memory": _NO_LOADER,
    "dataloader_persistent_workers": _NO_LOADER,
    "dataloader_prefetch_factor": _NO_LOADER,
    "dataloader_multiprocessing_context": _NO_LOADER,
    "dataloader_in_order": _NO_LOADER,
    "torch_empty_cache_steps": "what a step frees the next one takes again, so the peak stays; lower micro_batch_tokens",
    "save_on_each_node": "ranks write parts of one checkpoint, into one folder that all hosts see; remove it",
    "use_cache": "generation always uses a cache and training never does; remove it",
    "include_num_input_tokens_seen": "num_tokens is always logged; remove it",
    "enable_jit_checkpoint": "send SIGINT: the step is finished and saved; remove it",
}

# Fields of accelerator_config, the values that ask for nothing, and why others cannot act.
_REFUSED_OF_ACCELERATE: dict[str, tuple[tuple[Any, ...], str]] = {
    "split_batches": ((False,), _NO_LOADER),
    "dispatch_batches": ((None, False), _NO_LOADER),
    "even_batches": ((True,), _NO_LOADER),
    "use_seedable_sampler": ((True,), _NO_LOADER),
    "gradient_accumulation_kwargs": ((None, {}), "set gradient_accumulation_steps in its place"),
}


def default_of(args: Any, name: str) -> Any:
    """The default that an argument's own class declares."""
    for f in fields(args):
        if f.name == name:
            return f.default if f.default_factory is MISSING else f.default_factory()
    raise KeyError(name)


def said_as(args: Any, name: str) -> str:
    """The name by which the user said an argument: its own, or another library's for the same."""
    names: dict[str, str] = getattr(args, "said_as", {})
    return names.get(name, name)


def is_set(args: Any, name: str) -> bool:
    """Whether an argument differs from its class's default, and from TRL's."""
    default, value = default_of(args, name), getattr(args, name)
    return bool(value != default and value != TRL_DEFAULTS.get(name, default))


def refuse_inherited(args: Any) -> None:
    """ArgumentError for the first argument of transformers that is set and has no place in a step of ours."""
    given: frozenset[str] = getattr(args, "given", frozenset(f.name for f in fields(args)))
    for name, why in REFUSED_INHERITED.items():
        if name == "dataloader_pin_memory" and args.use_cpu:
            continue  # transformers turns it off itself there, and a copy by dataclasses.replace() gives it on
        if name in given and is_set(args, name):
            raise ArgumentError(f"{name}={getattr(args, name)!r} cannot act: {why}.")
    for name, (allowed, why) in _REFUSED_OF_ACCELERATE.items():
        value = getattr(args.accelerator_config, name)
        require(value in allowed, f"accelerator_config has {name}={value!r}, which cannot act: {why}.")


def require(condition: bool, message: str) -> None:
    """ArgumentError with `message` unless the condition holds."""
    if not condition:
        raise ArgumentError(message)


def refuse_idle(args: Any, names: tuple[str, ...], acts: bool, because: str) -> None:
    """ArgumentError when one of `names` is set although, in this run, it changes nothing."""
    if acts:
        return
    for name in names:
        if is_set(args, name):
            raise ArgumentError(f"{show(said_as(args, name), getattr(args, name))} has no effect: {because}.")
