"""How a run starts on several ranks, what a step took over them, and what it says where memory runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset

import lowpeak
from lowpeak.checkpoint.folders import STATE_FILE
from lowpeak.errors import ArgumentError, CheckpointError, DataError, MemoryExhaustedError
from lowpeak.memory.phases import Phase
from lowpeak.memory.tracker import MemoryTracker, PhaseUse
from lowpeak.ranks import Ranks
from lowpeak.records import Metric
from lowpeak.setup.elastic_restart import record_launch
from lowpeak.setup.preflight import require_same_arguments, require_same_data, silence_nonzero_ranks
from lowpeak.setup.resume import find_resume_checkpoints
from lowpeak.trainers.configs import GRPOConfig
from lowpeak.training.memory_errors import explain_out_of_memory
from lowpeak.training.step_metrics import gather_usage, usage_metrics
from small_runs import make


def checkpoint(folder: Path, step: int) -> Path:
    found = folder / f"checkpoint-{step}"
    found.mkdir(parents=True)
    (found / STATE_FILE).write_text("{}")
    return found


def to_resume(folder: Path, resume_from: Any) -> list[Path]:
    return find_resume_checkpoints(SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume_from))[1]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which life of which launch this process is in."""

    def be_in(restarts: int, launch: str = "none") -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)

    return be_in


@pytest.mark.parametrize("launch", ["none", "job 7"])
@pytest.mark.parametrize("resume_from", [None, False, True, "checkpoint-2"])
def test_a_run_that_torchrun_started_again_goes_on_from_its_last_checkpoint(tmp_path, life, resume_from, launch):
    life(0, launch)
    record_launch(tmp_path, 0)
    checkpoint(tmp_path, 2)
    life(1, launch)
    record_launch(tmp_path, 2)
    last = checkpoint(tmp_path, 4)
    (tmp_path / "checkpoint-6.staged").mkdir()
    life(2, launch)
    assert to_resume(tmp_path, resume_from) == [last]
    assert not (tmp_path / "checkpoint-6.staged").exists()


def test_a_first_start_and_one_that_saved_nothing_do_as_the_arguments_say(tmp_path, life):
    life(1)
    assert to_resume(tmp_path, None) == []
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        to_resume(tmp_path, True)
    life(0)
    found = checkpoint(tmp_path, 2)
    assert to_resume(tmp_path, None) == []
    assert to_resume(tmp_path, True) == [found]


def test_checkpoints_of_another_run_and_up_to_the_one_that_the_first_life_went_on_from_are_not_its_own(tmp_path, life):
    life(0, "an earlier launch")
    record_launch(tmp_path, 0)
    checkpoint(tmp_path, 4)
    life(1, "this launch")
    assert to_resume(tmp_path, None) == []
    elsewhere = checkpoint(tmp_path / "elsewhere", 5)
    run = tmp_path / "run"
    checkpoint(run, 2)
    life(0)
    record_launch(run, 5)
    life(1)
    assert to_resume(run, str(elsewhere)) == [elsewhere]
    own = checkpoint(run, 6)
    assert to_resume(run, str(elsewhere)) == [own]


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    logger = logging.getLogger("lowpeak")
    before = logger.level
    yield logger
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("should_log", "replica", "expected"),
    [(True, "warning", logging.NOTSET), (False, "warning", logging.ERROR), (False, "info", logging.INFO)],
)
def test_one_process_logs_unless_replicas_were_asked_to(level, should_log, replica, expected):
    level.setLevel(logging.NOTSET)
    own = logging.INFO if replica == "info" else logging.WARNING
    silence_nonzero_ranks(
        SimpleNamespace(should_log=should_log, log_level_replica=replica, get_process_log_level=lambda: own)
    )
    assert level.level == expected


class Told(Ranks):
    """Two ranks, the other of which was told `theirs` where they differ."""

    def __init__(self, **theirs: object) -> None:
        super().__init__()
        self.theirs = {name: repr(value) for name, value in theirs.items()}

    def gather(self, item: Any) -> list[Any]:
        return [item, {**item, **self.theirs}]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("max_steps", 7), ("seed", 1), ("learning_rate", 3e-4), ("beta", 0.5), ("output_dir", "/somewhere/else")],
)
def test_ranks_that_were_told_different_things_are_refused(tmp_path, name, theirs):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=3)
    with pytest.raises(ArgumentError, match=rf"^{name} .*{getattr(args, name)}.*rank 0 .*{theirs}.*rank 1"):
        require_same_arguments(args, Told(**{name: theirs}))


class Listening(Ranks):
    """Two ranks that say the same; what they said."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def gather(self, item: Any) -> list[Any]:
        self.items.append(item)
        return [item, item]


def test_what_a_rank_shows_and_how_it_writes_its_folder_are_its_own(tmp_path):
    ranks = Listening()
    require_same_arguments(GRPOConfig(output_dir=os.path.relpath(tmp_path), use_cpu=True), ranks)
    assert ranks.items[0].keys().isdisjoint({"local_rank", "report_to", "log_level", "logging_steps", "run_name"})
    assert ranks.items[0]["output_dir"] == repr(str(tmp_path))


class Holding(Ranks):
    """Two ranks, the other of which has other data."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def gather(self, item: Any) -> list[Any]:
        other = Listening()
        require_same_data({"train_dataset": self.theirs}, other)
        return [item, other.items[0]]


DATA = [{"prompt": f"{i}=", "answer": i} for i in range(4)]


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (DATA[:3], " 4 .*rank 0 .* 3 .*rank 1"),
        ([{"prompt": row["prompt"]} for row in DATA], "answer, prompt .*rank 0 .*prompt .*rank 1"),
        (DATA[::-1], "first .*SHA-256 .*rank 1"),
        ([*DATA[:3], {"prompt": "9=", "answer": 9}], "last .*SHA-256 .*rank 1"),
    ],
)
def test_ranks_with_different_data_are_refused(theirs, words):
    for build in (list, Dataset.from_list):
        with pytest.raises(DataError, match=rf"^train_dataset .*{words}"):
            require_same_data({"train_dataset": build(DATA)}, Holding(build(theirs)))


def test_the_same_data_streams_and_none_pass():
    require_same_data({"train_dataset": Dataset.from_list(DATA)}, Holding(Dataset.from_list(DATA)))
    stream = Dataset.from_list(DATA).to_iterable_dataset()
    require_same_data({"train_dataset": stream, "eval_dataset": None, "other": {"a": DATA}}, Listening())


class Another(Ranks):
    """Two ranks of which the other one has these numbers."""

    def __init__(self, theirs: Sequence[float]) -> None:
        super().__init__()
        self.theirs = theirs

    def max(self, numbers: Sequence[float]) -> list[float]:
        return [max(pair) for pair in zip(numbers, self.theirs, strict=True)]


def test_a_step_took_what_it_took_where_it_took_most():
    uses = {"rollout": PhaseUse(2.0, 100, 150), "train": PhaseUse(1.0, 700, 710)}
    theirs = {Phase.ROLLOUT: (3.0, 90.0, 160.0), Phase.TRAIN: (0.5, 800.0, -1.0), Phase.SAVE: (0.25, 10.0, -1.0)}
    numbers = [0.0, 4.5, *(number for phase in Phase for number in theirs.get(phase, (-1.0, -1.0, -1.0)))]
    usage = gather_usage(4.0, uses, False, Another(numbers))
    assert (usage.seconds, usage.stopping) == (4.5, False)
    assert usage.phases == {
        "rollout": PhaseUse(3.0, 100, 160),
        "train": PhaseUse(1.0, 800, 710),
        "save": PhaseUse(0.25, 10),
    }
    reserved = {name: value for name, value in usage_metrics(usage, 0).items() if name.startswith("reserved_memory/")}
    assert reserved == {
        "reserved_memory/rollout": Metric(160.0, 1.0, "max"),
        "reserved_memory/train": Metric(710.0, 1.0, "max"),
    }


def test_one_rank_that_was_asked_to_stop_is_enough():
    nothing = [0.0] * (2 + 3 * len(Phase))
    assert gather_usage(0.0, {}, True, Another(nothing)).stopping
    assert gather_usage(0.0, {}, False, Another([1.0, *nothing[1:]])).stopping
    assert not gather_usage(0.0, {}, False, Ranks()).stopping


def test_where_a_run_is_outlasts_the_error_that_left_a_phase():
    tracker = MemoryTracker("cpu")
    assert tracker.current_phase == "the start"
    with tracker.phase(Phase.EVALUATE), tracker.phase(Phase.REWARD):
        assert tracker.current_phase == "phase reward"
    assert tracker.current_phase == "the step, after phase evaluate"
    with pytest.raises(KeyError), tracker.phase(Phase.EVALUATE), tracker.phase(Phase.REWARD):
        raise KeyError
    assert tracker.current_phase == "phase reward"
    with tracker.phase(Phase.SCORE):
        assert tracker.current_phase == "phase score"


@pytest.mark.parametrize("kind", ["GRPO", "SFT"])
def test_a_runs_device_has_the_index_that_accelerate_omits_in_a_single_process(tmp_path, monkeypatch, kind):
    indexed, config = torch.device("cpu", 0), getattr(lowpeak, f"{kind}Config")
    monkeypatch.setattr(config, "device", property(lambda args: torch.device(args._setup_devices.type, 0)))
    try:
        trainer = make(kind, tmp_path)
        assert trainer.run.logprob_settings.device == trainer.accelerator.device == indexed
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_cudnns_attention_is_off_from_the_start_of_a_run_unless_the_user_turns_it_on_later(tmp_path):
    backend = torch.backends.cuda
    before = backend.cudnn_sdp_enabled()
    try:
        for kind in ("GRPO", "SFT"):
            backend.enable_cudnn_sdp(True)
            trainer = make(kind, tmp_path, max_steps=1)
            assert not backend.cudnn_sdp_enabled()
        backend.enable_cudnn_sdp(True)
        trainer.train()
        assert backend.cudnn_sdp_enabled()
    finally:
        backend.enable_cudnn_sdp(before)


SIZES = {"micro_batch_tokens": 64, "logprob_chunk_size": 16, "kv_cache_bytes": 4096}
TRAINER = SimpleNamespace(run=SimpleNamespace(sizes=SimpleNamespace(as_dict=lambda: SIZES)))


@pytest.mark.parametrize(
    ("phase", "error", "remedy"),
    [
        (Phase.ROLLOUT, torch.OutOfMemoryError("tried 2 GiB"), "kv_cache_bytes .*4096"),
        (Phase.TRAIN, MemoryError(), "micro_batch_tokens .*64 .*logprob_chunk_size .*16"),
        (Phase.SCORE, RuntimeError("DefaultCPUAllocator: can't allocate memory"), "micro_batch_tokens .*64"),
        (Phase.OPTIMIZER, torch.OutOfMemoryError("tried 2 GiB"), "ranks"),
        (Phase.SYNC, torch.OutOfMemoryError("tried 2 GiB"), "2 GiB"),
    ],
)
def test_out_of_memory_says_where_and_what_to_set(phase, error, remedy):
    with pytest.raises(MemoryExhaustedError, match=rf"{phase}: .*{remedy}"), explain_out_of_memory(phase, TRAINER):
        raise error


def test_other_errors_of_a_phase_stay_as_they_are():
    error = RuntimeError("a shape does not fit")
    with pytest.raises(RuntimeError) as caught, explain_out_of_memory(Phase.TRAIN, TRAINER):
        raise error
    assert caught.value is error
