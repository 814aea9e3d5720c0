"""States of a process's global random number generators: captured, restored, preserved.

Dropout, data shuffling and users' rewards draw from them. Sampling does not: its numbers come from a hash.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def capture_rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators, as plain types and tensors.

    CUDA generators are included if this process uses CUDA; CUDA is not initialized for them.
    """
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore captured generator states; log a warning if the number of CUDA devices differs.

    An empty state belongs to a rank that the saved run did not have: its generators stay as they were seeded.
    """
    if not state:
        logger.warning("No random states were saved for this rank: its dropout and random rewards start from the seed.")
        return
    algorithm, keys, position, has_gauss, gauss = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, cuda in enumerate(state["cuda"][:num_devices]):
        torch.cuda.set_rng_state(cuda, device)
    if state["cuda"] and len(state["cuda"]) != num_devices:
        logger.warning(
            "Random states of %d CUDA devices were saved, and there are %d devices now: dropout will differ.",
            len(state["cuda"]),
            num_devices,
        )


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators after the block, so that an evaluation does not change training."""
    state = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(state)
