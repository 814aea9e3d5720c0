"""Log-probs of a dataset's completions under a reference that has scored them before the first step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from lowpeak.errors import ArgumentError
from lowpeak.records import Record
from lowpeak.training import explain_load_errors

logger = logging.getLogger(__name__)


def save_sums(file: Path, sums: Mapping[bytes, float], reference: str) -> None:
    """Write the log-prob sums under a reference of this name to a file."""
    tensors = {"keys": np.frombuffer(b"".join(sums), dtype=np.uint8), "sums": np.array(list(sums.values()))}
    save_file(tensors, file, {"reference": reference})


def load_sums(file: Path, reference: str) -> dict[bytes, float]:
    """Return the sums of a checkpoint; none, with a warning, if they are of a reference of another name."""
    with explain_load_errors(str(file), "reference log-probs", "data"), safe_open(file, "numpy") as opened:
        saved, name = {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata()["reference"]  # noqa: SIM118
    if name != reference:
        logger.warning("The log-probs in %s are of %r; %r scores the data again.", file, name, reference)
        return {}
    if not name:
        logger.warning(
            "The log-probs in %s are of a reference without a name: pass the same ref_model as before.", file
        )
    keys = saved["keys"].reshape(-1, hashlib.sha256().digest_size)
    return {key.tobytes(): float(number) for key, number in zip(keys, saved["sums"], strict=True)}


def digest_of(record: Record) -> bytes:
    """Return a digest of a completion's tokens and their weights, which `ld_alpha` sets."""
    assert record.advantages is not None
    ids = np.array([*record.prompt_ids, -1, *record.completion.ids.tolist()], dtype=np.int32)
    weights = record.advantages.abs().float().numpy()
    return hashlib.sha256(ids.tobytes() + weights.tobytes()).digest()


def reference_sum(record: Record) -> float:
    """Return the weighted log-prob of a completion that the reference has scored."""
    assert record.reference is not None
    assert record.advantages is not None
    return float((record.advantages.abs() * record.reference).sum())


def with_reference_sum(record: Record, sums: Mapping[bytes, float]) -> Record:
    """Return the record with the reference's sum at its first token, whose weight is 1: losses read sums alone."""
    if (key := digest_of(record)) not in sums:
        raise ArgumentError(
            "precompute_ref_log_probs=True frees the reference after it has scored train_dataset and eval_dataset: pass the "
            "data to evaluate on as eval_dataset, or remove it."
        )
    reference = torch.zeros(len(record.completion))
    reference[0] = sums[key]
    return replace(record, reference=reference)
