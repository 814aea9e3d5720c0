"""TRL's recipes of papers for GRPO and RLOO train as they are: lengths and sizes are cut, nothing else.

The recipes are those of the paper index in TRL's documentation; the last two are those of TRL 1.16's help texts. The two
that need vLLM are in tests/with_vllm/test_vllm_runs.py.
"""

from __future__ import annotations

import pytest
import torch

from lowpeak.rewards.builtin import SoftOverlong
from small_runs import column, make, rows, spread, weights

pytestmark = pytest.mark.extended

DAPO = {"mask_truncated_completions": True, "loss_type": "dapo", "epsilon_high": 0.28, "epsilon": 0.2, "beta": 0.0}

# The recipe's arguments, with the paper; sizes that are cut, so that 512 sequences a step become 8.
RECIPES = {
    "DeepSeekMath, arXiv 2402.03300": ("GRPO", {
        "loss_type": "grpo", "beta": 0.001, "epsilon": 10.0,
        "steps_per_generation": 16 // 16, "gradient_accumulation_steps": 128 // 16, "per_device_train_batch_size": 4}),
    "GSPO, arXiv 2507.18071": ("GRPO", {
        "importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.0, "epsilon": 3e-4,
        "epsilon_high": 4e-4, "gradient_accumulation_steps": 1, "steps_per_generation": 4}),
    "DAPO, arXiv 2503.14476": ("GRPO", {**DAPO, "reward_funcs": [spread, SoftOverlong(5, 2)]}),
    "80/20, arXiv 2506.01939": ("GRPO", {
        **DAPO, "top_entropy_quantile": 0.2, "reward_funcs": [spread, SoftOverlong(5, 2)]}),
    "Dr. GRPO, arXiv 2503.20783": ("GRPO", {
        "loss_type": "dr_grpo", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "beta": 0.0}),
    "Lite PPO, arXiv 2508.08221": ("GRPO", {
        "scale_rewards": "batch", "loss_type": "dapo", "beta": 0.0, "top_p": 0.99, "top_k": 100, "temperature": 0.99,
        "num_iterations": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 32 // 8,
        "steps_per_generation": 8 // 8}),
    "ScaleRL, arXiv 2510.13786": ("GRPO", {
        "loss_type": "cispo", "epsilon_high": 5.0, "scale_rewards": "batch", "cast_lm_head_to_fp32": True}),
    "SAPO, arXiv 2511.20347": ("GRPO", {
        "loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "scale_rewards": "group"}),
    "DeepSeek-V3.2, arXiv 2512.02556, unbiased KL": ("GRPO", {"beta": 0.001, "use_bias_correction_kl": True}),
    "DeepSeek-V3.2, arXiv 2512.02556, off-policy mask": ("GRPO", {"off_policy_mask_threshold": 0.5}),
    "GDPO, arXiv 2601.05242": ("GRPO", {
        "multi_objective_aggregation": "normalize_then_sum", "reward_funcs": [spread, SoftOverlong(5, 2)]}),
    "LUSPO, arXiv 2602.05261": ("GRPO", {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3}),
    "INTELLECT-2, arXiv 2505.07291": ("GRPO", {"delta": 4, "epsilon": 0.2, "beta": 0.001, "learning_rate": 3e-7}),
    "RLOO, arXiv 2402.14740": ("RLOO", {
        "steps_per_generation": 2, "beta": 0.03, "num_generations": 2, "learning_rate": 1e-6}),
    "REINFORCE++, arXiv 2501.03262": ("RLOO", {"normalize_advantages": True}),
    "VESPO, arXiv 2602.10693": ("GRPO", {"loss_type": "vespo"}),
    "Skywork-OR1, arXiv 2505.22312": ("GRPO", {"use_adaptive_entropy": True, "entropy_coef": 0.001}),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_of_trls_paper_index_trains_two_steps(tmp_path, recipe):
    kind, arguments = RECIPES[recipe]
    run = make(kind, tmp_path, data=rows(32), **{"reward_funcs": spread, **arguments})
    before = weights(run)
    run.train()
    assert run.state.global_step == 2
    assert any(not torch.equal(before[name], after) for name, after in weights(run).items())
    assert all(torch.isfinite(torch.tensor(column(run, "grad_norm"))))
