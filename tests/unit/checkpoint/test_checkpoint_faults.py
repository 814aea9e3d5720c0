"""Real signals and real limits: a saving process is killed at random moments, or runs out of file size."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import polars

from lowpeak.checkpoint.atomic import last_checkpoint, sweep
from lowpeak.journal import Journal, read_steps

NUM_KILLS = 20
NUM_FILES = 3

# Saving in a loop needs no torch, so a process is up in a tenth of a second.
SAVE_IN_A_LOOP = f"""
import sys
from pathlib import Path
from lowpeak.checkpoint.atomic import last_checkpoint, prune, staged, sweep
from lowpeak.journal import Journal

run_dir = Path(sys.argv[1])
sweep(run_dir)
last = last_checkpoint(run_dir)
step = int(last.name.removeprefix("checkpoint-")) if last else 0
journal = Journal(run_dir)
if last:
    journal.resume_at(step)
while True:
    step += 1
    journal.write_step(step, {{"reward": step / 7, "loss": float("nan")}})
    journal.write_rollout(step, [{{"prompt": "p" * 50, "completion": "c" * 900, "reward": 1.0}}] * 4)
    journal.sync()
    with staged(run_dir / f"checkpoint-{{step}}") as stage:
        for number in range({NUM_FILES}):
            (stage / f"part-{{number}}").write_text(f"{{step}}" * 2000 + "end")
    with staged(run_dir / f"checkpoint-{{step}}") as stage:  # the same step again: replaced
        for number in range({NUM_FILES}):
            (stage / f"part-{{number}}").write_text(f"{{step}}" * 2000 + "end")
    prune(run_dir, keep=2)
    print("saved", flush=True)
"""


def whole(checkpoint: Path) -> bool:
    step = checkpoint.stem.removeprefix("checkpoint-")
    parts = [checkpoint / f"part-{number}" for number in range(NUM_FILES)]
    return all(part.is_file() and part.read_text() == step * 2000 + "end" for part in parts)


def kill_while_saving(run_dir: Path, seconds: float) -> None:
    command = [sys.executable, "-c", SAVE_IN_A_LOOP, str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL


def test_a_process_killed_at_random_moments_never_leaves_half_a_checkpoint_under_a_whole_name(tmp_path):
    moments = random.Random(0)
    reached = 0
    leftovers: set[str] = set()
    for _ in range(NUM_KILLS):
        kill_while_saving(tmp_path, moments.uniform(0.0, 0.1))
        folders = [path for path in tmp_path.iterdir() if path.is_dir()]
        leftovers |= {path.suffix for path in folders}
        assert all(whole(path) for path in folders if path.suffix in ("", ".replaced"))
        sweep(tmp_path)
        last = last_checkpoint(tmp_path)
        assert last is not None
        step = int(last.name.removeprefix("checkpoint-"))
        assert step > reached  # it went on where it was, and saved
        reached = step
        check_journal(tmp_path, step)
    assert len(leftovers) > 1  # some kills did hit a save or a removal


def check_journal(run_dir: Path, step: int) -> None:
    pandas.read_json(run_dir / "steps.jsonl", lines=True)  # as the kill left it, before anybody repairs it
    pandas.read_json(run_dir / "rollouts.jsonl", lines=True)
    Journal(run_dir).resume_at(step)
    assert [row["step"] for row in read_steps(run_dir)] == list(range(1, step + 1))
    for name, lines_per_step in (("steps", 1), ("rollouts", 4)):
        assert len(pandas.read_json(run_dir / f"{name}.jsonl", lines=True)) == step * lines_per_step
        frame = polars.read_ndjson(run_dir / f"{name}.jsonl", infer_schema_length=None)
        assert frame["step"].n_unique() == step


SAVE_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from lowpeak.checkpoint.atomic import staged
from lowpeak.errors import CheckpointError

writers = {
    "python": lambda path: path.write_bytes(bytes(400_000)),
    "torch": lambda path: torch.save({"weights": torch.zeros(100_000)}, path),
    "safetensors": lambda path: save_file({"weights": torch.zeros(100_000)}, path),
}
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for how, write in writers.items():
    for step, limit in ((1, hard), (2, 100_000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with staged(Path(sys.argv[1], how, f"checkpoint-{step}")) as stage:
                write(stage / "weights")
        except CheckpointError as error:
            print(how, error, sep=": ")
"""


def test_a_file_size_limit_while_saving_is_a_clear_error_and_the_last_checkpoint_stays_whole(tmp_path):
    command = [sys.executable, "-c", SAVE_UNDER_A_LIMIT, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    assert list(said) == ["python", "torch", "safetensors"]
    for how, message in said.items():
        run_dir = tmp_path / how
        assert message.startswith(f"cannot save the checkpoint {run_dir / 'checkpoint-2'}: File too large;")
        assert f"the last good checkpoint {run_dir / 'checkpoint-1'} is whole" in message
        assert "make room" in message
        assert [path.name for path in run_dir.iterdir()] == ["checkpoint-1"]
        assert (run_dir / "checkpoint-1" / "weights").stat().st_size >= 400_000
