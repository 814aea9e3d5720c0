"""A library whose trainers record what they are made with, and a folder with data and a reward, for tests of commands."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from lowpeak.trainers.configs import GRPOConfig, OnlineDPOConfig, RewardConfig, RLOOConfig, SFTConfig


class RecordingTrainer:
    """Keeps what it was made with and what it was asked to do."""

    made: list[RecordingTrainer]
    was_finished = False

    def __init__(self, **keywords):
        self.keywords = keywords
        self.calls = []
        type(self).made.append(self)

    def train(self):
        self.calls.append("train")

    def save_model(self):
        self.calls.append("save_model")

    def push_to_hub(self, dataset_name):
        self.calls.append(("push_to_hub", dataset_name))

    def dry_run(self):
        return {"model": {"parameters": 7, "device": object}, "sizes": (1, 2)}


@pytest.fixture
def library():
    trainer = type("Trainer", (RecordingTrainer,), {"made": []})
    return SimpleNamespace(
        GRPOConfig=GRPOConfig, RLOOConfig=RLOOConfig, SFTConfig=SFTConfig, RewardConfig=RewardConfig,
        OnlineDPOConfig=OnlineDPOConfig, OnlineDPOTrainer=trainer, RewardTrainer=trainer,
        GRPOTrainer=trainer, RLOOTrainer=trainer, SFTTrainer=trainer, made=trainer.made,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rows = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "judge.py").write_text("def right(completions, **columns):\n    return [1.0 for _ in completions]\n")
    return tmp_path
