"""Weights by TCP between real processes, and a scripted group in NCCL's place: they arrive, and every wait ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import torch

from fused_model import VOCAB, FusedVllm, slices, weights
from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.vllm.weight_sync.nccl import NcclReceiver, NcclSender, check_communicator
from lowpeak.vllm.weight_sync.push import loaded_version, open_sender, push_weights, verify_unchanged
from lowpeak.vllm.weight_sync.tcp import TcpReceiver, TcpSender, host_addresses
from vllm_servers import free_port
from worker_process import RemoteVllm

CPU = torch.device("cpu")
HERE = r"127\.0\.0\.1"


@pytest.fixture
def remote():
    made = []

    def make(**given):
        made.append(RemoteVllm(**given))
        return made[-1]

    yield make
    for vllm in made:
        vllm.kill()


def _settings(transport="tcp", port=None):
    return VllmSettings(ServerSettings((), group_port=port), bucket_bytes=512, transport=transport)


def test_weights_arrive_in_other_processes_by_tcp_unless_told_otherwise(remote):
    vllms = [remote(), remote()]
    for version in (1, 2):
        tensors = weights(version)
        push_weights(slices(tensors), vllms, _settings("auto"), version)
        for vllm in vllms:
            assert vllm.transport == "tcp"
            found = vllm.weights()
            assert torch.equal(torch.from_numpy(found["embed"])[:VOCAB], tensors["embed.weight"])
            assert torch.equal(torch.from_numpy(found["qkv"])[8:12], tensors["k.weight"])
        assert loaded_version(vllms) == version
    verify_unchanged(vllms)


@pytest.mark.parametrize(("fault", "timeout"), [("dies_at", 20), ("sleeps_at", 1)])
def test_a_worker_that_dies_or_hangs_ends_the_update_soon_and_the_others_hold_no_version(remote, fault, timeout):
    vllms = [remote(), remote(**{fault: 2})]
    began = time.monotonic()
    with pytest.raises(LostEngineError if fault == "dies_at" else EngineError):
        push_weights(slices(weights()), vllms, _settings(), 1, timeout=timeout)
    assert time.monotonic() - began < 10
    assert loaded_version(vllms[:1]) is None


def test_every_update_leaves_by_the_port_that_was_given():
    vllm, port, seen = FusedVllm(in_process=False), free_port(), []
    vllm.before = lambda method, arguments: seen.append(arguments["invitation"]) if method == "lowpeak_begin" else None
    for version in (1, 2):
        push_weights(slices(weights(version)), [vllm], _settings(port=port), version)
    push_weights(slices(weights(3)), [vllm], _settings(), 3)
    ports = [invitation["port"] for invitation in seen]
    assert ports[:2] == [port, port] != ports[2]
    assert all(invitation["hosts"] == ["127.0.0.1"] for invitation in seen)


def test_a_port_that_is_taken_is_named_with_its_argument():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=f"{port} .*vllm_group_port"):
            push_weights(slices(weights()), [FusedVllm(in_process=False)], _settings(port=port), 1)


def test_a_worker_in_another_network_is_given_this_hosts_addresses():
    vllm, call = FusedVllm(in_process=False), FusedVllm.call
    vllm.call = lambda method, *given: (
        [{"network": "elsewhere", "device": "cpu"}] if method == "lowpeak_location" else call(vllm, method, *given)
    )
    with contextlib.closing(open_sender("tcp", [vllm], 512, CPU, 5)) as sender:
        hosts = sender.invitation()["hosts"]
    assert hosts == host_addresses()


def test_a_stranger_who_sends_a_byte_now_and_then_keeps_nobody_waiting_either():
    """A socket's own limit begins anew with every byte."""
    sender = TcpSender(1 << 16, loopback=True, timeout=5)
    with contextlib.closing(sender), socket.create_connection(("127.0.0.1", sender.invitation()["port"])) as stranger:

        def trickle():
            with contextlib.suppress(OSError):
                for _ in range(60):
                    stranger.sendall(b"0")
                    time.sleep(0.25)

        threading.Thread(target=trickle, daemon=True).start()
        given, began = sender.invitation(), time.monotonic()
        TcpReceiver(given["hosts"], given["port"], given["token"], 20).close()
        assert time.monotonic() - began < 8


def test_a_transport_that_does_not_reach_the_workers_is_refused_before_anything_waits(remote):
    with pytest.raises(EngineError, match=r"vllm_transport='nccl'.*'auto'"):
        open_sender("nccl", [remote()], 512, CPU, 5)


class Group:
    """Counts its ends."""

    def __init__(self):
        self.ends = 0

    def destroy(self):
        self.ends += 1


def nccl_sender(form, timeout=10.0):
    return NcclSender(64, CPU, "127.0.0.1", 2, timeout, make_group=form)


def test_both_ends_of_an_update_free_their_communicator_once():
    theirs, ours, formed = Group(), Group(), []

    def form(host, port, rank, world_size, device):
        formed.append((host, port, rank, world_size))
        return ours if rank == 0 else theirs

    one = nccl_sender(form)
    one.wait_connected()
    given = one.invitation()
    assert given.pop("transport") == "nccl"
    other = NcclReceiver(**given, rank=2, device=CPU, make_group=form)
    for end in (one, other, one, other):
        end.close()
    assert (ours.ends, theirs.ends) == (1, 1)
    assert formed == [("127.0.0.1", given["port"], 0, 3), ("127.0.0.1", given["port"], 2, 3)]


def test_a_group_that_forms_after_its_update_was_given_up_ends_at_once():
    group, late, ended = Group(), threading.Event(), threading.Event()
    group.destroy = ended.set

    def form(*meeting):
        late.wait(10)
        return group

    one = nccl_sender(form, timeout=0.01)
    with pytest.raises(EngineError, match="vllm_transport='tcp'"):
        one.wait_connected()
    one.close()
    assert not ended.is_set()
    late.set()
    assert ended.wait(10)


def test_why_a_group_did_not_form_is_told_and_a_communicator_that_broadcasts_nothing_is_none():
    def form(*meeting):
        raise OSError("a reason")

    with pytest.raises(EngineError, match=r"\(a reason\)"):
        nccl_sender(form).wait_connected()
    group = Group()
    assert check_communicator(group) is group
    group.disabled = True
    with pytest.raises(EngineError, match="NCCL"):
        check_communicator(group)


def test_a_worker_that_does_not_know_the_token_gets_nothing():
    with contextlib.closing(TcpSender(1 << 16, loopback=True, timeout=5)) as sender:
        given = sender.invitation()
        with socket.create_connection(("127.0.0.1", given["port"]), 5) as stranger:
            stranger.sendall(b"0" * 64)
            assert stranger.recv(1) == b""
        with pytest.raises(EngineError, match=HERE):
            TcpReceiver(given["hosts"], given["port"], "0" * 64, 5)
        TcpReceiver(given["hosts"], given["port"], given["token"], 5).close()
    with pytest.raises(EngineError, match=HERE):
        TcpReceiver(given["hosts"], given["port"], given["token"], 5)


@pytest.mark.parametrize("answers", [True, False])
def test_a_worker_takes_no_weights_from_one_that_does_not_know_the_token(answers):
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def echo():
            peer, _ = stranger.accept()
            peer.sendall(peer.recv(64))
            peer.close()

        if answers:
            threading.Thread(target=echo, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(EngineError, match=HERE):
            TcpReceiver(["127.0.0.1"], stranger.getsockname()[1], "0" * 64, 1)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("count", "data"),
    [(1, b""), *((200, data) for data in (b"", b"5\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000, bytes(range(256))))],
)
def test_strangers_keep_no_worker_waiting_whatever_they_send(count, data):
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(contextlib.closing(TcpSender(1 << 16, loopback=True, timeout=5)))
        given = sender.invitation()
        for _ in range(count):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", given["port"]), 5))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
        began = time.monotonic()
        TcpReceiver(given["hosts"], given["port"], given["token"], 20).close()
        assert time.monotonic() - began < 5
