"""The benchmark's clock finds the phases of a trainer as it is now."""

from __future__ import annotations

from benchmarks.harness.clock import PhaseClock, watch_phases
from datasets import Dataset

from lowpeak import GRPOConfig, GRPOTrainer
from tiny import char_tokenizer, tiny_model


def test_each_phase_of_our_trainer_is_timed(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=4,
        max_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Dataset.from_list([{"prompt": f"{i}="} for i in range(4)])

    def ones(completions, **columns):
        return [float(text.count("1")) for text in completions]

    trainer = GRPOTrainer(tiny_model(), ones, args, data, processing_class=char_tokenizer())
    clock = PhaseClock()
    watch_phases(trainer, "lowpeak", clock)
    trainer.train()
    assert {"rollout", "reward", "train"} <= clock.seconds.keys()
