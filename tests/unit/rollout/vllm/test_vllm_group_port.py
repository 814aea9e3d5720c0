"""Weights that go by a socket leave by the port that was asked for."""

from __future__ import annotations

import socket

import pytest

from fused import FusedVllm, slices, weights
from lowpeak.config.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.weights.push import push


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def settings(port):
    return VllmSettings(ServerSettings((), group_port=port), transport="tcp")


def ports_of(vllm):
    """Where the workers of a vLLM are told to connect, as it is told."""
    seen = []

    def noting(method, arguments):
        if method == "lowpeak_begin":
            seen.append(arguments["invitation"]["port"])

    vllm.workers.before = noting
    return seen


def test_every_update_leaves_by_the_port_that_was_given():
    vllm, port = FusedVllm(in_process=False), free_port()
    seen = ports_of(vllm)
    for version in (1, 2):
        push(slices(weights(version)), [vllm], settings(port), version)
    assert seen == [port, port]
    push(slices(weights(3)), [vllm], settings(None), 3)
    assert seen[2] != port


def test_a_port_that_is_taken_is_told_with_its_argument():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} .*: set vllm_group_port to one that nobody uses"):
            push(slices(weights()), [FusedVllm(in_process=False)], settings(port), 1)
