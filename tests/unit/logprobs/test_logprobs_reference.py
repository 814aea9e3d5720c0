"""The naive log-probs, and the scales of logits that configs name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    GraniteConfig,
    Qwen2Config,
    RecurrentGemmaConfig,
    xLSTMConfig,
)

from lowpeak.logprobs.reference import ChunkSettings, HeadScale, head_scale, naive_logprobs


def test_a_logprob_is_the_chosen_entry_of_the_log_softmax_of_the_tempered_logits():
    hidden, weight, bias = (
        torch.eye(2, dtype=torch.float64),
        torch.tensor([[1.0, 0.0], [3.0, -1.0], [0.5, 2.0]], dtype=torch.float64),
        torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64),
    )
    logprobs, entropy = naive_logprobs(hidden, weight, bias, torch.tensor([1, 2]), temperature=2.0)
    first, second = torch.tensor([[0.5, 1.75, 0.75], [0.0, -0.25, 1.5]], dtype=torch.float64)
    assert logprobs[0] == pytest.approx(float(1.75 - first.exp().sum().log()))
    assert logprobs[1] == pytest.approx(float(1.5 - second.exp().sum().log()))
    assert entropy[0] == pytest.approx(float(torch.distributions.Categorical(logits=first).entropy()))


def test_the_scale_acts_before_the_cap():
    logits = torch.tensor([[4.0, -2.0]])
    expected = 3.0 * torch.tanh(0.5 * logits / 3.0)
    torch.testing.assert_close(HeadScale(0.5, 3.0).apply(logits), expected)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen2Config(), HeadScale()),
        (Gemma2Config(final_logit_softcapping=30.0), HeadScale(1.0, 30.0)),
        (Gemma2Config(final_logit_softcapping=None), HeadScale()),
        (Gemma3Config(text_config={"final_logit_softcapping": 20.0}), HeadScale(1.0, 20.0)),
        (RecurrentGemmaConfig(logits_soft_cap=25.0), HeadScale(1.0, 25.0)),
        (xLSTMConfig(output_logit_soft_cap=15.0), HeadScale(1.0, 15.0)),
        (CohereConfig(logit_scale=0.25), HeadScale(0.25)),
        (Cohere2Config(logit_scale=0.5), HeadScale(0.5)),
        (GraniteConfig(logits_scaling=8.0), HeadScale(0.125)),
        (FalconH1Config(lm_head_multiplier=0.5), HeadScale(0.5)),
        # HyperCLOVA X multiplies by what Granite divides by; a cap of zero is no cap.
        (SimpleNamespace(model_type="hyperclovax", logits_scaling=4.0), HeadScale(4.0)),
        (SimpleNamespace(model_type="other", final_logit_softcapping=0.0), HeadScale()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scales_and_caps_are_read_off_the_config(config, expected):
    assert head_scale(config) == expected


def test_chunks_cover_all_tokens_once_and_no_tokens_are_one_empty_chunk():
    assert ChunkSettings(3).spans(7) == [(0, 3), (3, 6), (6, 7)]
    assert ChunkSettings(3).spans(0) == [(0, 0)]


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(AssertionError, match="got 0"):
        ChunkSettings(0)
    with pytest.raises(AssertionError, match=r"temperature.*got 0\.0"):
        ChunkSettings(4, temperature=0.0)
    with pytest.raises(AssertionError, match="entropy"):
        ChunkSettings(4, entropy_grad=True)
