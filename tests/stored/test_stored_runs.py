"""What a former version has saved is resumed, and comes to what that version came to."""

from __future__ import annotations

import pytest
import torch
from setups import TOLERANCE
from store import KINDS, SAVED_RUNS, found, resume


@pytest.mark.parametrize("name", KINDS)
def test_a_stored_checkpoint_goes_on_to_the_stored_weights_and_journal(name, tmp_path):
    """Not to the last bit, which differs between processors: `python tests/stored/store.py` compares bits."""
    resume(name, tmp_path)
    (ours, our_steps), (weights, steps) = found(tmp_path), found(SAVED_RUNS / name)
    assert ours.keys() == weights.keys()
    for key, values in weights.items():
        torch.testing.assert_close(ours[key], values, atol=TOLERANCE, rtol=0)
    assert all(row.keys() <= our_row.keys() for row, our_row in zip(steps, our_steps, strict=True))
    for row, expected in zip(our_steps, steps, strict=True):
        stored = {key: row[key] for key in expected}  # later versions write more numbers
        assert stored == {key: pytest.approx(value, rel=1e-4, abs=1e-5) for key, value in expected.items()}
