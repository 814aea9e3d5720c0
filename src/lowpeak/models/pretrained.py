"""Loading of models and tokenizers through transformers, with an error that names damaged or incomplete files.

Libraries' errors seldom name the file that they could not read. After a failed load the files are read one by one here."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from lowpeak.arguments import NOT_PARALLEL, ModelParallel
from lowpeak.errors import ArgumentError, LowpeakError, MissingPackageError, ModelError, first_line, shorten_names
from lowpeak.memory import is_out_of_memory
from lowpeak.models.sharded_loading import (
    auto_class,
    find_config,
    init_without_weights,
    is_weightless_folder,
    load_tensor_parallel,
    reads_weights,
)

logger = logging.getLogger(__name__)

_REPORTED = ("missing_keys", "mismatched_keys")  # keys of transformers' report; mismatched ones come with both shapes


def from_pretrained(
    auto: Any,
    name: str,
    model_parallel: ModelParallel = NOT_PARALLEL,
    frozen_on: torch.device | None = None,
    *,
    may_lack: str = "",
    **options: Any,
) -> Any:
    """Return `auto.from_pretrained(name, **options)`; ModelError if it fails or would initialise missing weights at random.

    Tensors whose names begin with `may_lack` may be missing, or have another shape. On a rank that reads no weights (see
    `reads_weights`) the model's parameters are on the meta device. With `output_loading_info` a model that was read comes with
    transformers' report.
    """
    try:
        with name_damaged_file(name, ModelError, "copy or download the model again"):
            check_generation_config(Path(name))
            if not hasattr(auto, "from_config"):  # a tokenizer
                return auto.from_pretrained(name, **options)
            return _read_model(auto, name, model_parallel, frozen_on, may_lack, options)
    except LowpeakError:
        raise
    except ImportError as error:
        raise MissingPackageError(f"loading {name!r} needs a package that is missing: {error}") from error
    except Exception as error:  # transformers and tokenizers raise any class for bad files and options
        if is_out_of_memory(error):
            raise
        raise _explain(auto, name, error) from error


def _unexpected(report: Mapping[str, Any], may_lack: str) -> dict[str, list[Any]]:
    """Return transformers' loading report, without tensors that the checkpoint `may_lack`."""
    return {
        kind: [each for each in report[kind] if not (may_lack and _tensor_name(each).startswith(may_lack))]
        for kind in _REPORTED
    }


def _read_model(
    auto: Any,
    name: str,
    model_parallel: ModelParallel,
    frozen_on: torch.device | None,
    may_lack: str,
    options: Mapping[str, Any],
) -> Any:
    check_load_options(options)
    options = dict(options)
    with suppress(OSError):  # loading raises the same, and an adapter's folder has no config
        auto = auto_class(auto, find_config(name, options))
    with_report = options.pop("output_loading_info", False)
    if is_weightless_folder(name):
        logger.warning("%s has no weights: the dry run reads its sizes only and skips checks that need weights.", name)
        model = init_without_weights(auto, name, options)
        model.hf_device_map = {"": "meta"}  # transformers' Trainer then leaves it where it is
        return model
    if model_parallel == NOT_PARALLEL and "quantization_config" not in options and not reads_weights(frozen_on):
        return init_without_weights(auto, name, options)
    reporting = {"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
    model, report = (
        load_tensor_parallel(auto, name, reporting, model_parallel)
        if model_parallel != NOT_PARALLEL
        else auto.from_pretrained(name, **reporting)
    )
    problems = _unexpected(report, may_lack)
    if not options.get("ignore_mismatched_sizes", False):
        check_shapes(name, problems)
    _check_missing(name, sorted(problems["missing_keys"]))
    return (model, report) if with_report else model


def _tensor_name(reported: Any) -> str:
    return reported if isinstance(reported, str) else str(reported[0])


def _check_missing(name: str, missing: Sequence[str]) -> None:
    if missing:
        raise ModelError(
            f"{name!r} lacks {shorten_names(missing)}, which would be initialised at random: copy or download the model again, "
            "or correct its config.json."
        )


def check_load_options(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError if `dtype` is a name that torch does not have, or `config` is not a config object."""
    dtype, config = options.get("dtype"), options.get("config")
    if config is not None and not isinstance(config, PreTrainedConfig):  # transformers ignores it
        raise ArgumentError(
            f"config={config!r:.60} is a {type(config).__name__}: pass AutoConfig.from_pretrained(...)."
        )
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ArgumentError(f"dtype={dtype!r} is not a dtype of torch: use 'auto', 'bfloat16', 'float16' or 'float32'.")


def check_shapes(name: str, report: Mapping[str, Any]) -> None:
    """Raise ModelError for the first tensor in transformers' report whose shape differs from the model's."""
    for key, in_file, in_model in sorted(report["mismatched_keys"], key=_tensor_name):
        raise ModelError(
            f"{name!r} cannot be loaded: {key} has shape {_shape(in_file)} in the file and {_shape(in_model)} in the model; "
            "correct its config.json, or choose another model."
        )


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "()"


def _explain(auto: Any, name: str, error: Exception) -> ModelError:
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        return ModelError(f"{name!r} contains Python code: review it, then set trust_remote_code=True.")
    if "Unrecognized configuration class" in reason:
        return ModelError(
            f"transformers has no {auto.__name__} for {name!r} ({reason.partition(' for this')[0]}): choose a model of "
            "another family."
        )
    if (Path(name) / "adapter_config.json").is_file() and not (Path(name) / "config.json").is_file():
        return ModelError(
            f"{name!r} holds an adapter and no model: merge the two and save the result, or pass "
            "PeftModel.from_pretrained(model, folder) (docs/lora.md)."
        )
    if isinstance(error, OSError) and not Path(name).is_dir():
        return ModelError(
            f"cannot load {name!r}: it is neither a local folder with a model nor a model that could be downloaded from the hub "
            f"({reason}). Check the path, or download the model once while online."
        )
    if isinstance(error, ArithmeticError | LookupError | AttributeError):  # its message alone says little
        reason = f"{type(error).__name__}: {reason}"
    return ModelError(
        f"cannot load {name!r} ({reason}): correct its config.json or other files, "
        "or model_init_kwargs (of a teacher teacher_model_init_kwargs) if you set them."
    )


@contextmanager
def name_damaged_file(folder: str | Path, kind: type[LowpeakError], remedy: str) -> Iterator[None]:
    """Raise `kind`, naming the file and the remedy, if the block fails and a file of `folder` is damaged."""
    try:
        yield
    except Exception as error:
        damaged = None if isinstance(error, LowpeakError) else find_damaged_file(Path(folder))
        if damaged is None:
            raise
        file, reason = damaged
        raise kind(f"{file} is damaged (truncated or changed: {type(reason).__name__}): {remedy}.") from error


def find_damaged_file(folder: Path) -> tuple[Path, Exception] | None:
    """Return the first file of `folder` that cannot be read, and the reason; None if there is none.

    Only headers and structure are read: a changed value inside a tensor is not detected.
    """
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        read = next((read for pattern, read in _READERS.items() if file.match(pattern)), None)
        if read is None or not file.is_file():
            continue
        try:
            read(file)
        except PermissionError:
            continue
        except Exception as error:
            return file, error
    return None


def check_generation_config(folder: Path) -> None:
    """Read a folder's generation_config.json, and raise if it is damaged.

    transformers would silently use its defaults, without the model's end tokens.
    """
    file = folder / "generation_config.json"
    if file.is_file():
        _read_settings(file)


def _read_settings(file: Path) -> None:
    if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
        raise ValueError("not a JSON object")


def _read_pickle(file: Path) -> None:
    torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


_READERS: dict[str, Callable[[Path], object]] = {
    "*config.json": _read_settings,
    "tokenizer.json": lambda file: Tokenizer.from_file(str(file)),
    "*.json": lambda file: json.loads(file.read_text(encoding="utf-8")),
    "*.safetensors": lambda file: safe_open(file, framework="pt"),
    "*.pt": _read_pickle,
    "pytorch_model*.bin": _read_pickle,
    "adapter_model.bin": _read_pickle,
}
