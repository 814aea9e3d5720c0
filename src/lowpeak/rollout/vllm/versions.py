"""Which vLLM lowpeak works with, and what every vLLM of a run is built with: the one place that says it."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType

from lowpeak.errors import MissingPackageError

logger = logging.getLogger(__name__)

OLDEST = (0, 31)
BELOW = (0, 34)
SUPPORTED = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"

# As a server or in the training process: weights reach it by methods of ours, log-probs are of the full softmax, and a request
# alone says how it is sampled, no defaults of a checkpoint's.
ALWAYS: Mapping[str, str] = {
    "worker_extension_cls": "lowpeak.rollout.vllm.weights.extension.Extension",
    "logprobs_mode": "raw_logprobs",
    "generation_config": "vllm",
}
NO_SHARE = 0.01  # with a cache of so many bytes vLLM only looks, as it starts, whether its share of the device is free


def is_installed() -> bool:
    """Return whether vLLM is installed; a folder of that name on the path is no package."""
    found = find_spec("vllm")
    return found is not None and found.origin is not None


def require_vllm(what: str = "use_vllm=True") -> None:
    """MissingPackageError where vLLM, which `what` needs, is not installed; it is not imported (that takes many seconds)."""
    if not is_installed():
        raise MissingPackageError(
            f"{what} needs vLLM {SUPPORTED}: pip install 'lowpeak[vllm]'; without it the policy itself generates (use_vllm=False)."
        )


def import_vllm() -> ModuleType:
    """vLLM, with one warning where its version is none that lowpeak is tested with."""
    require_vllm()
    import vllm

    warn_unsupported(vllm.__version__)
    return vllm


def warn_unsupported(version: str) -> None:
    """A warning that names `version` and the supported range, where it is outside of it or says nothing."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) < BELOW:
        logger.warning(
            "vLLM %s is outside of %s, the versions that lowpeak is tested with: loading weights may fail.",
            version,
            SUPPORTED,
        )
