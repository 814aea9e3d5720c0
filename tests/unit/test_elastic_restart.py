"""A later life under torchrun meets at a store of its own."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from lowpeak.setup.elastic_restart import RELAUNCHES, renew_master_port


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store that torchrun's agent keeps over a run's lives."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return store


def met(monkeypatch: pytest.MonkeyPatch, agent: dist.TCPStore, rank: int, life: int) -> tuple[str, str]:
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(life))
    renew_master_port()
    return os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def test_all_ranks_of_a_later_life_find_the_port_that_its_first_rank_chose(
    monkeypatch: pytest.MonkeyPatch, agent: dist.TCPStore
) -> None:
    first, second = (met(monkeypatch, agent, rank, 1) for rank in (0, 1))
    assert first == second
    assert first[0] != str(agent.port)
    assert first[1] == "False"


def test_the_first_life_meets_where_torchrun_said(monkeypatch: pytest.MonkeyPatch, agent: dist.TCPStore) -> None:
    for relaunches in ("0", "1"):  # each launch by the command line has a store of its own
        monkeypatch.setenv(RELAUNCHES, relaunches)
        assert met(monkeypatch, agent, 0, 0) == (str(agent.port), "True")
