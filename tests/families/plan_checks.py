"""Checks of a family's plan: that it ends, and of the bytes of its cache."""

from __future__ import annotations

from typing import Any

import torch

from lowpeak import GRPOConfig
from lowpeak.errors import LowpeakError, first_line
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.plan import Plan, make_plan
from lowpeak.plan.request import PlanRequest
from lowpeak.rollout.native.cache import SlotCache, prefill_prompts
from lowpeak.rollout.native.cache_bytes import sequence_bytes
from model_families import make_config

PROMPT, COMPLETION, GENERATIONS, PROMPTS = 8, 12, 4, 2
SLOTS = 16


def plan_family(family: str, quantized_bits: Any = None, peft_config: Any = None, **changes: Any) -> Plan:
    """Return the plan of a GRPO step on one CPU, whose allocator's blocks do not round bytes up."""
    sizes: dict[str, Any] = {"micro_batch_tokens": 160, "logprob_chunk_size": 64, "kv_cache_bytes": 1 << 24}
    batch: dict[str, Any] = {"per_device_train_batch_size": PROMPTS * GENERATIONS, "num_generations": GENERATIONS}
    batch["max_completion_length"] = COMPLETION
    args = GRPOConfig("unused", use_cpu=True, **{**sizes, **batch, **changes})
    machine = Machine(1, 8 * GIB, device="cpu")
    adapted: dict[str, Any] = {"quantized_bits": quantized_bits, "peft_config": peft_config}
    return make_plan(PlanRequest("grpo", args, make_config(family), machine, prompt_tokens=PROMPT, **adapted))


def check_plan(family: str, **changes: Any) -> str:
    """Plan the family and return "yes", or the sentence of an expected error."""
    try:
        assert plan_family(family, **changes).phases["rollout"].peak > 0
    except LowpeakError as error:
        return first_line(error)
    return "yes"


@torch.no_grad()
def cache_errors(model: Any) -> list[float]:
    """Return by how much a sequence's measured bytes differ from those of slots, relatively: of few columns and of many."""
    errors = []
    for num_columns in (4, 40):
        _, prefilled = prefill_prompts(model, [(2, 3, 4)], torch.device("cpu"))
        cache = SlotCache()
        cache.reserve(SLOTS, num_columns, 0)
        cache.allocate(prefilled)
        # All parts are views of one buffer.
        allocated = cache._stored[0].buffers[0].untyped_storage().nbytes()
        errors.append(allocated / (SLOTS * sequence_bytes(model, num_columns)) - 1)
    return errors
