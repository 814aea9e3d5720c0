"""A saved run state is loaded bit for bit, and damage is an error. Random generators are restored to the same draws."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from lowpeak.checkpoint.folders import STATE_FILE
from lowpeak.checkpoint.packed_records import pack_records, unpack_records
from lowpeak.checkpoint.run_state import (
    FORMAT_VERSION,
    ROLLOUT_FILE,
    RolloutInFlight,
    RunState,
    SavedRollout,
    capture_rng_state,
    check_none_in_flight,
    load_run_state,
    preserve_rng_state,
    restore_rng_state,
    save_run_state,
)
from lowpeak.errors import CheckpointError
from lowpeak.records import Branch, Completion, Record

FILES = (STATE_FILE, ROLLOUT_FILE, "lowpeak_random_0.pt")


def completion(num_tokens, reason="stop", **more):
    generator = torch.Generator().manual_seed(num_tokens)
    return Completion(
        ids=torch.randint(0, 2**31 - 1, (num_tokens,), dtype=torch.int32, generator=generator),
        logprobs=-torch.rand(num_tokens, generator=generator),
        loss_mask=torch.rand(num_tokens, generator=generator) > 0.5,
        finish_reason=reason,
        **more,
    )


def records():
    """Records of all kinds: empty, partly scored, with another prompt, branches, extra fields and policy versions."""
    branches = (Branch(1, -1), Branch(2, 0))
    versions = torch.tensor([7, 2**31 - 1], dtype=torch.int32)
    tokens = torch.tensor([0.1, -math.inf, math.nan, 1e-45])
    extra = {"tool": ["a", {"b": None}], "score": 0.5}
    return (
        Record(0, (5, 6, 7), completion(4), (1.0, math.nan), 0.1 + 0.2, old=tokens, advantages=-tokens),
        Record(0, (5, 6, 7), completion(0, "length"), (), math.nan, old=torch.empty(0), entropy=torch.empty(0)),
        Record(
            3,
            (),
            completion(2, prompt_ids=(), policy_versions=versions),
            (math.inf,),
            -0.0,
            reference=torch.zeros(2),
            values=torch.ones(2),
        ),
        Record(2**40, (1,), completion(3, prompt_ids=(9, 8), extra=extra, branches=branches), (1 / 3, 2.0, 3.0), 1e300),
    )


def bits(value):
    """The value in a form in which equal means the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.contiguous().view(torch.uint8).tolist())
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Record | Completion):
        return {name: bits(inner) for name, inner in vars(value).items()}
    if isinstance(value, tuple):
        return tuple(bits(inner) for inner in value)
    return value


def state(**changes):
    fields = {
        "policy_version": 7,
        "cursor": {"epoch": 1, "position": 12, "serial": 2**53 + 1},
        "random": capture_rng_state(),
        "rollout": SavedRollout(records(), number=3, steps_used=1),
        "algorithm_state": {"entropy_coef": 1 / 3},
        "resolved": {"micro_batch_tokens": 4096},
    }
    return RunState(**{**fields, **changes})


def test_packing_makes_a_few_tensors_and_leaves_the_records_as_they_were():
    rows = records()
    before = bits(rows)
    tensors, _ = pack_records(rows)
    assert len(pack_records(rows * 100)[0]) == len(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    assert bits(rows) == before
    assert unpack_records(*pack_records(())) == ()


def test_a_saved_state_is_loaded_bit_for_bit(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()  # both leave half a pair behind, which is part of the state
    saved = state()
    save_run_state(tmp_path, saved)
    loaded = load_run_state(tmp_path)
    assert loaded.rollout is not None
    assert bits(loaded.rollout.records) == bits(records())
    assert (loaded.rollout.number, loaded.rollout.steps_used) == (3, 1)
    for name in ("policy_version", "cursor", "algorithm_state", "resolved"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert loaded.random["python"] == saved.random["python"]
    assert bits(tuple(loaded.random["numpy"])) == bits(saved.random["numpy"])
    assert torch.equal(loaded.random["torch"], saved.random["torch"])
    assert loaded.random["cuda"] == []


def test_rollouts_in_flight_are_loaded_bit_for_bit_and_refused_by_who_cannot_continue_them(tmp_path):
    unrewarded = tuple(replace(each, rewards=(), reward=math.nan) for each in records())
    in_flight = tuple(
        RolloutInFlight(number, 6, {"position": number, "serial": 2**53 + 1}, 8, done)
        for number, done in ((4, unrewarded), (5, ()))
    )
    save_run_state(tmp_path, state(in_flight=in_flight))
    loaded = load_run_state(tmp_path)
    assert [bits(tuple(vars(each).values())) for each in loaded.in_flight] == [
        bits(tuple(vars(each).values())) for each in in_flight
    ]
    assert bits(loaded.rollout.records) == bits(records())
    with pytest.raises(CheckpointError, match=rf"{tmp_path} .*\(4, 5\)"):
        check_none_in_flight(loaded, tmp_path)
    check_none_in_flight(state(), tmp_path)


def test_a_state_of_format_1_is_loaded(tmp_path):
    save_run_state(tmp_path, state())
    plain = json.loads((tmp_path / STATE_FILE).read_text())
    assert "in_flight" not in plain
    (tmp_path / STATE_FILE).write_text(json.dumps({**plain, "format": 1}))
    tensors = safetensors.torch.load_file(tmp_path / ROLLOUT_FILE)
    former = {name: values for name, values in tensors.items() if "versions" not in name and "branches" not in name}
    assert len(former) == len(tensors) - 4
    safetensors.torch.save_file(former, tmp_path / ROLLOUT_FILE)
    plain = {"policy_versions": None, "branches": ()}
    expected = [replace(each, completion=replace(each.completion, **plain)) for each in records()]
    assert bits(load_run_state(tmp_path).rollout.records) == bits(tuple(expected))


def test_each_rank_gets_its_own_random_states_and_the_rest_of_rank_0(tmp_path):
    for rank in (1, 0):
        torch.manual_seed(rank)
        save_run_state(tmp_path, state(policy_version=10 + rank, random=capture_rng_state(), world_size=2), rank)
    for rank in (0, 1):
        torch.manual_seed(rank)
        loaded = load_run_state(tmp_path, rank)
        assert torch.equal(loaded.random["torch"], torch.get_rng_state())
        assert loaded.policy_version == 10
    (tmp_path / "lowpeak_random_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"lowpeak_random_1\.pt"):
        load_run_state(tmp_path, rank=1)


def test_a_rank_that_the_run_did_not_have_gets_no_random_states_and_between_rollouts_none_is_written(tmp_path, caplog):
    save_run_state(tmp_path, state(rollout=None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lowpeak_random_0.pt", "lowpeak_state.json"]
    assert load_run_state(tmp_path).rollout is None
    loaded = load_run_state(tmp_path, rank=1)
    assert (loaded.random, loaded.world_size) == ({}, 1)
    before = torch.get_rng_state()
    restore_rng_state(loaded.random)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(caplog.records) == 1


def test_an_entry_that_json_cannot_store_is_named(tmp_path):
    rows = (*records(), Record(0, (1,), completion(1, extra={"fine": 1, "image": torch.zeros(1)}), (), 0.0))
    with pytest.raises(CheckpointError, match=r"record 4: extra\['image'\].* Tensor "):
        pack_records(rows)
    with pytest.raises(CheckpointError, match=r"cursor\['seen'\].* set "):
        save_run_state(tmp_path, state(cursor={"seen": {1}}))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [None, 0.0, 0.02, 0.5, 0.99])
def test_a_missing_or_truncated_file_is_named(tmp_path, name, share):
    save_run_state(tmp_path, state())
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if share is not None:
        (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    pattern = f"{tmp_path}.*{name}" if share is None else f"{tmp_path / name}.* damaged"
    with pytest.raises(CheckpointError, match=pattern):
        load_run_state(tmp_path)


def test_a_state_that_lacks_an_entry_is_damaged_and_one_of_a_newer_format_is_not_read(tmp_path):
    save_run_state(tmp_path, state())
    plain = json.loads((tmp_path / STATE_FILE).read_text())
    lacking = {name: plain[name] for name in plain if name != "cursor"}
    newer = {**plain, "format": FORMAT_VERSION + 1}
    for changed, pattern in (
        (lacking, f"{STATE_FILE}.* damaged"),
        (newer, f"{FORMAT_VERSION + 1}.*{FORMAT_VERSION}\\."),
    ):
        (tmp_path / STATE_FILE).write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=pattern):
            load_run_state(tmp_path)


def draw():
    """Numbers of all three generators, normal ones too: those come in pairs, of which one is kept."""
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


@pytest.mark.parametrize("before", [0, 1])
def test_restored_generators_draw_the_same_numbers_after_an_evaluation(before):
    def evaluate():
        draw()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        raise ZeroDivisionError

    for _ in range(before):
        random.gauss(0, 1)
        np.random.randn()
    state = capture_rng_state()
    first = draw()
    assert draw() != first
    for _ in range(2):
        restore_rng_state(state)
        with pytest.raises(ZeroDivisionError), preserve_rng_state():
            evaluate()
        assert draw() == first


def test_a_changed_number_of_cuda_devices_is_logged(caplog):
    number = torch.cuda.device_count()
    state = capture_rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (number + 1)}
    if number:
        state["cuda"][:number] = torch.cuda.get_rng_state_all()
    restore_rng_state(state)
    assert [record.args for record in caplog.records] == [(number + 1, number)]
