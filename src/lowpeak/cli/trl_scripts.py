"""TRL's helpers for scripts: argument classes with TRL's names and defaults, their parser, datasets and adapters."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from datasets import DatasetDict
from transformers import BitsAndBytesConfig
from transformers.hf_argparser import HfArgumentParser

from lowpeak.arguments import REJECTED, check_names, drop_trl_defaults, load_yaml, redeclared
from lowpeak.arguments import data_argument as _data
from lowpeak.cli.arguments import DataArguments, ErrorParser, ModelArguments
from lowpeak.cli.dataset import hold_out, load_mixture
from lowpeak.cli.parser import json_or_path, set_environment
from lowpeak.cli.train import load_options, lora_config

logger = logging.getLogger(__name__)


@dataclass
class ScriptArguments:
    """The dataset of a script, and its splits."""

    dataset_name: str | None = _data(None, "dataset to train on: a hub name or a folder")
    dataset_config: str | None = redeclared(DataArguments, "dataset_config")
    dataset_train_split: str = _data("train", "split to train on")
    dataset_test_split: str = _data("test", "split to evaluate on")
    dataset_streaming: bool = _data(False, "read the dataset as a stream")

    ignore_bias_buffers: ClassVar[bool] = False  # TRL's DPO script reads it; the parser refuses it by its name


@dataclass
class DatasetMixtureConfig:
    """Datasets to concatenate: paths, JSON texts, mappings or objects with the fields of the command's `datasets`."""

    datasets: list[str] = field(default_factory=list, metadata={"help": "datasets to concatenate: paths or JSON"})
    streaming: bool = _data(False, "read the datasets as streams")
    test_split_size: float | None = redeclared(DataArguments, "test_split_size")


@dataclass
class ModelConfig(ModelArguments):
    """The model, its adapters, and the precision it is loaded in, with TRL's defaults."""

    model: str = field(default="", init=False)
    model_name_or_path: str | None = redeclared(ModelArguments, "model", None)
    model_revision: str | None = redeclared(ModelArguments, "model_revision", "main")
    dtype: str | None = redeclared(ModelArguments, "dtype", "float32")
    lora_dropout: float = redeclared(ModelArguments, "lora_dropout", 0.05)
    lora_task_type: str | None = redeclared(ModelArguments, "lora_task_type", "CAUSAL_LM")


class TrlParser(ErrorParser, HfArgumentParser):
    """HfArgumentParser whose defaults may come from the YAML file that `--config` names."""

    def parse_args_and_config(self, args: Any = None, *, fail_with_unknown_args: bool = True) -> tuple[Any, ...]:
        """Return one object per class, from the command line and from the file of `--config`, as TRL does."""
        words, settings = list(sys.argv[1:] if args is None else args), dict[str, Any]()
        if "--config" in words:
            index = words.index("--config")
            settings = load_yaml(*words[index + 1 : index + 2])
            del words[index : index + 2]
            set_environment(settings.pop("env", {}))
        from_file = self.set_defaults_with_config(**settings)
        *parsed, from_line = self.parse_args_into_dataclasses(words, return_remaining_strings=True)
        known = {action.dest for action in self._actions}
        rejected = dict(pair for each in self.dataclass_types for pair in getattr(each, "rejected", {}).items())
        unknown = [*from_line, *(from_file if fail_with_unknown_args else ())]
        check_names([word[2:].split("=")[0] for word in unknown if word[:2] == "--"], known, REJECTED | rejected)
        if from_file:
            logger.warning("The config file has names that are no argument of the script: %s.", " ".join(from_file))
        return tuple(parsed)

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Make the settings the defaults of this parser's arguments; return the others as words of a command line."""
        for action in self._actions:
            if action.dest in settings:
                value, action.required = settings.pop(action.dest), False
                # argparse converts a default that is text to one value, not to a list.
                action.default = [value] if action.nargs in ("+", "*") and isinstance(value, str) else value
        return [word for item in drop_trl_defaults(settings, ()).items() for word in (f"--{item[0]}", str(item[1]))]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Return the mixture with the split `train`, and `test` if rows are held out."""
    size, streaming = mixture_config.test_split_size, mixture_config.streaming
    entries = [json_or_path(each) if isinstance(each, str) else each for each in mixture_config.datasets]
    rows = load_mixture([each if isinstance(each, dict) else vars(each) for each in entries], streaming=streaming)
    if size is None:
        return DatasetDict({"train": rows})
    train, test = hold_out(rows, size, DataArguments(), seed=42)
    return DatasetDict({"train": train, "test": test})


def get_peft_config(model_args: ModelConfig) -> Any:
    """Return peft's config of the adapters; None without `use_peft`."""
    return lora_config(model_args, "grpo")


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return bitsandbytes' config; None for a model that is not quantized."""
    options = load_options(model_args).get("quantization_config", {})
    options.pop("quant_method", None)
    return BitsAndBytesConfig(**options) if options else None
