"""Peers of tensor parallelism: what one of them has no memory for in a rollout ends it on all, with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_ranks
from fault_ranks import seen
from forked import succeed
from tensor_ranks import PARTS

from tiny import char_tokenizer, tiny_model

WORDS = "out of memory in phase rollout: set kv_cache_bytes below 16777216, or max_completion_length lower. (no room)"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("model"), char_tokenizer("0123456789=+-*")
    for each in (tiny_model(16), tokenizer):
        each.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("sizes", "budget"), [((2, 1), None), ((2, 2), "0"), ((2, 2), "1GiB")])
def test_a_peer_without_memory_anywhere_in_a_rollout_ends_it_on_all_and_training_may_go_on(
    tmp_path: Path, model: str, sizes: tuple[int, int], budget: str | None
) -> None:
    num = sizes[0] * sizes[1]
    succeed(tensor_ranks.exhaust, tmp_path, model, sizes, budget, world_size=num)
    for number, found in enumerate(seen(tmp_path, num)):
        told = "" if number == 1 else "on rank 1, and so all ranks stop: "
        assert found == {"errors": dict.fromkeys(PARTS, f"MemoryExhaustedError: {told}{WORDS}"), "step": 1}
