"""Which vLLM lowpeak works with, and what every vLLM of a run is built with: the one place that says it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from lowpeak.errors import require_package

logger = logging.getLogger(__name__)

OLDEST = (0, 31)
BELOW = (0, 34)
SUPPORTED = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"

# As a server or in the training process: weights reach it by methods of ours, log-probs are of the full softmax, and a request
# alone says how it is sampled, no defaults of a checkpoint's.
ALWAYS: Mapping[str, str] = {
    "worker_extension_cls": "lowpeak.vllm.weight_sync.worker.Extension",
    "logprobs_mode": "raw_logprobs",
    "generation_config": "vllm",
}
NO_SHARE = 0.01  # with a cache of so many bytes vLLM only looks, as it starts, whether its share of the device is free


def require_vllm(what: str = "use_vllm=True") -> None:
    """Raise MissingPackageError where vLLM, which `what` needs, is not installed; it is not imported (that takes many seconds)."""
    otherwise = "; without it the policy itself generates (use_vllm=False)"
    require_package("vllm", what, "vllm", otherwise, named=f"vLLM {SUPPORTED}")


def warn_unsupported(version: str) -> None:
    """A warning that names `version` and the supported range, where it is outside of it or says nothing."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) < BELOW:
        logger.warning(
            "vLLM %s is outside of %s, the versions that lowpeak is tested with: loading weights may fail.",
            version,
            SUPPORTED,
        )
