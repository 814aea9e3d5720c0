"""DPO, KTO and distillation give TRL's losses, gradient norms and metrics on the same weights and rows."""

from __future__ import annotations

import pytest

from child_processes import call
from trl_wheel import needs_trl

MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
CASES = [
    ("DPO", {}),
    ("KTO", {"desirable_weight": 1.5}),
    ("Distillation", {}),
    ("Distillation", {"beta": 0.0}),
    ("Distillation", {"beta": 0.5, "temperature": 0.7}),
    ("Distillation", {"conversational": True}),
    ("DPO", {"conversational": True}),
    ("DPO", {**MPO, "ld_alpha": 0.5}),
    *(("DPO", {"loss_type": [name]}) for name in ("hinge", "ipo", "sigmoid_norm", "bco_pair", "nca_pair", "sppo_hard")),
    *(("DPO", {"loss_type": [name]}) for name in ("apo_zero", "apo_down", "sft")),
    ("DPO", {"loss_type": ["discopop"], "discopop_tau": 0.5}),  # at 0.05 it magnifies rounding twentyfold
    *(("DPO", {"loss_type": [name], "label_smoothing": 0.1}) for name in ("robust", "exo_pair")),
    ("DPO", {"ld_alpha": 0.0}),
    *(("DPO", {"f_divergence_type": name}) for name in ("forward_kl", "js_divergence")),
    ("DPO", {"f_divergence_type": "alpha_divergence", "loss_type": ["ipo"]}),
    ("DPO", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    ("KTO", {"conversational": True}),
    ("KTO", {"loss_type": "apo_zero_unpaired"}),
    ("KTO", {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}),
]


def run(case, place):
    from trl_preferences import compare

    compare(place, *case)


@needs_trl
@pytest.mark.parametrize(
    ("kind", "changes"), [*CASES[:3], *(pytest.param(*case, marks=pytest.mark.release) for case in CASES[3:])]
)
def test_four_steps_are_trls_to_six_digits(kind, changes, tmp_path):
    assert call(run, (kind, changes), tmp_path) == 0, (tmp_path / "log").read_text()[-3000:]
