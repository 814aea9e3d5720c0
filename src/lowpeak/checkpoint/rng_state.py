"""Random generators of a process: captured in checkpoints, and put back.

Sampling draws come from a hash and need no generator; dropout, data shuffling and users' own rewards do.
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


def capture_random() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators, of plain types and tensors only.

    CUDA's are taken where this process uses CUDA: asking starts no device.
    """
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (algorithm, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Put the global generators back to what `capture_random` saw; says so when the number of CUDA devices differs.

    An empty state (of a rank that the run did not have) leaves them as the seed made them.
    """
    if not state:
        logger.warning("No random states were saved for this rank: dropout and rewards that draw go on from the seed.")
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
            "Random states of %d CUDA devices were saved and %d are here: draws on a device (dropout) will differ.",
            len(state["cuda"]),
            num_devices,
        )


@contextmanager
def keep_random() -> Iterator[None]:
    """Leave the global generators as they were, whatever the block draws or seeds: evaluating changes no training."""
    state = capture_random()
    try:
        yield
    finally:
        restore_random(state)
