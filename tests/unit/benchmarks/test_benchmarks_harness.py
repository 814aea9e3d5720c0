"""What the benchmarks share: probes, processes, the report and the task."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.harness.accuracy import measure, share_equal
from benchmarks.harness.canned import can_peer, canned_ids, our_rollouts
from benchmarks.harness.clock import PhaseClock
from benchmarks.harness.process import MemoryWatch, SideError, last_object, one_thread, resident_bytes, run_apart
from benchmarks.harness.report import deviation, mean, ratio, require, versions
from benchmarks.harness.side import step_logs
from benchmarks.harness.task import IGNORED, encode, noisy_sort, trainer_settings, warm_start

import lowpeak


def ticking(*times: float):
    """A clock that says these times, one after the other."""
    left = iter(times)
    return lambda: next(left)


class Worker:
    """Something with methods to time, one of which calls the other."""

    def outer(self, number: int) -> int:
        return self.inner() + number

    def inner(self) -> int:
        return 40


def test_a_phase_inside_another_is_not_counted_twice():
    clock, worker = PhaseClock(ticking(0.0, 1.0, 4.0, 10.0)), Worker()
    clock.watch(worker, "outer", "train")
    clock.watch(worker, "inner", "reward")
    assert worker.outer(2) == 42
    assert clock.seconds == {"train": 1.0 + 6.0, "reward": 3.0}


def test_time_between_phases_belongs_to_none():
    clock = PhaseClock(ticking(0.0, 1.0, 100.0, 102.0))
    for _ in range(2):
        with clock.phase("train"):
            pass
    assert clock.seconds == {"train": 3.0}


def test_the_memory_watch_keeps_the_most_that_it_saw():
    seen = iter([5, 9, 2])
    watch = MemoryWatch(lambda: next(seen, None))
    with watch:
        while watch.peak_bytes != 9:
            pass
    assert watch.peak_bytes == 9


def test_resident_memory_is_read_from_proc_and_none_where_the_process_is_gone(tmp_path):
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "status").write_text("Name:\tpython\nVmHWM:\t    9000 kB\nVmRSS:\t    3000 kB\n")
    assert resident_bytes(12, proc=tmp_path) == 3000 * 1024
    assert resident_bytes(13, proc=tmp_path) is None


def test_the_last_line_is_the_result_whatever_was_printed_before():
    assert last_object('noise\n{"a": 1}\n{"b": 2}\n', "side") == {"b": 2}


@pytest.mark.parametrize("output", ["", "done\n", "3\n"])
def test_a_side_without_a_result_is_an_error(output: str):
    with pytest.raises(SideError, match="side ended without a JSON object"):
        last_object(output, "side")


def test_a_side_that_fails_is_an_error_with_its_status():
    with pytest.raises(SideError, match=r"benchmarks\.nothing ended with status 1"):
        run_apart("benchmarks.nothing", {})


def test_a_side_runs_with_one_thread_and_without_the_hub():
    environment = one_thread({"OMP_NUM_THREADS": "8", "HOME": "/home"})
    assert (environment["OMP_NUM_THREADS"], environment["HF_HUB_OFFLINE"], environment["HOME"]) == ("1", "1", "/home")


def test_a_missing_peer_is_one_sentence_and_status_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        require("no_such_peer", "install it")
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "no_such_peer is not installed, and this command needs it: install it.\n"


def test_the_report_names_the_versions_that_were_measured():
    found = versions()
    assert found["lowpeak"] == "0.1.0"
    assert found["torch"] == torch.__version__


def test_the_logs_of_steps_are_without_summaries_and_evaluations():
    step = {"loss": 0.1, "frac_reward_zero_std": 0.5, "step": 10}
    summary = {"train_loss": 0.1, "train_runtime": 3.0, "frac_reward_zero_std": 0.4, "step": 12}
    assert step_logs([step, {"eval_reward": 1.0, "step": 10}, summary]) == [step]


def test_statistics_of_seeds():
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert deviation([1.0, 3.0]) == pytest.approx(2**0.5)
    assert deviation([1.0]) == 0.0
    assert (ratio(1.0, 4.0), ratio(1.0, 0.0)) == (0.25, None)


def test_demonstrations_are_learned_on_their_completion_and_end():
    tokenizer = noisy_sort.make_tokenizer()
    inputs_BL, labels_BL = encode(tokenizer, ["418302=", "000000="], ["012348", "000000"])
    assert labels_BL[:, :7].eq(IGNORED).all()
    assert labels_BL[:, 7:].equal(inputs_BL[:, 7:])
    assert tokenizer.decode(inputs_BL[0]) == "418302=012348<eos>"


def test_a_warm_start_is_the_same_for_the_same_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        warm_start(tmp_path / name, seed, steps=1)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_measuring_accuracy_leaves_the_global_random_state_alone():
    model, tokenizer = noisy_sort.make_model(0).eval(), noisy_sort.make_tokenizer()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = measure(model, tokenizer, ["418302="] * 4, ["012348"] * 4)
    assert torch.rand(1).equal(expected)
    assert measure(model, tokenizer, ["418302="] * 4, ["012348"] * 4) == first
    assert share_equal(["a", "b", "c", "d"], ["a", "b", "x", "d"]) == 0.75


class Trainer:
    """As much of a trainer as the canned completions need."""

    def __init__(self) -> None:
        self.processing_class = noisy_sort.make_tokenizer()


def test_both_sides_get_the_same_canned_completions():
    ours, peer = Trainer(), Trainer()
    prompts = noisy_sort.draw_prompts(4, seed=0)
    can_peer(peer, "rloo")
    entries = [prompt for prompt in prompts for _ in range(8)]
    repeated = [peer.processing_class(prompt)["input_ids"] for prompt in entries]
    found = our_rollouts(entries, ours)
    assert found["completion_ids"] == peer._generate_single_turn(repeated, None, {})
    assert found["prompt_ids"] == repeated


def test_canned_completions_are_of_every_kind():
    tokenizer = noisy_sort.make_tokenizer()
    rows = [(p, canned_ids(tokenizer, p, n)) for p in noisy_sort.draw_prompts(32, seed=0) for n in range(8)]
    texts = [(noisy_sort.answer_to(prompt), tokenizer.decode(ids)) for prompt, ids in rows]
    assert 0.2 < sum(text == f"{answer}<eos>" for answer, text in texts) / len(texts) < 0.6
    assert {len(ids) for _, ids in rows} == {5, 7}
    assert any(not text.endswith("<eos>") for _, text in texts)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_our_trainer_takes_the_settings_that_the_peer_takes(name: str, tmp_path):
    settings = trainer_settings(name.lower(), seed=0, steps=20, output_dir=tmp_path)
    args = getattr(lowpeak, f"{name}Config")(**settings)
    different = {key for key, value in settings.items() if getattr(args, key) != value}
    assert different <= {"report_to", "gradient_checkpointing"}  # transformers spells these in its own way
    assert json.loads(json.dumps(settings)) == settings
