"""Weights by TCP between real processes, and a scripted group in NCCL's place: they arrive, and every wait ends."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from fused_model import VOCAB, FusedVllm, slices, weights
from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.ranks import Ranks
from lowpeak.vllm.engine import EngineSharing, PolicyFacts, VllmEngine
from lowpeak.vllm.weight_sync import nccl, push
from lowpeak.vllm.weight_sync.nccl import NcclSender, TrainerGroup, check_communicator
from lowpeak.vllm.weight_sync.push import leave_group, loaded_version, open_sender, push_weights, verify_unchanged
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
        [{"network": "elsewhere", "device": "cpu", "group": None}]
        if method == "lowpeak_location"
        else call(vllm, method, *given)
    )
    with contextlib.closing(open_sender("tcp", [vllm], 512, CPU, 5, TrainerGroup())) as sender:
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
        open_sender("nccl", [remote()], 512, CPU, 5, TrainerGroup())


class Communicator:
    """Rank of a scripted group, which counts its ends; after `lost` a broadcast raises."""

    def __init__(self, rank, inbox):
        self.rank, self.inbox = rank, inbox
        self.ends, self.lost = 0, False

    def broadcast(self, data, src):
        if self.lost:
            raise RuntimeError("NCCL error: ncclInvalidUsage")
        if self.rank == src:
            self.inbox.extend([data.clone()] * (self.inbox.world_size - 1))
        else:
            data.copy_(self.inbox.next())

    def destroy(self):
        self.ends += 1
        self.inbox.ended = True


class Inbox(list):
    """Buckets on their way to the workers, in one process."""

    world_size, ended = 0, False

    def next(self):
        while not self and not self.ended:
            time.sleep(0.001)
        return self.pop()


@pytest.fixture
def formed(monkeypatch):
    """Return the communicators that were formed; pushes over "nccl" reach workers of this process through them."""
    inboxes, made = {}, []

    def form(host, port, rank, world_size, device):
        inbox = inboxes.setdefault(port, Inbox())
        inbox.world_size = world_size
        made.append(Communicator(rank, inbox))
        return made[-1]

    monkeypatch.setattr(nccl, "_make_group", form)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def send_from_gpu(transport, vllms, bucket_bytes, device, timeout, group, port):
        group.invite(CPU, "127.0.0.1", push._WorkerLocations.of(vllms, timeout).groups, port)
        return NcclSender(bucket_bytes, CPU, group, timeout)

    monkeypatch.setattr(push, "open_sender", send_from_gpu)
    return made


def ends(formed):
    return [(each.rank, each.ends) for each in sorted(formed, key=lambda each: each.rank)]


def pushed(vllms, group, version):
    """Push weights over NCCL; the engines have them."""
    tensors = weights(version)
    push_weights(slices(tensors), vllms, _settings("nccl"), version, nccl_group=group, timeout=10)
    assert loaded_version(vllms) == version
    for vllm in vllms:
        assert torch.equal(vllm.model.embed[:VOCAB], tensors["embed.weight"])


def two_vllms():
    return [FusedVllm(in_process=False), FusedVllm(in_process=False)]


def test_pushes_share_a_communicator_that_both_ends_free_once_at_the_end(formed):
    vllms, group = two_vllms(), TrainerGroup()
    for version in (1, 2, 3):
        pushed(vllms, group, version)
    assert ends(formed) == [(0, 0), (1, 0), (2, 0)]
    for _ in range(2):
        leave_group(vllms, group)
        assert ends(formed) == [(0, 1), (1, 1), (2, 1)]
    assert loaded_version(vllms) == 3


def test_an_engine_leaves_the_group_of_its_pushes_when_it_closes(formed):
    vllm = FusedVllm(in_process=False)
    vllm.paused, vllm.close = contextlib.nullcontext, lambda: None
    engine = VllmEngine(
        lambda: [vllm], _settings("nccl"), PolicyFacts(lambda sampling: (), None), EngineSharing(Ranks())
    )
    vllm.workers[0].model_runner.sampler = SimpleNamespace(forward=None, compute_logprobs=None)
    engine.wake()
    for version in (1, 2):
        engine.load(slices(weights(version)), version)
    assert ends(formed) == [(0, 0), (1, 0)]
    engine.close()
    engine.close()
    assert ends(formed) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("end", [0, 1])
def test_after_a_failed_push_over_nccl_both_ends_form_anew(formed, end, monkeypatch):
    vllms, group = two_vllms(), TrainerGroup()
    pushed(vllms, group, 1)
    next(each for each in formed if each.rank == end).lost = True
    call = vllms[1].call
    monkeypatch.setattr(
        vllms[1], "call", lambda *args: (time.sleep(0.05 * (args[0] == "lowpeak_receive")), call(*args))[1]
    )
    with pytest.raises((EngineError, RuntimeError), match="ncclInvalidUsage"):
        push_weights(slices(weights()), vllms, _settings("nccl"), 2, nccl_group=group, timeout=10)
    assert ends(formed) == [(0, 1), (1, 1), (2, 1)]
    assert loaded_version(vllms) is None
    pushed(vllms, group, 3)
    assert ends(formed) == [(0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (2, 0)]


def test_a_worker_that_restarted_or_that_another_run_reached_is_met_by_a_new_group(formed):
    vllms, group = two_vllms(), TrainerGroup()
    pushed(vllms, group, 1)
    vllms[1] = FusedVllm(in_process=False)
    pushed(vllms, group, 2)
    assert ends(formed) == [(0, 1), (0, 0), (1, 1), (1, 0), (2, 0), (2, 0)]  # a worker that is gone frees nothing
    push_weights(slices(weights()), vllms[1:], _settings("nccl"), 3, timeout=10)
    pushed(vllms, group, 4)
    assert len(formed) == 6 + 2 + 3
    leave_group(vllms, group)
    assert sum(each.ends for each in formed) == len(formed) - 1


def test_a_worker_frees_its_group_when_the_weights_come_another_way(formed, monkeypatch):
    vllm, group = FusedVllm(in_process=False), TrainerGroup()
    pushed([vllm], group, 1)
    monkeypatch.setattr(push, "open_sender", open_sender)
    push_weights(slices(weights()), [vllm], _settings(), 2, nccl_group=group)
    assert ends(formed) == [(0, 0), (1, 1)]


def invited(monkeypatch, form):
    monkeypatch.setattr(nccl, "_make_group", form)
    group = TrainerGroup()
    group.invite(CPU, "127.0.0.1", [None, None])
    return group


def test_a_group_that_forms_after_its_update_was_given_up_ends_at_once(monkeypatch):
    late, ended = threading.Event(), threading.Event()

    def form(*meeting):
        late.wait(10)
        return SimpleNamespace(destroy=ended.set)

    group = invited(monkeypatch, form)
    with pytest.raises(EngineError, match="vllm_transport='tcp'"):
        group.wait_formed(0.01)
    group.close()
    assert not ended.is_set()
    late.set()
    assert ended.wait(10)


def test_why_a_group_did_not_form_is_told_and_a_communicator_that_broadcasts_nothing_is_none(monkeypatch):
    def form(*meeting):
        raise OSError("a reason")

    with pytest.raises(EngineError, match=r"\(a reason\)"):
        invited(monkeypatch, form).wait_formed(10)
    communicator = SimpleNamespace()
    assert check_communicator(communicator) is communicator
    communicator.disabled = True
    with pytest.raises(EngineError, match="NCCL"):
        check_communicator(communicator)


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
