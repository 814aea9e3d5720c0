"""What to do about a name that is not known: TRL's names with their remedy, else the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

TRL_NAMES = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_split",
    "reward_funcs": "reward",
    "reward_model_name_or_path": "reward",
    "lora_target_linear": "lora_target_modules",
}


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean ...?` for the nearest known name, or nothing when none is near."""
    names = list(known)
    if TRL_NAMES.get(name) in names:
        return f"; did you mean {prefix}{TRL_NAMES[name]}?"
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def remedy(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What to do instead of a name of TRL's that lowpeak does not take, or the nearest known name."""
    from lowpeak.config.rejected import REJECTED

    return f": {REJECTED[name]}" if name in REJECTED else suggestion(name, known, prefix)
