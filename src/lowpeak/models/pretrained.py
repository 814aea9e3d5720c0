"""Reading a model or a tokenizer of a name or a folder through transformers, whole: what is wrong with it is one ModelError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowpeak.arguments import WHOLE, Cut
from lowpeak.errors import ArgumentError, LowpeakError, MissingPackageError, ModelError, first_line
from lowpeak.memory import is_exhaustion
from lowpeak.models.damaged_files import check_generation_config, name_damaged_file
from lowpeak.models.sharded_loading import in_parts, reads_weights, without_weights

_SHOWN = 3  # missing tensors that an error names
_KINDS = ("missing_keys", "mismatched_keys")  # of transformers' report; the latter with both shapes


def from_pretrained(
    auto: Any,
    name: str,
    cut: Cut = WHOLE,
    frozen_on: torch.device | None = None,
    *,
    may_lack: str = "",
    **options: Any,
) -> Any:
    """`auto.from_pretrained(name, **options)`; ModelError where it fails, or would draw weights that the checkpoint lacks.

    Tensors whose names begin with `may_lack` may be missing, or have another shape. On a rank that reads no weights (see
    `reads_weights`) a model has none. With `output_loading_info` a model that was read comes with its report, as from transformers.
    """
    try:
        with name_damaged_file(name, ModelError, "copy or download the model again"):
            check_generation_config(Path(name))
            if not hasattr(auto, "from_config"):  # a tokenizer
                return auto.from_pretrained(name, **options)
            return _read_model(auto, name, cut, frozen_on, may_lack, options)
    except LowpeakError:
        raise
    except ImportError as error:
        raise MissingPackageError(f"loading {name!r} needs a package that is missing: {error}") from error
    except Exception as error:  # transformers and tokenizers raise whatever a file or an option leads them to
        if is_exhaustion(error):
            raise
        raise _explained(auto, name, error) from error


def _read_model(
    auto: Any, name: str, cut: Cut, frozen_on: torch.device | None, may_lack: str, options: Mapping[str, Any]
) -> Any:
    check_dtype(options)
    with_report = options.get("output_loading_info", False)
    options = {key: value for key, value in options.items() if key != "output_loading_info"}
    if cut == WHOLE and "quantization_config" not in options and not reads_weights(frozen_on):
        return without_weights(auto, name, options)
    reporting = {"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
    model, report = in_parts(auto, name, reporting, cut) if cut != WHOLE else auto.from_pretrained(name, **reporting)
    own = {
        kind: [each for each in report[kind] if not (may_lack and _name(each).startswith(may_lack))] for kind in _KINDS
    }
    if not options.get("ignore_mismatched_sizes", False):
        check_shapes(name, own)
    if missing := sorted(own["missing_keys"]):
        more = len(missing) - _SHOWN
        shown = ", ".join(missing[:_SHOWN]) + (f" and {more} more tensors" if more > 0 else "")
        raise ModelError(
            f"{name!r} lacks {shown}, which would be random: copy or download the model again, or correct its config.json."
        )
    return (model, report) if with_report else model


def _name(reported: Any) -> str:
    return reported if isinstance(reported, str) else str(reported[0])


def check_dtype(options: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the name of a dtype that torch does not have."""
    dtype = options.get("dtype")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ArgumentError(f"dtype={dtype!r} is no dtype of torch: write 'auto', 'bfloat16', 'float16' or 'float32'.")


def check_shapes(name: str, report: Mapping[str, Any]) -> None:
    """Raise ModelError for the first tensor of transformers' report that has another shape than the model's."""
    for key, there, wanted in sorted(report["mismatched_keys"], key=_name):
        raise ModelError(
            f"{name!r} cannot be loaded: {key} has the shape {_shape(there)} in the file, and {_shape(wanted)} in the model: "
            "correct its config.json, or choose another model."
        )


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "()"


def _explained(auto: Any, name: str, error: Exception) -> ModelError:
    reason = first_line(error)
    if "trust_remote_code" in str(error):
        return ModelError(f"{name!r} brings code of its own: read it, then set trust_remote_code=True.")
    if "Unrecognized configuration class" in reason:
        return ModelError(
            f"transformers has no {auto.__name__} for {name!r} ({reason.partition(' for this')[0]}): choose a model of "
            "another family."
        )
    if isinstance(error, OSError) and not Path(name).is_dir():
        return ModelError(
            f"cannot load {name!r}: it is neither a folder with a model on this machine nor a model that could be fetched "
            f"from the hub ({reason}). Check the path, or fetch it once while online."
        )
    if isinstance(error, ArithmeticError | LookupError | AttributeError):  # words of Python alone
        reason = f"{type(error).__name__}: {reason}"
    return ModelError(
        f"cannot load {name!r} ({reason}): correct its config.json or its other files, "
        "or model_init_kwargs where it is set."
    )
