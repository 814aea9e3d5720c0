"""What every vLLM of a run is built with, in its own words, as a server or in the training process.

Weights reach it by methods of ours; log-probs are of the full softmax; a group's prompt is computed once; and a request alone says
how it is sampled: no defaults of a checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping

ALWAYS: Mapping[str, str] = {
    "worker_extension_cls": "lowpeak.rollout.vllm.weights.extension.Extension",
    "logprobs_mode": "raw_logprobs",
    "generation_config": "vllm",
}
NO_SHARE = 0.01  # with a cache of so many bytes vLLM only looks, as it starts, whether its share of the device is free
