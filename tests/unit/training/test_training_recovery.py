"""Which sizes a phase that ran out of memory gets next, and what of them checkpoints and resumed runs have."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import pytest
import torch

from lowpeak.arguments.base import MemorySettings
from lowpeak.arguments.vllm import ColocateSettings, ServerSettings
from lowpeak.errors import MemoryExhaustedError
from lowpeak.journal import read_rows
from lowpeak.memory.phases import Phase
from lowpeak.sizes.run_sizes import Sizes, choose_layout
from lowpeak.training.recorded_sizes import record_sizes, take_sizes
from lowpeak.training.recovery import Demand, smaller_sizes
from small_runs import DATA, make, rows

SIZES = Sizes(4096, 64, 1 << 30, choose_layout(MemorySettings(), None))
ONE_EACH = Demand(batch_tokens=700, batch_units=1)


@pytest.mark.parametrize("phase", [Phase.SCORE, Phase.TRAIN])
def test_passes_halve_what_micro_batches_had_then_chunks_and_then_nothing(phase):
    split = smaller_sizes(SIZES, phase, Demand(batch_tokens=3000, batch_units=4))
    assert (split.micro_batch_tokens, split.logprob_chunk_size) == (1024, 64)
    chunks = [64]
    sizes = split
    while (smaller := smaller_sizes(sizes, phase, ONE_EACH)) is not None:
        sizes = smaller
        chunks.append(sizes.logprob_chunk_size)
    assert chunks == [64, 32, 16]
    assert sizes.micro_batch_tokens == 1024
    assert sizes.lowered == {"micro_batch_tokens", "logprob_chunk_size"}


def test_training_alone_offloads_activations_at_last_and_once():
    least = replace(SIZES, logprob_chunk_size=16)
    assert smaller_sizes(least, Phase.SCORE, ONE_EACH, offloads=True) is None
    offloading = smaller_sizes(least, Phase.TRAIN, ONE_EACH, offloads=True)
    assert offloading.activation_offloading
    assert smaller_sizes(offloading, Phase.TRAIN, ONE_EACH, offloads=True) is None


def test_generation_halves_the_cache_that_its_sequences_would_fill_down_to_one_sequence():
    demand = Demand(cache_bytes=5 << 20, sequence_bytes=1 << 20)
    sizes, caches = SIZES, []
    while (smaller := smaller_sizes(sizes, Phase.ROLLOUT, demand)) is not None:
        sizes = smaller
        caches.append(sizes.kv_cache_bytes >> 20)
    assert caches == [2, 1]
    planned, budgets = replace(sizes, gather_budget=3 << 20), []
    while (smaller := smaller_sizes(planned, Phase.ROLLOUT, demand)) is not None:
        planned = smaller
        budgets.append(planned.gather_budget)
    assert budgets == [3 << 19, 3 << 18, 0]


@pytest.mark.parametrize(
    ("where", "total", "cache"),
    [
        (ColocateSettings(gpu_memory_utilization=0.5), 80 << 30, 8 << 30),  # below half of 20 GiB
        (ColocateSettings(gpu_memory_utilization=0.5, tensor_parallel_size=2), 80 << 30, 8 << 30),  # of 30
        (ColocateSettings(kv_cache_bytes=3 << 30), 80 << 30, 1 << 30),
        (ColocateSettings(), 0, 1 << 39),
        (ServerSettings(("http://a:1",)), 80 << 30, 1 << 39),
    ],
)
def test_a_vllm_gets_less_than_half_of_the_cache_that_its_share_of_the_device_holds(where, total, cache):
    demand = Demand.of_vllm(where, 10 << 30, total, 1 << 20)
    assert smaller_sizes(replace(SIZES, kv_cache_bytes=1 << 40), Phase.ROLLOUT, demand).kv_cache_bytes == cache


def test_a_sync_halves_its_buckets_and_other_phases_have_no_size():
    assert smaller_sizes(SIZES, Phase.SYNC, Demand()).sync_bytes == SIZES.sync_bytes // 2
    assert smaller_sizes(replace(SIZES, sync_bytes=1 << 20), Phase.SYNC, Demand()) is None
    assert smaller_sizes(SIZES, Phase.OPTIMIZER, Demand()) is None


def test_a_resumed_run_has_lowered_sizes_whatever_the_arguments_say():
    lowered = smaller_sizes(SIZES, Phase.TRAIN, Demand(batch_tokens=3000, batch_units=4))
    memory = MemorySettings(micro_batch_tokens=4096, logprob_chunk_size=32, kv_cache_bytes=None)
    resumed = SIZES.resumed(lowered.as_dict(), memory)
    assert (resumed.micro_batch_tokens, resumed.logprob_chunk_size, resumed.lowered) == (1024, 64, lowered.lowered)
    assert "lowered" not in SIZES.as_dict()


@pytest.mark.parametrize(("budget", "tokens"), [(1 << 30, 1024), (2 << 30, 4096), (3 << 30, 4096), (None, 4096)])
def test_a_resumed_run_has_the_sizes_of_a_smaller_budget_and_else_its_own(budget, tokens):
    saved = replace(SIZES, memory_budget=2 << 30).as_dict()
    planned = replace(SIZES, micro_batch_tokens=1024, kv_cache_bytes=2 << 30, memory_budget=budget)
    resumed = planned.resumed(saved, MemorySettings(memory_budget=budget))
    assert (resumed.micro_batch_tokens, resumed.kv_cache_bytes) == (tokens, SIZES.kv_cache_bytes)


def test_recorded_sizes_are_taken_once(tmp_path):
    record_sizes(tmp_path, "train", "out of memory", {"micro_batch_tokens": 8}, process_index=0)
    assert take_sizes(tmp_path)["sizes"] == {"micro_batch_tokens": 8}
    assert take_sizes(tmp_path) == {}


def fail_once(trainer: Any, when: Callable[[], bool]) -> list[int]:
    """Let a layer run out of memory the first time that `when()` holds."""
    failures: list[int] = []

    def hook(module: Any, args: Any) -> None:
        if not failures and when():
            failures.append(trainer.state.global_step)
            raise torch.OutOfMemoryError("CUDA out of memory. See https://pytorch.org (docs)")

    trainer.model.model.layers[0].register_forward_pre_hook(hook)
    return failures


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_an_evaluation_that_runs_out_of_memory_measures_the_same(tmp_path, kind):
    data = DATA.get(kind, rows)()
    plain, failing = (make(kind, tmp_path / name, eval_dataset=data) for name in ("plain", "failing"))
    failures = fail_once(failing, lambda: not failing.model.training)
    expected, found = plain.evaluate(), failing.evaluate()
    assert failures
    assert failing.run.sizes.lowered
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


class FailedPasses(logging.Handler):
    """Notes, when sizes are lowered, the functions of passes that a traceback keeps alive, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        tracebacks = [each for each in gc.get_objects() if type(each) is TracebackType]
        codes = [each.tb_frame.f_code for each in tracebacks]
        self.found.append([code.co_qualname for code in codes if code.co_filename.endswith("/guarded_passes.py")])


def test_passes_that_fail_leave_no_tensors_and_their_reason_in_the_journal_and_a_failed_optimizer_is_named(
    tmp_path, monkeypatch
):
    trainer, handler = make("GRPO", tmp_path, max_steps=1, num_iterations=2), FailedPasses()
    for phase in ("score", "train"):
        fail_once(trainer, lambda phase=phase: trainer.run.tracker.current_phase == f"phase {phase}")

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("states do not fit")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    logger = logging.getLogger("lowpeak.training.recovery")
    logger.addHandler(handler)
    try:
        with pytest.raises(MemoryExhaustedError, match="optimizer"):
            trainer.train()
    finally:
        logger.removeHandler(handler)
    assert handler.found == [[], []], "no error keeps the tensors of a failed pass when sizes are lowered"
    events = list(read_rows(tmp_path / "journal", "events"))
    assert [event["phase"] for event in events] == ["score", "train"]
    assert {event["reason"] for event in events} == {"CUDA out of memory. See https://pytorch.org (docs)"}
