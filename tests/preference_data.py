"""What tests of reward models and judges start from: a tiny classifier, preferences over digits, their plain loss, a judge."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from lowpeak.data.preference import flatten_pairs, make_pair
from lowpeak.rewards.judge import NO_PREFERENCE

# Two answers to one question, one that begins the other, two texts with nothing in common, a long one beside a short one.
PAIRS = [
    ([5, 6, 7, 8, 2, 3], [5, 6, 7, 8, 4], 0.0),
    ([5, 6], [5, 6, 9, 10, 3, 4, 2], 0.5),
    ([2, 3, 4], [9, 8], -0.25),
    ([3], [4, 4, 4], 2.0),
    ([7, 7, 7, 7, 7, 7, 7, 7, 2], [7, 7, 7, 7, 7, 7, 7, 7, 3], 0.1),
]


def tiny_classifier(vocab_size: int = 13, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A Qwen2-shaped classifier with one label whose scores differ clearly."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2,
        "num_labels": 1, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    return Qwen2ForSequenceClassification(Qwen2Config(**{**settings, **changes})).to(dtype).eval()


class FirstToken(Qwen2ForSequenceClassification):
    """A classifier that reads its score at the first token."""

    def forward(self, input_ids, **kwargs):
        return super().forward(input_ids=input_ids[:, :1], **kwargs)


def records_of(pairs=PAIRS):
    """The records of pairs of token ids, as a reader makes them."""
    return flatten_pairs(
        make_pair(group, chosen, rejected, margin, 0) for group, (chosen, rejected, margin) in enumerate(pairs)
    )


def plain_scores(model, rows):
    """Each row's logit by the classifier's own forward, alone and so without padding."""
    return torch.stack([model(input_ids=torch.tensor([row])).logits[0, 0] for row in rows])


def plain_loss(model, pairs=PAIRS, center=0.0):
    """The papers' loss of these pairs, one forward a row."""
    chosen = plain_scores(model, [pair[0] for pair in pairs])
    rejected = plain_scores(model, [pair[1] for pair in pairs])
    margins = torch.tensor([pair[2] for pair in pairs], dtype=chosen.dtype)
    return (-F.logsigmoid(chosen - rejected - margins) + center * (chosen + rejected) ** 2).mean()


class ScriptedJudge:
    """Prefers the completion of the higher `value(prompt, completion)`; `asked` keeps what it was asked."""

    def __init__(self, value):
        self.value = value
        self.requests = []

    def judge(self, prompts, completions):
        requests = list(zip(prompts, completions, strict=True))
        self.requests += requests
        values = [[self.value(prompt, text) for text in pair] for prompt, pair in requests]
        return [NO_PREFERENCE if first == second else int(second > first) for first, second in values]
