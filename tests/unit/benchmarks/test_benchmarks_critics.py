"""The benchmark of the critic's layouts: what each run is asked for, and what is made of what it tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import critic_layouts
from benchmarks.harness.critics import CriticRequest, make_trainer, settings_of
from benchmarks.harness.shapes import make_model, make_tokenizer


def request(name, folder="folder", **changes):
    plan = critic_layouts.parse(["--quick"])
    return CriticRequest(**{**critic_layouts.request_of(plan, name, 0, Path("start"), Path(folder)), **changes})


def test_every_layout_gets_the_same_rows_and_the_same_settings_but_its_critic():
    names = list(critic_layouts.LAYOUTS)
    first, *others = (request(name) for name in names)
    base = {name: value for name, value in settings_of(first).items() if name != "output_dir"}
    for other in others:
        assert other.lengths == first.lengths
        changed = {n: value for n, value in settings_of(other).items() if n != "output_dir" and base.get(n) != value}
        assert changed == ({} if other.critic is None else {"critic": other.critic})


def test_rounds_draw_other_lengths():
    plan = critic_layouts.parse([])
    asked = [critic_layouts.request_of(plan, "GRPO", number, Path("a"), Path("b")) for number in (0, 1)]
    assert asked[0]["lengths"] != asked[1]["lengths"]
    assert [len(step) for step in asked[0]["lengths"]] == [16, 16, 16]


@pytest.mark.parametrize("name", list(critic_layouts.LAYOUTS))
def test_each_layout_is_the_trainer_that_it_says(tmp_path, name):
    make_model(64, 1).save_pretrained(tmp_path / "start")
    make_tokenizer().save_pretrained(tmp_path / "start")
    trainer = make_trainer(request(name, str(tmp_path), start=str(tmp_path / "start")))
    critic, lora = critic_layouts.LAYOUTS[name]
    assert trainer.run.algorithm.name == ("grpo" if critic is None else "ppo")
    trained = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert any("critic" in n.split(".") for n in trained) == (critic is not None)
    assert any("lora_A.default" in n for n in trained) == lora
    assert any("lora_A.critic" in n for n in trained) == (critic == "adapter")
    assert any("critic.classifier" in n for n in trained) == (critic == "model")


def test_a_row_is_medians_after_the_first_step_and_peaks_above_the_empty_process():
    steps = [{"train": 9.0, "total": 9.5}, {"train": 2.0, "total": 3.0}, {"train": 4.0, "score": 1.0, "total": 5.0}]
    run = {
        "steps": steps, "wall": [10.0, 4.0, 6.0], "empty_rss_mb": 100.0, "start_rss_mb": 150.0, "peak_rss_mb": 400.0,
        "peak_rss_mb_by_phase": {"train": 400.0, "score": 210.0}, "trained": 7, "parameters": 9, "loss": [0.0],
    }  # fmt: skip
    row = critic_layouts.summary([run, {**run, "peak_rss_mb": 420.0}])
    assert row["cpu_seconds"] == {"score": 0.5, "train": 3.0, "optimizer": 0.0, "total": 4.0}
    assert (row["wall_seconds"], row["loaded_mb"], row["peak_mb"]) == (5.0, 50.0, 320.0)
    assert row["peak_mb_by_phase"] == {"train": 300.0, "score": 110.0}


def test_a_layout_is_compared_with_grpo_of_the_same_tuning():
    assert critic_layouts.base_of("PPO, model") == "GRPO"
    assert critic_layouts.base_of("PPO, adapter, LoRA") == "GRPO, LoRA"
