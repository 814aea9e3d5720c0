"""After every push vLLM's log-probs are those of transformers' model; what cannot be verified is refused."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
from functools import partial

import pytest
import torch

from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.vllm.protocol import start_thread
from lowpeak.vllm.serving import free_ports
from lowpeak.vllm.weight_sync import nccl
from lowpeak.vllm.weight_sync.push import loaded_version, push_weights, verify_unchanged
from vllm_in_process import TOLERANCE, engine, gap, policy_of, slices


def _settings(transport="auto", bucket_bytes=1 << 16):
    return VllmSettings(ServerSettings(()), bucket_bytes=bucket_bytes, transport=transport)


@pytest.fixture(scope="module", params=["tied", "untied"])
def pair(request, tmp_path_factory):
    """A policy and an engine that was made of it."""
    policy = policy_of(tied=request.param == "tied")
    with engine(policy, tmp_path_factory.mktemp("policy")) as vllm:
        yield policy, vllm


@pytest.mark.parametrize(("transport", "bucket_bytes"), [("process", 1 << 20), ("tcp", 1 << 13)])
def test_after_a_push_the_engine_is_the_changed_policy(pair, transport, bucket_bytes):
    policy, vllm = pair
    changed = policy_of(bucket_bytes + len(transport), tied=policy.config.tie_word_embeddings)
    assert gap(vllm, changed) > 0.1
    push_weights(slices(changed), [vllm], _settings(transport, bucket_bytes), 3)
    assert gap(vllm, changed) < TOLERANCE
    assert loaded_version([vllm]) == 3
    verify_unchanged([vllm])


def test_a_corrupted_parameter_is_found_by_name(pair):
    policy, vllm = pair
    push_weights(slices(policy), [vllm], _settings(), 1)
    with torch.inference_mode():
        vllm.model.model.layers[1].mlp.gate_up_proj.weight[-1, 5] *= 1.0001
    with pytest.raises(EngineError, match=r": model\.layers\.1\.mlp\.up_proj\.weight\.$"):
        verify_unchanged([vllm])
    assert loaded_version([vllm]) is None


@pytest.mark.parametrize("lost", ["embed_tokens", "layers.0.self_attn.k_proj.bias", "layers.1.mlp.up_proj"])
def test_an_update_that_lacks_a_tensor_is_refused(pair, lost):
    policy, vllm = pair
    with pytest.raises(EngineError, match=lost):
        push_weights((piece for piece in slices(policy) if lost not in piece.name), [vllm], _settings(), 2)
    assert loaded_version([vllm]) is None


def test_a_policy_of_other_sizes_or_with_another_head_is_refused(pair):
    policy, vllm = pair
    another_head = {"tied": not policy.config.tie_word_embeddings}
    for changes, named in (
        ({"hidden": 64}, r"model\."),
        ({"layers": 3}, r"model\.layers\.2"),
        (another_head, "lm_head"),
    ):
        with pytest.raises(EngineError, match=named):
            push_weights(slices(policy_of(**changes)), [vllm], _settings(), 2)
        assert loaded_version([vllm]) is None


@pytest.mark.parametrize("pair", ["untied"], indirect=True)
def test_pushes_leave_no_memory_behind(pair):
    policy, vllm = pair
    push_weights(slices(policy), [vllm], _settings(), 0)
    counts = {}
    for version in range(1, 101):
        transport = ("process", "tcp")[version % 2]
        push_weights(slices(policy), [vllm], _settings(transport), version)
        if version in (10, 100):
            gc.collect()
            counts[version] = (_num_tensors(), _resident_bytes())
    assert counts[100][0] == counts[10][0]
    assert counts[100][1] - counts[10][1] < 4 << 20


def _num_tensors():
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_sampled_logprobs_are_of_the_full_softmax_at_the_temperature(pair):
    policy, vllm = pair
    push_weights(slices(policy), [vllm], _settings(), 1)
    vllm.call("lowpeak_score_at_temperature", {}, 60.0)
    vllm.call("lowpeak_score_at_temperature", {}, 60.0)
    assert gap(vllm, policy) < TOLERANCE
    assert gap(vllm, policy, temperature=0.7, top_p=0.8, repetition_penalty=1.3, seed=1) < TOLERANCE
    assert gap(vllm, policy, temperature=1.3, top_k=3, seed=1) < TOLERANCE
    assert gap(vllm, policy, temperature=(0.0, 0.7, 1.0), top_p=0.9, seed=1) < TOLERANCE


def test_the_model_runner_is_v2_where_triton_runs(pair):
    setting = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    sampler = pair[1].runner.sampler
    assert (
        type(sampler).__module__ == {"0": "vllm.v1.sample.sampler", "1": "vllm.v1.worker.gpu.sample.sampler"}[setting]
    )


def test_nobody_reaches_vllms_group_once_its_communicator_has_formed(monkeypatch):
    """vLLM's own exchange of NCCL's identity, which it does by pickles; without GPUs no communicator is behind it."""
    from vllm.distributed.device_communicators import pynccl

    met = threading.Barrier(2)

    class Communicator:
        def __init__(self, group, device):
            self.group = group
            self.identity = group.broadcast_obj("of rank 0" if group.rank == 0 else None, src=0)
            met.wait(30)  # the all-reduce by which vLLM warms up

    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    (port,) = free_ports(1)
    form = partial(nccl._make_group, "127.0.0.1", port, world_size=2, device=torch.device("cpu"))
    ends = [start_thread(partial(form, rank)) for rank in (0, 1)]
    assert {end.result(60).identity for end in ends} == {"of rank 0"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
