"""The rollout benchmark's model writes completions of scripted lengths on both sides."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import rollout
from benchmarks.harness.counting import Counting, CountingRequest, generate_ours, generate_peer, make_model, run_side

REQUEST = CountingRequest("lowpeak", True, 3, 64, 1, 64, 3, 4, 5, 32, 6)


def test_both_sides_write_the_lengths_that_ours_drew():
    ours = run_side(REQUEST)["lengths"]
    assert len(set(ours)) > 3
    assert max(ours) <= 32
    peer = run_side(replace(REQUEST, library="transformers", lengths=tuple(ours)))
    assert peer["lengths"] == ours


def test_equal_lengths_are_all_the_longest():
    request = replace(REQUEST, skewed=False)
    model, counting = make_model(request), Counting(request)
    model.register_forward_hook(counting, with_kwargs=True)
    assert generate_ours(model, request) == [32] * 12
    assert generate_peer(model, replace(request, lengths=(32,) * 12), counting) == [32] * 12


def test_a_quick_run_is_one_draw_of_the_smallest_shape():
    assert rollout.parse(["--quick"]) == ("quick", 1, 0)
    assert rollout.parse(["--shape", "w2"]) == ("w2", 3, 0)
    assert rollout.parse(["--shape", "w2", "--draws", "1", "--slots", "16"]) == ("w2", 1, 16)
