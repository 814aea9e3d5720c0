"""A whole step with a drifting sampler: the plain padded way's gradients, in one visit or two, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from step_cases import (
    BASE,
    TEMPERATURE,
    assert_same_gradients,
    micro_batches,
    plain_grpo_loss,
    plain_rloo_loss,
    ragged_records,
)

from all_pairs import all_pairs
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.arguments.correction import Correction
from lowpeak.arguments.grpo import GRPOLossType
from lowpeak.arguments.rloo import RLOOSettings
from lowpeak.batching.packing import TokenBudget
from lowpeak.heads.lm_head import install_head
from lowpeak.training.rollout import with_old_logprobs
from lowpeak.training.step import LogprobSettings, run_step
from step_settings import OF_LOSS_TYPE, LocalStrategy
from tiny_models import tiny_model

MODES = {
    "token_truncate": Correction(False, False, 0.8, 1.25),
    "token_mask": Correction(False, True, 0.8, 1.25),
    "sequence_truncate": Correction(True, False, 0.6, 1.6),
    "sequence_mask": Correction(True, True, 0.6, 1.6),
    "sequence_geometric_mask": Correction(True, True, 0.9, 1.05, True),
}
SEQUENCE_MODES = [name for name in MODES if name.startswith("sequence")]


def drifted(model, seed=0):
    """Records of an on-policy step whose sampler was off by a quarter of a nat a token."""
    generator = torch.Generator().manual_seed(seed)
    records = []
    for record in ragged_records(model):
        sampled = record.completion.logprobs + 0.25 * torch.randn(len(record.completion), generator=generator)
        records.append(replace(record, old=None, completion=replace(record.completion, logprobs=sampled)))
    return records


def streamed(algorithm, model, records, max_tokens, chunk_size):
    core = LogprobSettings(TEMPERATURE, chunk_size, torch.device("cpu"))
    batches = micro_batches(algorithm, records, TokenBudget(max_tokens))
    return run_step(model, batches, algorithm, core, LocalStrategy(), {})[0]


SIZES = {"cut": (12, 4), "whole, chunks of 4": (1000, 4), "chunks of 7": (1000, 7), "one chunk": (1000, 64)}
# Every pair of two settings' values once.
GRPO_CASES = all_pairs(
    {
        # VESPO has the correction in its ratio: test_algorithms_loss_terms.py.
        "loss_type": sorted({*get_args(GRPOLossType)} - {"vespo"}),
        "level": ["token", "sequence"],
        "mode": list(MODES),
        "sizes": list(SIZES),
    }
)


@pytest.mark.parametrize("case", GRPO_CASES, ids=lambda case: "-".join(case.values()))
def test_a_corrected_step_equals_the_plain_padded_way(case):
    model = tiny_model()
    records = drifted(model)
    install_head(model)
    of_type = OF_LOSS_TYPE.get(case["loss_type"], {})
    settings = replace(BASE, loss_type=case["loss_type"], importance_level=case["level"], **of_type)
    settings = replace(settings, correction=MODES[case["mode"]], score_old=False, beta=0.04)
    assert_same_gradients(
        model,
        lambda m: plain_grpo_loss(settings, m, records),
        lambda m: streamed(make_grpo(settings), m, records, *SIZES[case["sizes"]]),
    )


@pytest.mark.parametrize(("max_tokens", "chunk_size"), [(12, 4), (1000, 64)])
@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_a_corrected_rloo_step_equals_the_plain_padded_way(mode, max_tokens, chunk_size):
    model = tiny_model()
    records = drifted(model)
    install_head(model)
    settings = RLOOSettings(0.2, 0.28, 0.0, "k1", False, None, False, False, MODES[mode])
    assert_same_gradients(
        model,
        lambda m: plain_rloo_loss(settings, m, records),
        lambda m: streamed(make_rloo(settings), m, records, max_tokens, chunk_size),
    )


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("loss_type", get_args(GRPOLossType))
@pytest.mark.parametrize("mode", [None, "sequence_geometric_mask"])
def test_a_step_whose_old_log_probs_are_the_samplers_equals_the_plain_padded_way(loss_type, mode, num_steps):
    if loss_type == "vespo" and mode is not None:
        pytest.skip("VESPO takes no correction of sequences")
    model = tiny_model()
    install_head(model)
    settings = replace(BASE, loss_type=loss_type, beta=0.04, score_old=False, **OF_LOSS_TYPE.get(loss_type, {}))
    settings = replace(settings, old_policy="sampler", correction=None if mode is None else MODES[mode])
    algorithm = make_grpo(settings)
    records = with_old_logprobs(drifted(model), algorithm, num_steps)
    assert_same_gradients(
        model, lambda m: plain_grpo_loss(settings, m, records), lambda m: streamed(algorithm, m, records, 1000, 7)
    )
