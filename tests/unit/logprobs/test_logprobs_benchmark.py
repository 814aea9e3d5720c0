"""The ways that the log-prob benchmark times are ways to the same numbers."""

from __future__ import annotations

import pytest
from benchmarks import logprob_core
from benchmarks.harness.head import WAYS, HeadRequest, make_case, measure


@pytest.mark.parametrize("way", ["one visit", "recompute"])
def test_what_is_timed_has_the_loss_and_the_gradients_of_naive(way):
    case = HeadRequest(way, num_tokens=19, dtype="float32", chunk_size=8)
    found, naive = (measure(make_case(case, vocabulary=67, width=8), WAYS[name]) for name in (way, "naive"))
    assert found["loss"] == pytest.approx(naive["loss"], rel=1e-5)
    assert found["grad_norms"] == pytest.approx(naive["grad_norms"], rel=1e-5)


def test_the_no_grad_way_forms_no_gradients():
    case = HeadRequest("no-grad", num_tokens=19, dtype="float32", chunk_size=8)
    assert measure(make_case(case, vocabulary=67, width=8), WAYS["no-grad"])["grad_norms"] == [None, None]


def test_a_peak_is_counted_above_the_inputs_and_ratios_are_to_naive_and_to_the_products():
    run = {"forward_s": 2.0, "backward_s": 4.0, "loss": 1.0, "grad_norms": [], "start_rss_mb": 900.0}
    naive = logprob_core.summary({**run, "peak_rss_mb": 1_700.0})
    ours = logprob_core.summary({**run, "forward_s": 1.0, "backward_s": 2.0, "peak_rss_mb": 1_000.0})
    products = {**naive, "cpu_s": 2.0}
    assert (naive["peak_mb"], naive["cpu_s"]) == (800.0, 6.0)
    found = logprob_core.ratios({"naive": naive, "one visit": ours, "products": products})["one visit"]
    assert found == {"peak_of_naive": 0.125, "cpu_of_naive": 0.5, "cpu_of_products": 1.5}


def test_a_quick_run_has_256_tokens_and_both_dtypes():
    assert logprob_core.parse(["--quick"]) == (256, 256, ("float32", "bfloat16"))
    assert logprob_core.parse(["--dtype", "bfloat16"]) == (4096, 256, ("bfloat16",))
