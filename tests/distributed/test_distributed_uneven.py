"""A rank that has fewer micro-batches than another, or no row that counts, with a KL in the loss: the step is one process's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from setups import build, error_of, note, prepare, rank, seen

from child_processes import succeed_on_ranks
from tiny_models import char_tokenizer

LONG = [4, 7, 8, 3, 9, 5] * 4
# Of each case: which of a rollout's four completions are long, and which of them count.
CASES = {"fewer": ((1, 0, 0, 0), (1, 1, 1, 1)), "none": ((0, 0, 0, 0), (0, 1, 0, 0))}


def train_all(place: Path) -> None:
    """Every case under both kinds of units; what each trained to."""
    found: dict[str, Any] = {}
    for case in CASES:
        for level in ("token", "sequence"):
            trainer = _trainer(place, case, level)
            trainer.train()
            rows = [row for row in trainer.state.log_history if "loss" in row]
            weights = {name: p.detach().flatten()[:7].tolist() for name, p in trainer.model.named_parameters()}
            found[f"{case}, {level}"] = {
                "losses": [row["loss"] for row in rows],
                "kls": [row["kl"] for row in rows],
                "weights": weights,
            }
    note(place, **found)


def _trainer(place: Path, case: str, level: str) -> Any:
    tokenizer = char_tokenizer()
    lengths, counts = CASES[case]
    first: list[str] = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The case's first pair of completions for the first prompt of the data, the second for others."""
        answer: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for number, prompt in enumerate(prompts):
            i = number % 2 + (0 if prompt in first else 2)
            ids = [*(LONG if lengths[i] else []), 5 + i, 1]
            answer["prompt_ids"].append(tokenizer(prompt)["input_ids"])
            answer["completion_ids"].append(ids)
            answer["logprobs"].append([-2.0] * len(ids))
            answer["env_mask"].append([counts[i]] * len(ids))
        return answer

    arguments = {
        "num_generations": 2, "per_device_train_batch_size": 4 // int(os.environ["WORLD_SIZE"]), "micro_batch_tokens": 12,
        "max_completion_length": 32, "importance_sampling_level": level, "beta": 0.1, "shuffle_dataset": False,
        "share_prompt": False,
    }  # fmt: skip
    trainer = build("GRPO", place / f"{case}-{level}", prepare("ddp") | arguments, rollout_func=rollout_func)
    first += [row["prompt"] for row in trainer.train_dataset][::2]
    return trainer


def hold_other_data(place: Path) -> None:
    """Rank 1's file has a row less, or its folder is another one."""
    found = {}
    for name, rows, folder in (("rows", 23, "run"), ("folder", 24, "other")):
        out = place / (folder if rank() == 1 else "run")
        trainer = build("GRPO", out, prepare("ddp"))
        # Past the refusal of a trainer whose run was built with its dataset.
        vars(trainer)["train_dataset"] = trainer.train_dataset.select(range(rows if rank() == 1 else 24))
        found[name] = error_of(trainer.train)
    note(place, **found)


def test_steps_of_uneven_ranks_are_those_of_one_process(tmp_path):
    succeed_on_ranks(train_all, tmp_path / "one", world_size=1)
    succeed_on_ranks(train_all, tmp_path / "two")
    (alone,) = seen(tmp_path / "one", 1)
    for found in seen(tmp_path / "two"):
        for case, expected in alone.items():
            assert found[case]["losses"] == pytest.approx(expected["losses"], abs=1e-5), case
            assert found[case]["kls"] == pytest.approx(expected["kls"], abs=1e-5), case
            for name, values in expected["weights"].items():
                assert found[case]["weights"][name] == pytest.approx(values, abs=5e-6), (case, name)
    assert all(kl > 0 for found in alone.values() for kl in found["kls"][1:])


def test_ranks_with_other_data_or_another_folder_do_not_begin(tmp_path):
    succeed_on_ranks(hold_other_data, tmp_path)
    for found in seen(tmp_path):
        for case, words in (
            ("rows", ("DataError: ", "train_dataset", "24", "rank 0", "23", "rank 1")),
            ("folder", ("ArgumentError: ", "output_dir", f"'{tmp_path}/run'", "rank 0", f"'{tmp_path}/other'")),
        ):
            assert [word for word in words if word not in found[case]] == []
