"""Memory of rollouts that are generated ahead: peaks of phases, bytes in flight, and phases that run out of memory meanwhile."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
import torch
from transformers import TrainerCallback

from allocation_cap import AllocationCap
from fake_vllm import SAMPLING, answer_of, prompts, scripted
from lowpeak.vllm.protocol import Answer
from lowpeak.vllm.requests import PartialAnswers, sequence_requests
from overlap_runs import Sampler, run_ahead
from small_runs import digits, journal, same, weights

PHASES = ("sync", "rollout", "reward", "score", "train", "optimizer", "save")


class AllocationGauge:
    """The most bytes of living tensors that this thread has made, in place of resident memory."""

    def __init__(self):
        self.cap = AllocationCap(1 << 60)

    def reset(self):
        self.cap.highest = self.cap.live_bytes

    def synchronize(self):
        pass

    def peak(self):
        return self.cap.highest, None


class SeededServer:
    """A server whose completions follow from the requests' seeds, and which keeps no weights."""

    def __init__(self):
        self.vllm = scripted(answer_of)
        self.vllm._receive = lambda pieces, data: {}


def peaks(folder, staleness):
    """Peak bytes of each phase by step, of a run over two servers."""
    run = run_ahead(
        folder, [SeededServer(), SeededServer()], staleness, reward_funcs=digits, beta=0.05, save_strategy="steps",
        save_steps=2,
    )  # fmt: skip
    gauge = AllocationGauge()
    run.run.tracker._gauge = gauge
    with gauge.cap:
        run.train()
    return [{name: row[name] for name in row if name.startswith("peak_memory/")} for row in journal(folder)]


def test_every_phase_has_the_peak_of_a_run_without_rollouts_ahead(tmp_path):
    """Besides 4 bytes a token, the policy versions of the completions that exist."""
    peaks(tmp_path / "first", 0)  # fills caches of the process
    expected, versions = peaks(tmp_path / "0", 0), 4 * 8 * 3
    assert {f"peak_memory/{phase}" for phase in PHASES} == expected[2].keys()
    for staleness in (1, 2):
        found = peaks(tmp_path / str(staleness), staleness)
        more = {row[name] - before[name] for row, before in zip(found, expected, strict=True) for name in before}
        assert min(more) >= 0
        assert max(more) <= versions * (1 + staleness)


def test_completions_in_flight_take_9_bytes_a_token():
    sequences = sequence_requests(prompts(2), SAMPLING, [1])
    length = 4096
    answers = PartialAnswers()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(len(sequences)):
        answers.add(sequences, {i: Answer(tuple(range(i, i + length)), (-0.1 * i,) * length, "length")}, 0)
    in_python = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    in_tensors = sum(
        tensor.nbytes for each, _ in answers.of(sequences) for tensor in vars(each).values() if torch.is_tensor(tensor)
    )
    assert in_tensors == 9 * length * len(sequences)
    assert in_python < 4096 * len(sequences)


class Held(Sampler):
    """A sampler that answers `count` requests, and the others when they are released."""

    def __init__(self, count, lag=0):
        super().__init__(lag)
        self.released, self._left = threading.Event(), count

    def __call__(self, request):
        self._left -= 1
        assert self._left >= 0 or self.released.wait(60), "the fault never came"
        return super().__call__(request)


class Fault(TrainerCallback):
    """Lets memory run out once, in a phase of the third rollout, and releases the samplers then.

    `running` is how many rollouts are under generation at that moment.
    """

    def __init__(self, run, samplers, phase):
        self.running, self._run, self._samplers, self._phase = None, run, samplers, phase
        if phase == "sync":
            run.add_callback(self)
        else:
            model = run.run.reference.model if phase == "score" else run.model
            model.model.layers[0].register_forward_pre_hook(self._forward)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            vllm = self._samplers[0].vllm
            vllm.push_error = torch.OutOfMemoryError("no memory for a bucket")

            def close():  # before the push is tried again
                if vllm.push_error is not None:
                    vllm.push_error = None
                    self._happen()

            vllm.close = close

    def _forward(self, module, args):
        if (
            self.running is None
            and self._run.state.global_step == 2
            and self._run.run.tracker.current_phase == f"phase {self._phase}"
        ):
            self._happen()
            raise torch.OutOfMemoryError("no memory for a pass")

    def _happen(self):
        pipeline = self._run.pipeline
        entries = {} if pipeline is None else {**pipeline._pending, **pipeline._drawn}
        self.running = sum(entry.background.is_running for entry in entries.values())
        for sampler in self._samplers:
            sampler.released.set()


def faulty_run(folder, samplers, staleness, phase):
    run = run_ahead(folder, samplers, staleness, reward_funcs=digits, beta=0.05)
    fault = Fault(run, samplers, phase)
    run.train()
    (event,) = journal(folder, "events")
    assert (event["event"], event["phase"]) == ("out of memory", phase)
    return run, fault.running


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("phase", ["sync", "score", "train"])
def test_memory_that_runs_out_while_rollouts_are_in_flight_changes_none_of_them(tmp_path, staleness, phase):
    """The weights are those of a run that has rollouts of so old weights one after another, and the same fault."""
    simulated, _ = faulty_run(tmp_path / "lag", [Held(48, lag=staleness)], 0, phase)
    of = [Held(24)] if staleness == 1 else [Held(16), Held(8)]
    ahead, running = faulty_run(tmp_path / "ahead", of, staleness, phase)
    assert running == (staleness - 1 if phase == "sync" else staleness)
    assert same(weights(simulated), weights(ahead))
    requests = [(prompt, seed) for each in of for _, prompt, seed in each.asked]
    assert len(requests) == len(set(requests)) == 6 * 8
    found = [
        [(row["rollout"], row["completion"]) for row in journal(tmp_path / name, "rollouts")]
        for name in ("lag", "ahead")
    ]
    assert found[0] == found[1]
