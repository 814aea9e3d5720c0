"""The correction of the sampler's drift against its definition in float64, sequence by sequence and token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from algorithm_cases import GRPO, RLOO, SETTINGS, VESPO, assert_same, gradients, ragged_rows, token_batch, trained_loss

from lowpeak.algorithms.algorithm import StepCounts
from lowpeak.algorithms.grpo import make_grpo
from lowpeak.algorithms.loss_terms import correction_weight
from lowpeak.algorithms.rloo import make_rloo
from lowpeak.arguments.correction import Correction
from lowpeak.arguments.grpo import EntropyBonus, GRPOLossType
from lowpeak.records import Completion, Metric, Record, merge_metrics
from naive_losses import plain_grpo, plain_rloo, plain_weights

LEAST, MOST = 0.6, 1.5
MODES = {
    "token_truncate": Correction(False, False, LEAST, MOST),
    "token_mask": Correction(False, True, LEAST, MOST),
    "sequence_truncate": Correction(True, False, LEAST, MOST),
    "sequence_mask": Correction(True, True, LEAST, MOST),
}
SEQUENCE_MODES = [name for name in MODES if name.startswith("sequence")]
RATIO = "sampling/importance_sampling_ratio"


def draw_sampling_logprobs(rows, seed=7):
    """Return sampling log-probs of each sequence: drifts of both signs, one unknown token."""
    generator = torch.Generator().manual_seed(seed)
    sampling = [row.logprobs.detach() + 0.4 * torch.randn(len(row.old), generator=generator).double() for row in rows]
    sampling[0][1] = math.nan
    return sampling


def on_policy(rows, sampling):
    """Return the sequences with the weights as masks of the plain loss, and the fields of the step's token batch."""
    weights = {
        name: [plain_weights(c, row.logprobs, s) for row, s in zip(rows, sampling, strict=True)]
        for name, c in MODES.items()
    }
    return weights, {"old_T": None, "sampling_T": torch.cat(sampling)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", sorted({*get_args(GRPOLossType)} - {"vespo"}))
def test_on_policy_the_step_weights_the_policy_term(loss_type, level, mode):
    base = replace(SETTINGS.get(loss_type, GRPO), loss_type=loss_type, importance_level=level, score_old=False)
    settings = replace(base, beta=0.1, bias_corrected_kl=True, entropy_bonus=EntropyBonus(0.3), correction=MODES[mode])
    rows = ragged_rows()
    weights, fields = on_policy(rows, draw_sampling_logprobs(rows))
    found = set(torch.cat(weights[mode]).tolist())
    assert ({0.0} if MODES[mode].masks else {LEAST, MOST}) <= found  # the rows reach every bound
    assert any(LEAST < weight < MOST for weight in found)
    masked = [replace(row, mask=w) for row, w in zip(rows, weights[mode], strict=True)]
    loss = trained_loss(make_grpo(settings), rows, **fields)
    assert_same(loss, plain_grpo(settings, masked, on_policy=True, masked=True), rows)


@pytest.mark.parametrize("mode", sorted(set(MODES) - set(SEQUENCE_MODES)))
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_samplers_drift_is_a_factor_of_vespos_ratio(mode, on_policy):
    settings = replace(VESPO, vespo=replace(VESPO.vespo, correction=MODES[mode]))
    rows = [row for row in ragged_rows((3, 1, 6, 2)) if len(row.logprobs)]
    sampling = draw_sampling_logprobs(rows)
    olds = [row.logprobs.detach() if on_policy else row.old for row in rows]
    weights = [plain_weights(MODES[mode], old, s).clamp(min=1e-8) for old, s in zip(olds, sampling, strict=True)]
    # A row whose old log-probs are divided by the weights has the product of both as its ratio.
    moved = [replace(row, old=old - w.log()) for row, old, w in zip(rows, olds, weights, strict=True)]
    fields = {"sampling_T": torch.cat(sampling), **({"old_T": None} if on_policy else {})}
    assert_same(trained_loss(make_grpo(settings), rows, **fields), plain_grpo(VESPO, moved), rows)


@pytest.mark.parametrize("mode", SEQUENCE_MODES)
def test_on_policy_rloo_weights_whole_sequences(mode):
    rows = ragged_rows()
    weights, fields = on_policy(rows, draw_sampling_logprobs(rows))
    settings = replace(RLOO, score_old=False, correction=MODES[mode])
    same = [replace(row, old=row.logprobs.detach(), mask=w) for row, w in zip(rows, weights[mode], strict=True)]
    assert_same(trained_loss(make_rloo(settings), rows, **fields), plain_rloo(settings, same, weighed=True), rows)


def records_of(rows, sampling):
    """Return records with scored log-probs; the last token of completions of three or more is not the policy's."""
    records = []
    for number, (row, each) in enumerate(zip(rows, sampling, strict=True)):
        mask = torch.tensor([t < 2 or t < len(each) - 1 for t in range(len(each))], dtype=torch.bool)
        completion = Completion(torch.zeros(len(each), dtype=torch.int32), each.float(), mask, "stop")
        records.append(Record(number // 2, (1,), completion, (row.advantage,), row.advantage, old=row.old.float()))
    return records


@pytest.mark.parametrize("mode", MODES)
def test_with_scored_old_logprobs_the_weights_multiply_the_advantages(mode):
    rows = ragged_rows((3, 1, 6, 2, 5, 4))
    records = records_of(rows, draw_sampling_logprobs(rows))
    plain, corrected = make_grpo(GRPO), make_grpo(replace(GRPO, correction=MODES[mode]))
    before, after = plain.advantages(records, {}), corrected.advantages(records, {})
    counted = []
    for record, old, new in zip(records, before.per_token, after.per_token, strict=True):
        mask = record.completion.loss_mask
        weights = plain_weights(MODES[mode], record.old[mask], record.completion.logprobs[mask])
        torch.testing.assert_close(new[mask], (old[mask] * weights).float())
        counted += (weights[:1] if MODES[mode].per_sequence else weights).tolist()
    assert after.metrics[f"{RATIO}/mean"].value() == pytest.approx(sum(counted) / len(counted), rel=1e-5)
    assert after.metrics[f"{RATIO}/min"].value() == pytest.approx(min(counted))
    assert after.metrics[f"{RATIO}/max"].value() == pytest.approx(max(counted))
    fields = {"sampling_T": torch.cat(draw_sampling_logprobs(rows))}
    assert trained_loss(corrected, rows, **fields) == trained_loss(plain, rows, **fields)


def test_a_kl_in_rloos_reward_fixes_the_weights_on_policy_too():
    settings = replace(RLOO, score_old=False, beta=0.1, correction=MODES["sequence_mask"])
    assert settings.step_correction is None
    assert settings.rollout_correction == MODES["sequence_mask"]
    assert replace(settings, beta=0.0).step_correction == MODES["sequence_mask"]


@pytest.mark.parametrize("mode", MODES)
def test_only_a_weight_per_sequence_needs_the_full_sequence(mode):
    on_policy_settings = replace(GRPO, score_old=False, correction=MODES[mode])
    assert make_grpo(on_policy_settings).needs_full_sequence is MODES[mode].per_sequence
    assert not make_grpo(replace(on_policy_settings, score_old=True)).needs_full_sequence
    assert not make_grpo(replace(on_policy_settings, correction=None)).needs_full_sequence


@pytest.mark.parametrize("mode", MODES)
def test_metrics_do_not_depend_on_micro_batches_and_those_of_weights_are_by_hand(mode):
    algorithm = make_grpo(replace(GRPO, score_old=False, beta=0.1, correction=MODES[mode]))
    rows = ragged_rows()
    sampling = draw_sampling_logprobs(rows)
    weights, _ = on_policy(rows, sampling)
    counts = StepCounts(len(rows), sum(len(row.logprobs) for row in rows))

    def measure(part: slice, share: float) -> dict[str, Metric]:
        fields = {"old_T": None, "sampling_T": torch.cat(sampling[part])}
        shares = {"token_share": 1 / counts.num_tokens, "batch_share": share}
        tokens = token_batch(rows[part], lambda n, _: algorithm.reduction(n, counts), "token", **fields, **shares)
        logprobs_T, entropy_T = (
            torch.cat([getattr(r, x) for r in rows[part]]).detach() for x in ("logprobs", "entropy")
        )
        return algorithm.measure(logprobs_T, entropy_T, tokens)

    merged = merge_metrics(measure(slice(0, 2), 0.5), measure(slice(2, 6), 0.5))
    whole = {name: metric.value() for name, metric in measure(slice(0, 6), 1.0).items()}
    assert {name: metric.value() for name, metric in merged.items()} == pytest.approx(whole)
    counted = torch.cat([w[:1] if MODES[mode].per_sequence else w for w in weights[mode]])
    assert merged[f"{RATIO}/mean"].value() == pytest.approx(counted.mean().item())
    assert merged[f"{RATIO}/min"].value() == pytest.approx(counted.min().item())
    assert merged[f"{RATIO}/max"].value() == pytest.approx(counted.max().item())


def test_a_missing_bound_bounds_nothing_and_a_huge_ratio_stays_finite():
    drift = torch.tensor([-400.0, -1.0, 0.0, 1.0, 400.0])
    ratios = drift.clamp(max=80.0).exp()
    assert correction_weight(Correction(False, True, None, None), drift).equal(ratios)
    assert correction_weight(Correction(False, False, None, 2.0), drift).equal(ratios.clamp(max=2.0))
    assert correction_weight(Correction(False, False, 0.5, None), drift).equal(ratios.clamp(min=0.5))
    assert correction_weight(Correction(False, True, None, 3.0), drift).tolist() == [*ratios[:4].tolist(), 0.0]
    assert correction_weight(Correction(False, True, 0.9, None), drift)[:2].tolist() == [0.0, 0.0]


def test_tokens_without_sampling_logprobs_are_not_corrected():
    rows = ragged_rows()
    nothing = torch.full((sum(len(row.old) for row in rows),), math.nan)
    settings = replace(GRPO, score_old=False, correction=MODES["sequence_mask"])
    plain = trained_loss(make_grpo(replace(settings, correction=None)), rows, old_T=None)
    for sampling in (nothing, None):
        assert trained_loss(make_grpo(settings), rows, old_T=None, sampling_T=sampling) == plain


UNCORRECTED = {"score_old": False, "correction": None}
SAME_ON_POLICY = [
    {},
    {"entropy_bonus": EntropyBonus(0.3)},
    {"beta": 0.2, "bias_corrected_kl": False},
    *[{"correction": MODES[mode]} for mode in SEQUENCE_MODES],
]
OTHER_ON_POLICY = [
    {"beta": 0.2, "bias_corrected_kl": True},
    *[{"correction": correction} for mode, correction in MODES.items() if mode not in SEQUENCE_MODES],
    {"top_entropy_quantile": 0.5},
]


def levels_apart(loss_type, changes):
    """Return how much an on-policy step's gradients differ between token and sequence ratios, and the largest gradient."""
    rows = ragged_rows()
    fields = {"old_T": None, "sampling_T": torch.cat(draw_sampling_logprobs(rows))}
    if "top_entropy_quantile" in changes:  # tokens outside of it come with advantage 0
        kept = torch.cat([row.mask for row in rows])
        fields["advantages_T"] = kept * torch.cat([torch.full_like(row.old, row.advantage) for row in rows])
    settings = replace(GRPO, loss_type=loss_type, **{**UNCORRECTED, **changes})
    by_token, by_row = (
        gradients(trained_loss(make_grpo(replace(settings, importance_level=level)), rows, **fields), rows)
        for level in ("token", "sequence")
    )
    return float((by_token - by_row).abs().max()), float(by_token.abs().max())


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize(
    ("changes", "same"),
    [(each, True) for each in SAME_ON_POLICY] + [(each, False) for each in OTHER_ON_POLICY],
    ids=str,
)
def test_on_policy_the_level_of_ratios_matters_only_if_a_sequences_tokens_differ(loss_type, changes, same):
    apart, largest = levels_apart(loss_type, changes)
    assert apart <= 1e-14 * largest if same else apart > 1e-3 * largest
