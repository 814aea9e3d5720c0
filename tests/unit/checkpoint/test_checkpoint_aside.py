"""A run never mixes its checkpoints with those of another run in the same folder."""

from __future__ import annotations

from datasets import Dataset

from lowpeak import SFTConfig, SFTTrainer
from lowpeak.checkpoint.atomic import last_checkpoint, set_aside
from tiny import char_tokenizer, tiny_model


def folders(tmp_path, *steps):
    for step in steps:
        (tmp_path / f"checkpoint-{step}").mkdir()


def test_checkpoints_beyond_where_a_run_goes_on_are_moved_not_lost(tmp_path):
    folders(tmp_path, 2, 4, 6)
    assert set_aside(tmp_path, 4) == tmp_path / "earlier-1"
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    assert (tmp_path / "earlier-1" / "checkpoint-6").is_dir()


def test_each_time_they_go_to_a_folder_of_their_own(tmp_path):
    folders(tmp_path, 5)
    set_aside(tmp_path, 0)
    folders(tmp_path, 5)
    assert set_aside(tmp_path, 0) == tmp_path / "earlier-2"
    assert set_aside(tmp_path, 0) is None


def test_a_new_run_in_the_same_folder_keeps_the_old_ones_and_resumes_its_own(tmp_path, caplog):
    data = Dataset.from_list([{"prompt": f"{i}=", "completion": str(i)} for i in range(8)])

    def run(steps):
        args = SFTConfig(
            output_dir=str(tmp_path), max_steps=steps, save_steps=1, save_total_limit=1, use_cpu=True, disable_tqdm=True
        )
        return SFTTrainer(tiny_model(), args, train_dataset=data, processing_class=char_tokenizer())

    run(4).train()
    run(2).train()
    assert "now in" in caplog.text
    assert (tmp_path / "earlier-1" / "checkpoint-4").is_dir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
