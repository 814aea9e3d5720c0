"""What the rehearsal and the real run that it is compared with have in common: a model, micro-batches, settings."""

from __future__ import annotations

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lowpeak.algorithms.grpo import make_grpo
from lowpeak.attention.install import install_attention
from lowpeak.batching.packing import TokenBudget, pack
from lowpeak.heads.lm_head import install_head
from lowpeak.records import Completion, MicroBatch, Record
from lowpeak.training.step import LogprobSettings
from step_settings import GRPO

ALGORITHM = make_grpo(GRPO)
CORE = LogprobSettings(1.0, 16, torch.device("cpu"))
# 109M parameters: 437 MB in fp32, 94 MB of them the tied embedding.
MID = Qwen2Config(
    vocab_size=30_720, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
    intermediate_size=2_304, tie_word_embeddings=True,
)  # fmt: skip


def make_model(config: Qwen2Config = MID) -> Qwen2ForCausalLM:
    """A model with our head and attention, as a trainer leaves it."""
    model = Qwen2ForCausalLM(config)
    install_head(model)
    install_attention(model)
    return model


def micro_batches(prompt: int, completion: int, rows: int, tokens: int, layout: str = "shared") -> list[MicroBatch]:
    """Equally long rows of one group, packed as a run packs them."""
    values = torch.zeros(completion)
    ids, mask = torch.ones(completion, dtype=torch.int32), torch.ones(completion, dtype=torch.bool)
    written = Completion(ids, values, mask, "stop")
    record = Record(0, tuple(range(prompt)), written, (1.0,), 1.0, old=values, reference=values, advantages=values)
    return pack([record] * rows, range(rows), TokenBudget(tokens, layout=layout), lambda num_tokens: 1.0 / num_tokens)
