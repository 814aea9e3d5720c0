"""What was saved is what is loaded, bit for bit; what cannot be loaded says why."""

import json
import math
import random

import numpy as np
import pytest
import torch

from lowpeak.checkpoint.resume import capture_random, restore_random
from lowpeak.checkpoint.state import (
    FORMAT,
    RolloutInUse,
    RunState,
    has_run_state,
    load_run_state,
    pack_records,
    save_run_state,
    unpack_records,
)
from lowpeak.errors import CheckpointError
from lowpeak.records import Completion, Record


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
    """Rows of all kinds: empty, scored in part, with a prompt and fields of their own."""
    tokens = torch.tensor([0.1, -math.inf, math.nan, 1e-45])
    return (
        Record(0, (5, 6, 7), completion(4), (1.0, math.nan), 0.1 + 0.2, old=tokens, advantages=-tokens),
        Record(0, (5, 6, 7), completion(0, "length"), (), math.nan, old=torch.empty(0), entropy=torch.empty(0)),
        Record(3, (), completion(2, prompt_ids=()), (math.inf,), -0.0, reference=torch.zeros(2), values=torch.ones(2)),
        Record(
            2**40,
            (1,),
            completion(3, prompt_ids=(9, 8), extra={"tool": ["a", {"b": None}], "score": 0.5}),
            (1 / 3, 2.0, 3.0),
            1e300,
        ),
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
        "random": capture_random(),
        "rollout": RolloutInUse(records(), number=3, steps_used=1),
        "algorithm_state": {"entropy_coef": 1 / 3},
        "resolved": {"micro_batch_tokens": 4096},
    }
    return RunState(**{**fields, **changes})


def test_records_of_all_kinds_come_back_bit_for_bit():
    tensors, extras = pack_records(records())
    assert bits(unpack_records(tensors, json.loads(json.dumps(extras)))) == bits(records())


def test_no_records_at_all_come_back_as_none():
    assert unpack_records(*pack_records(())) == ()


def test_many_records_are_packed_as_a_few_tensors():
    assert len(pack_records(records() * 100)[0]) == len(pack_records(records())[0])


def test_packing_leaves_the_records_as_they_were():
    rows = records()
    before = bits(rows)
    tensors, _ = pack_records(rows)
    for tensor in tensors.values():
        tensor.zero_()
    assert bits(rows) == before


def test_a_saved_state_is_loaded_bit_for_bit(tmp_path):
    saved = state()
    save_run_state(tmp_path, saved)
    loaded = load_run_state(tmp_path)
    assert loaded.rollout is not None
    assert bits(loaded.rollout.records) == bits(records())
    assert (loaded.rollout.number, loaded.rollout.steps_used) == (3, 1)
    for name in ("policy_version", "cursor", "algorithm_state", "resolved"):
        assert getattr(loaded, name) == getattr(saved, name)


def test_the_random_generators_come_back_bit_for_bit(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()  # both leave half a pair behind, which is part of the state
    saved = state()
    save_run_state(tmp_path, saved)
    loaded = load_run_state(tmp_path).random
    assert loaded["python"] == saved.random["python"]
    assert bits(tuple(loaded["numpy"])) == bits(saved.random["numpy"])
    assert torch.equal(loaded["torch"], saved.random["torch"])
    assert loaded["cuda"] == []


def test_between_rollouts_no_rollout_is_written(tmp_path):
    save_run_state(tmp_path, state(rollout=None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lowpeak_random_0.pt", "lowpeak_state.json"]
    assert load_run_state(tmp_path).rollout is None


def test_each_rank_gets_its_own_random_states_and_the_rest_of_rank_0(tmp_path):
    for rank in (1, 0):
        torch.manual_seed(rank)
        save_run_state(tmp_path, state(policy_version=10 + rank, random=capture_random(), world_size=2), rank)
    for rank in (0, 1):
        torch.manual_seed(rank)
        loaded = load_run_state(tmp_path, rank)
        assert torch.equal(loaded.random["torch"], torch.get_rng_state())
        assert loaded.policy_version == 10
    (tmp_path / "lowpeak_random_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no lowpeak_random_1.pt: resume from another"):
        load_run_state(tmp_path, rank=1)


def test_a_rank_that_the_run_did_not_have_gets_no_random_states(tmp_path, caplog):
    save_run_state(tmp_path, state(random=capture_random(), world_size=1))
    loaded = load_run_state(tmp_path, rank=1)
    assert (loaded.random, loaded.world_size) == ({}, 1)
    before = torch.get_rng_state()
    restore_random(loaded.random)
    assert torch.equal(torch.get_rng_state(), before)
    assert "go on from the seed" in caplog.text


def test_an_extra_that_json_cannot_hold_is_named():
    rows = (*records(), Record(0, (1,), completion(1, extra={"fine": 1, "image": torch.zeros(1)}), (), 0.0))
    with pytest.raises(CheckpointError, match=r"record 4: extra\['image'\] of type Tensor .* JSON cannot hold it"):
        pack_records(rows)


def test_a_cursor_that_json_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cursor\['seen'\] of type set"):
        save_run_state(tmp_path, state(cursor={"seen": {1}}))


@pytest.mark.parametrize("name", ["lowpeak_state.json", "lowpeak_rollout.safetensors", "lowpeak_random_0.pt"])
def test_a_missing_file_is_named(tmp_path, name):
    save_run_state(tmp_path, state())
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint {tmp_path} has no {name}.* resume from another checkpoint"):
        load_run_state(tmp_path)


@pytest.mark.parametrize("name", ["lowpeak_state.json", "lowpeak_rollout.safetensors", "lowpeak_random_0.pt"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_named(tmp_path, name, share):
    save_run_state(tmp_path, state())
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=f"{name} is damaged .*; resume from another checkpoint"):
        load_run_state(tmp_path)


def test_a_state_that_lacks_an_entry_is_called_damaged(tmp_path):
    save_run_state(tmp_path, state())
    plain = json.loads((tmp_path / "lowpeak_state.json").read_text())
    del plain["cursor"]
    (tmp_path / "lowpeak_state.json").write_text(json.dumps(plain))
    with pytest.raises(CheckpointError, match=r"lowpeak_state.json is damaged"):
        load_run_state(tmp_path)


def test_a_state_of_a_newer_version_asks_for_an_upgrade(tmp_path):
    save_run_state(tmp_path, state())
    plain = json.loads((tmp_path / "lowpeak_state.json").read_text())
    (tmp_path / "lowpeak_state.json").write_text(json.dumps({**plain, "format": FORMAT + 1}))
    with pytest.raises(CheckpointError, match=f"has format {FORMAT + 1}.* reads up to {FORMAT}; upgrade lowpeak"):
        load_run_state(tmp_path)


def test_a_folder_has_run_state_once_it_was_saved(tmp_path):
    assert not has_run_state(tmp_path)
    save_run_state(tmp_path, state())
    assert has_run_state(tmp_path)
