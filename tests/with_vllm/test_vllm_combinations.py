"""Every algorithm with a real colocated vLLM, full or under LoRA, merged or served alone, with and without a reference.

Each pair of these stands in a run (`all_pairs`), whose completions must be written by the policy as it is: a critic never
gets into the engine.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from peft import LoraConfig
from setups import classes_of
from test_distributed_combinations import ALGORITHMS, SETTINGS, is_refused

from all_pairs import Case, all_pairs, each_value
from vllm_runs import DATA, TOKENIZER, arguments_in, small_model, spread, steps_of

WITH_VLLM = {
    "algorithm": SETTINGS["algorithm"],
    "weights": ["full", "merged", "alone"],
    "reference": SETTINGS["reference"],
}
DRIFT = "sampling/sampling_logp_difference/max"
SERVED_ALONE = {"enable_lora": True, "max_lora_rank": 8}


def is_possible(case: Case) -> bool:
    return not is_refused({**case, "tuning": "full" if case["weights"] == "full" else "lora"})


def trainer_of(case: Case, folder: Any) -> Any:
    name, arguments = ALGORITHMS[case["algorithm"]]
    config, trainer = classes_of(name)
    beta = 0.1 if case["reference"] == "with" else 0.0
    given: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "beta": beta}
    more: dict[str, Any] = {}
    if case["weights"] != "full":
        targets = ["q_proj", "v_proj", "o_proj"]
        more["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    if case["weights"] == "alone":
        given["vllm_engine_kwargs"] = SERVED_ALONE
    args = config(**arguments_in(folder, **arguments, **given))
    more |= {"train_dataset": DATA, "eval_dataset": DATA.select(range(2)), "processing_class": TOKENIZER}
    return trainer(model=small_model(), reward_funcs=spread, args=args, **more)


CASES = all_pairs(WITH_VLLM, is_possible)
CORE = each_value(CASES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id="-".join(c.values()), marks=() if c in CORE else pytest.mark.release) for c in CASES],
)
def test_a_real_vllm_writes_with_the_policys_own_weights(tmp_path: Any, case: Case) -> None:
    run = trainer_of(case, tmp_path)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    run.train()
    steps = steps_of(run)
    assert len(steps) == 2
    assert all(step[DRIFT] < 1e-4 for step in steps)
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert len([row for row in run.state.log_history if "eval_reward" in row]) == 1
    policy = [name for name in before if "critic" not in name.split(".")]
    trained = dict(run.model.named_parameters())
    assert any(float((trained[name] - before[name]).abs().max()) > 1e-4 for name in policy)
    rows = [json.loads(line) for line in (tmp_path / "journal" / "steps.jsonl").read_text().splitlines()]
    first, *later = (row["push/bytes"] for row in rows if "push/bytes" in row)
    num_trained = 4 * sum(before[name].numel() for name in policy)
    for second in later:
        if case["weights"] == "alone":
            assert second == num_trained  # the adapter
            assert first > 5 * second  # the base, once
        else:  # what training does not change comes once
            assert num_trained == second == first if case["weights"] == "full" else num_trained < second < first
