"""Shared memory and TCP between real processes: weights arrive, nothing is left behind, and no wait is without an end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from fused import VOCAB, FusedVllm, slices, weights
from lowpeak.config.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.errors import LostEngineError
from lowpeak.rollout.vllm.weights.proof import held_version, prove
from lowpeak.rollout.vllm.weights.push import push
from lowpeak.rollout.vllm.weights.transports.choose import look, open_sender
from lowpeak.rollout.vllm.weights.transports.shm import ShmSender, new_name, shared_folder, sweep
from lowpeak.rollout.vllm.weights.transports.tcp import TcpInlet, TcpSender
from remote import RemoteVllm

CPU = torch.device("cpu")


@pytest.fixture
def remote():
    made = []

    def make(**given):
        made.append(RemoteVllm(**given))
        return made[-1]

    yield make
    for vllm in made:
        vllm.kill()


def _settings(transport):
    return VllmSettings(ServerSettings(()), bucket_bytes=512, transport=transport)


def _ours():
    return [path.name for path in shared_folder().glob(f"lowpeak-{os.getpid()}-*")]


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
def test_weights_arrive_in_other_processes_and_no_file_stays(transport, remote):
    vllms = [remote(), remote()]
    for version in (1, 2):
        tensors = weights(version)
        report = push(slices(tensors), vllms, _settings(transport), version)
        assert report.transport == ("shm" if transport == "auto" else transport)
        for vllm in vllms:
            found = vllm.weights()
            assert torch.equal(torch.from_numpy(found["embed"])[:VOCAB], tensors["embed.weight"])
            assert torch.equal(torch.from_numpy(found["qkv"])[8:12], tensors["k.weight"])
        assert held_version(vllms) == version
        assert _ours() == []
    prove(vllms)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_worker_that_dies_ends_the_update_soon_and_the_others_hold_no_version(transport, remote):
    vllms = [remote(), remote(dies_at=2)]
    began = time.monotonic()
    with pytest.raises(LostEngineError, match="gone"):
        push(slices(weights()), vllms, _settings(transport), 1, timeout=20)
    assert time.monotonic() - began < 10
    assert held_version(vllms[:1]) is None
    assert _ours() == []


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_worker_that_hangs_ends_the_update_when_its_time_is_over(transport, remote):
    vllm = remote(sleeps_at=2)
    began = time.monotonic()
    with pytest.raises(EngineError):
        push(slices(weights()), [vllm], _settings(transport), 1, timeout=1)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_engine_that_failed_takes_the_next_update(transport, remote):
    vllm = remote()

    def broken():
        yield next(iter(slices(weights())))
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError):
        push(broken(), [vllm], _settings(transport), 1)
    push(slices(weights()), [vllm], _settings(transport), 2)
    assert held_version([vllm]) == 2


def test_a_killed_trainer_leaves_a_name_only_until_the_next_one_sweeps(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from lowpeak.rollout.vllm.weights.transports.shm import ShmSender; "
        "ShmSender(4096, Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120)
    assert len(list(tmp_path.iterdir())) == 1
    mine = tmp_path / new_name()
    mine.touch()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]


def test_the_files_name_is_gone_while_weights_travel():
    vllm, seen = FusedVllm(in_process=False), []
    vllm.workers.before = lambda method, arguments: seen.extend(_ours()) if method == "lowpeak_take" else None
    push(slices(weights()), [vllm], _settings("shm"), 1)
    assert "lowpeak_take" in vllm.workers.calls
    assert seen == []


def test_shared_memory_without_room_says_what_to_do():
    with pytest.raises(EngineError, match="tcp"):
        ShmSender(1 << 50)
    assert _ours() == []


def test_auto_falls_back_to_tcp_where_shared_memory_has_no_room(remote):
    sender = open_sender("auto", [remote()], 1 << 50, CPU, 10)
    sender.close()
    assert sender.name == "tcp"


def test_a_worker_shows_no_file_that_a_trainer_did_not_make(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    assert look(str(secret), CPU)["content"] == ""
    assert look("/etc/hostname", CPU)["content"] == ""


def test_who_does_not_know_the_token_gets_nothing():
    sender = TcpSender(1 << 16, loopback=True, timeout=5)
    try:
        given = sender.invitation()
        with pytest.raises(EngineError, match="cannot connect"):
            TcpInlet(given["hosts"], given["port"], "0" * 64, 5)
        known = TcpInlet(given["hosts"], given["port"], given["token"], 5)
        known.close()
    finally:
        sender.close()
    with pytest.raises(EngineError, match="cannot connect"):
        TcpInlet(given["hosts"], given["port"], given["token"], 5)


def test_the_trainer_writes_nothing_to_one_who_does_not_know_the_token():
    sender = TcpSender(1 << 16, loopback=True, timeout=5)
    with (
        contextlib.closing(sender),
        socket.create_connection(("127.0.0.1", sender.invitation()["port"]), 5) as stranger,
    ):
        stranger.sendall(b"0" * 64)
        assert stranger.recv(1) == b""


def test_a_worker_does_not_take_weights_from_one_who_answers_wrongly():
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer():
            peer, _ = stranger.accept()
            peer.sendall(peer.recv(64))
            peer.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(EngineError, match="somebody else answers"):
            TcpInlet(["127.0.0.1"], stranger.getsockname()[1], "0" * 64, 5)


def test_a_worker_does_not_take_weights_from_one_who_does_not_know_the_token():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(5)
        began = time.monotonic()
        with pytest.raises(EngineError, match="cannot connect"):
            TcpInlet(["127.0.0.1"], stranger.getsockname()[1], "0" * 64, 1)
        assert time.monotonic() - began < 5


def test_a_silent_stranger_keeps_nobody_waiting():
    sender = TcpSender(1 << 16, loopback=True, timeout=5)
    with contextlib.closing(sender):
        given = sender.invitation()
        with socket.create_connection(("127.0.0.1", given["port"])):
            began = time.monotonic()
            TcpInlet(given["hosts"], given["port"], given["token"], 20).close()
            assert time.monotonic() - began < 10


@pytest.mark.parametrize("data", [b"", b"5\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 60_000, bytes(range(256))])
def test_many_strangers_keep_nobody_waiting_whatever_they_send(data):
    with contextlib.ExitStack() as stack:
        sender = stack.enter_context(contextlib.closing(TcpSender(1 << 16, loopback=True, timeout=5)))
        given = sender.invitation()
        for _ in range(200):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", given["port"]), 5))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
        began = time.monotonic()
        TcpInlet(given["hosts"], given["port"], given["token"], 20).close()
        assert time.monotonic() - began < 5


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
        TcpInlet(given["hosts"], given["port"], given["token"], 20).close()
        assert time.monotonic() - began < 8


def test_the_process_transport_is_refused_for_other_processes(remote):
    with pytest.raises(EngineError, match="other processes"):
        open_sender("process", [remote()], 512, CPU, 5)


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_transport_between_gpus_is_refused_where_there_is_none_before_anything_waits(remote, transport):
    with pytest.raises(EngineError, match=f"vllm_transport='{transport}' is between GPUs.*use 'auto'"):
        open_sender(transport, [remote()], 512, CPU, 5)


def test_in_process_engines_are_given_the_bucket_itself():
    assert open_sender("auto", [FusedVllm()], 512, CPU, 5).name == "process"
