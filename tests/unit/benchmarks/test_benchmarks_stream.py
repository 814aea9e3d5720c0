"""The streaming benchmark: what it is told, which rank it believes, and how it judges."""

from __future__ import annotations

from benchmarks import weight_stream


def figures(seconds: float, extra_mib: float) -> dict[str, float]:
    return {"seconds": seconds, "extra_mib": extra_mib}


def test_a_full_run_is_of_the_mid_model():
    assert weight_stream.parse([]) == ("mid", 5)
    assert weight_stream.parse(["--quick", "--repeats", "2"]) == ("quick", 2)


def test_each_figure_is_the_worse_rank_s():
    ranks = [
        {"model_mib": 4.0, "ways": {"slices_8MiB": figures(1.0, 9.0)}},
        {"model_mib": 4.0, "ways": {"slices_8MiB": figures(2.0, 8.0)}},
    ]
    assert weight_stream.slowest(ranks) == {"model_mib": 4.0, "slices_8MiB": figures(2.0, 9.0)}


def test_slices_are_judged_by_their_memory_and_by_both_gathers():
    ways = {"slices_8MiB": figures(1.0, 10.5), "gather_all": figures(2.0, 600.0), "gather_each": figures(0.9, 180.0)}
    assert weight_stream.aims(ways) == {"memory": False, "time": False}
    ways |= {"slices_8MiB": figures(0.8, 10.0)}
    assert weight_stream.aims(ways) == {"memory": True, "time": True}
