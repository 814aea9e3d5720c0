"""Two runs cannot write into one folder at a time."""

from __future__ import annotations

import subprocess
import sys

import pytest
from datasets import Dataset

from lowpeak import SFTConfig, SFTTrainer
from lowpeak.checkpoint.occupied import occupied
from lowpeak.errors import CheckpointError
from tiny import char_tokenizer, tiny_model

HOLD = """
import sys
from pathlib import Path
from lowpeak.checkpoint.occupied import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_trains_into_is_told_and_free_once_that_has_died(tmp_path):
    args = SFTConfig(output_dir=str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True)
    make = lambda: SFTTrainer(  # noqa: E731
        tiny_model(), args, Dataset.from_list([{"text": "12"}]), processing_class=char_tokenizer()
    )
    run = make()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=r"another run is writing into .*: wait until it ends, or name another"
        ):
            run.train()
        with pytest.raises(CheckpointError, match="another run is writing into"):
            make()
    finally:
        other.kill()
        other.communicate(timeout=30)
    run.train()


def test_the_same_process_may_hold_its_folder_twice(tmp_path):
    with occupied(tmp_path), occupied(tmp_path):
        pass
