"""Engines that sleep share the host's memory with all that sleep beside them."""

from __future__ import annotations

from lowpeak.ranks import Ranks
from lowpeak.rollout.vllm.colocated import ranks_of_host


def test_every_rank_of_the_host_counts_whatever_its_team():
    assert ranks_of_host(Ranks(), {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}) == 8
    assert ranks_of_host(Ranks(), {}) == 1
