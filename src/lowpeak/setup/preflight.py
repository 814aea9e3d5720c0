"""Checks before a model's weights are read, which may take long: data, adapters, and that all ranks have the same arguments."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from transformers import AutoModelForCausalLM
from transformers.integrations import get_available_reporting_integrations, get_reporting_integration_callbacks

from lowpeak.checkpoint import check_writable
from lowpeak.data import check_max_steps, check_prompt_columns, digest_row, fetch_rows, num_rows
from lowpeak.errors import ArgumentError, DataError, MissingPackageError
from lowpeak.models import add_adapter, auto_class, find_config, make_whole_models
from lowpeak.ranks import Ranks
from lowpeak.rewards import check_rewards

# Fields of a LoraConfig that decide whether it fits a model; others may need the model's weights.
_STRUCTURAL_FIELDS = (
    *("r", "lora_alpha", "lora_dropout", "task_type", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "bias"),
)


def check_data(
    train_dataset: Any, eval_dataset: Any, args: Any, columns: str, check_row: Callable[[Any, str], None]
) -> None:
    """Raise DataError or ArgumentError for missing data, and for a first row that `check_row` rejects."""
    if train_dataset is None:
        raise DataError(f"train_dataset is None: pass a dataset with {columns}.")
    check_max_steps(train_dataset, args.max_steps)
    if (eval_dataset is None or eval_dataset == {}) and (args.eval_strategy != "no" or args.eval_on_start):
        evaluates = args.eval_strategy != "no"
        cause = f"eval_strategy={str(args.eval_strategy.value)!r}" if evaluates else "eval_on_start=True"
        raise ArgumentError(f"{cause} has no data: pass eval_dataset (--eval_dataset or --eval_split), or remove it.")
    _check_first_row(train_dataset, "train_dataset", "row 0", check_row)
    several = eval_dataset if isinstance(eval_dataset, dict) else {None: eval_dataset}
    for key, dataset in several.items():
        name = "eval_dataset" if key is None else f"eval_dataset[{key!r}]"
        _check_first_row(dataset, name, f"{name}: row 0", check_row)


def _check_first_row(dataset: Any, name: str, where: str, check_row: Callable[[Any, str], None]) -> None:
    if dataset is not None and num_rows(dataset, name) is not None:
        check_row(fetch_rows(dataset, [0])[0], where)


def check_online_row(reward_funcs: Any, rollout_func: Any, has_tools: bool, row: Any, where: str) -> None:
    """Raise an error for a row without a prompt, or without the columns of a reward, unless a function may return them.

    With tools the prompt must be a list of messages.
    """
    check_prompt_columns(row, where)
    if has_tools and not isinstance(row.get("prompt"), list):
        raise DataError(
            f"{where} has no messages as its prompt, which tools need: [{{'role': 'user', 'content': ...}}]."
        )
    if rollout_func is None:
        check_rewards(reward_funcs, row, where)


def check_outputs(args: Any) -> None:
    """Raise an error for an unwritable folder (rank 0), an upload with the hub switched off, or an unknown tracker."""
    if args.process_index == 0:
        check_writable(Path(args.output_dir))
    try:
        get_reporting_integration_callbacks(args.report_to)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"report_to={args.report_to!r}: {error}") from error
    # transformers does not always list the last three if they are installed.
    known = (*get_available_reporting_integrations(), "azure_ml", "flyte", "kubeflow")
    for tracker in [name for name in args.report_to or () if name not in known]:
        raise MissingPackageError(
            f"report_to={tracker!r} needs {tracker}, which is not installed: run pip install {tracker}, or remove it."
        )
    if args.push_to_hub and is_offline_mode():
        raise ArgumentError(
            "push_to_hub=True has no effect: the hub is switched off (HF_HUB_OFFLINE); unset that variable, or set "
            "push_to_hub=False and upload output_dir later."
        )


def check_adapter(peft_config: Any, model: Any, auto: Any, args: Any) -> None:
    """Raise ArgumentError for LoRA that does not fit the model; one given by name is built without weights to check."""
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        raise ArgumentError(
            f"peft_config is {peft_config!r:.80} of type {type(peft_config).__name__}; pass a peft configuration, such as "
            "LoraConfig(...)."
        )
    if getattr(peft_config, "peft_type", None) != "LORA":
        return
    _check_adapter_numbers(peft_config)
    task = peft_config.task_type
    if auto is AutoModelForCausalLM and task not in (None, "CAUSAL_LM"):
        raise ArgumentError(
            f"peft_config has task_type={str(getattr(task, 'value', task))!r}, but the model is trained as CAUSAL_LM: set that, or "
            "leave it out."
        )
    if isinstance(model, str):
        _check_adapter_fits(peft_config, model, auto, args)


def _check_adapter_numbers(peft_config: Any) -> None:
    for name, fits, text in (
        ("r", lambda x: isinstance(x, int) and x >= 1, "an integer of at least 1"),
        ("lora_alpha", lambda x: 0 < x < math.inf, "a finite number above 0"),
        ("lora_dropout", lambda x: 0 <= x < 1, "in [0, 1)"),
    ):
        if not fits(getattr(peft_config, name)):
            raise ArgumentError(f"peft_config has {name}={getattr(peft_config, name)!r}, which must be {text}.")


def _check_adapter_fits(peft_config: Any, model: str, auto: Any, args: Any) -> None:
    """Add the adapter to a model on the meta device: peft raises if one of its names fits no layer."""
    if any(getattr(peft_config, name, None) for name in ("target_parameters", "trainable_token_indices")):
        return
    options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
    try:
        with torch.device("meta"), make_whole_models():
            config = find_config(model, options)
            bare = auto_class(auto, config).from_config(config, trust_remote_code=args.trust_remote_code)
    except Exception:
        return  # loading the model will raise with the reason
    add_adapter(
        bare,
        type(peft_config)(**{name: getattr(peft_config, name) for name in _STRUCTURAL_FIELDS}),
        low_cpu_mem_usage=True,
    )


def silence_nonzero_ranks(args: Any) -> None:
    """Log only errors on ranks where transformers does not log, or at the level of `log_level_replica`."""
    if args.should_log:
        return
    is_set = args.log_level_replica not in ("warning", "passive")  # warning is transformers' default
    logging.getLogger("lowpeak").setLevel(args.get_process_log_level() if is_set else logging.ERROR)


# Arguments that may differ between ranks: a rank's place, its output, and what only rank 0 uses.
_PER_RANK = frozenset(
    ("local_rank", "disable_tqdm", "report_to", "project", "resume_from_checkpoint", "num_completions_to_print")
)


def require_same_arguments(args: Any, ranks: Ranks) -> None:
    """Raise ArgumentError if an argument differs between ranks: another file on a host, a seed from the clock.

    Such ranks would wait for each other forever, or train silently on each other's numbers.
    """
    local = {f.name: repr(getattr(args, f.name, None)) for f in fields(args) if _must_agree(f.name, args)}
    local["output_dir"] = repr(os.path.abspath(args.output_dir))  # ranks write into one folder
    gathered = ranks.gather(local)
    for name in local:
        for rank, values in enumerate(gathered):
            if values.get(name) != gathered[0].get(name):
                raise ArgumentError(
                    f"{name} is {gathered[0].get(name)} on rank 0 and {values.get(name)} on rank {rank}: start all ranks "
                    "with the same arguments."
                )


def _must_agree(name: str, args: Any) -> bool:
    plain = isinstance(getattr(args, name, None), bool | int | float | str | None)
    return plain and name not in _PER_RANK and not name.startswith(("log", "hub_", "push_to_hub", "trackio", "run_"))


def require_same_data(datasets: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise DataError if a rank's data differ from rank 0's in length, columns or outer rows.

    A stream is compared by its columns, and each of several datasets separately.
    """
    local = {f"{name}, {trait}": value for name, data in datasets.items() for trait, value in _traits(data).items()}
    for rank, values in enumerate(gathered := ranks.gather(local)):
        for key, value in gathered[0].items():
            if values.get(key) != value:
                raise DataError(
                    f"{key.partition(',')[0]} has {value} on rank 0 and {values.get(key, 'none')} on rank {rank}: give all ranks "
                    "the same data."
                )


def _traits(data: Any) -> dict[str, str]:
    """Return traits that distinguish datasets without reading them completely."""
    if isinstance(data, Mapping):
        return {f"{name} {trait}": value for name, one in data.items() for trait, value in _traits(one).items()}
    if data is None or not hasattr(data, "__len__") or not len(data):
        return {"columns": _columns(getattr(data, "column_names", None))}
    ends = {"first": data[0], "last": data[len(data) - 1]}
    columns = getattr(data, "column_names", None) or list(ends["first"])
    rows = {name: f"a {name} row with SHA-256 {digest_row(row)}" for name, row in ends.items()}
    return {"length": f"{len(data)} rows", "columns": _columns(columns), **rows}


def _columns(names: Any) -> str:
    return f"the columns {', '.join(sorted(names))}" if names else "columns without names"
