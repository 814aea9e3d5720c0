"""`lowpeak serve`: the command line and the environment that vLLM gets, what is refused, and how it ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fake_server
from lowpeak.arguments.vllm import SERVER_TOKEN
from lowpeak.cli.commands import main
from lowpeak.cli.serve import check_port, parse_server
from lowpeak.errors import ArgumentError, EngineError
from lowpeak.vllm.server import ServerVllm
from lowpeak.vllm.serving.command import ServerSpec, server_command, server_environment
from lowpeak.vllm.serving.middleware import find_token, saved_token
from lowpeak.vllm.serving.process import ServerProcess
from lowpeak.watchdog.orphans import PARENT_VARIABLE
from process_ends import are_gone

GUARD = "lowpeak.vllm.serving.middleware.TokenMiddleware"
ADAPTERS = "lowpeak.vllm.serving.middleware.AdapterMiddleware"
TOKENS = "lowpeak.vllm.serving.token_route.TokenRoute"
EXTENSION = "lowpeak.vllm.weight_sync.worker.Extension"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder in which tokens are saved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def text(*argv, environ=None):
    return server_command(parse_server(["--model", "m", *argv], environ or {}))


def value_of(command, name):
    return command[command.index(f"--{name}") + 1]


def test_vllm_gets_what_weight_updates_need():
    command = text()
    assert command[:3] == [sys.executable, "-m", "lowpeak.vllm.serving.entrypoint"]
    wanted = {
        "model": "m", "host": "127.0.0.1", "port": "8000", "tensor-parallel-size": "1", "worker-extension-cls": EXTENSION,
        "logprobs-mode": "raw_logprobs", "generation-config": "vllm",
    }  # fmt: skip
    assert {name: value_of(command, name) for name in wanted} == wanted
    assert {"--enable-prefix-caching", "--enable-scale-out", ADAPTERS, TOKENS} <= set(command)
    assert not {"--dtype", "--kv-cache-memory-bytes"} & set(command)
    command = text("--tensor-parallel-size", "2", "--dtype=float32", "--devices", "cuda:2,3")
    assert (value_of(command, "tensor-parallel-size"), value_of(command, "dtype")) == ("2", "float32")
    assert "--devices" not in command


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--logprobs-mode=processed_logprobs", "logprobs-mode"),
        ("--no-enable-prefix-caching", "enable-prefix-caching"),
        ("--generation_config=auto", "generation-config"),
        ("--max-model-len 512 --seed=3 --enforce_eager", None),
    ],
)
def test_vllms_own_options_pass_through_and_replace_ours(option, ours):
    command = text(*option.split())
    assert option in " ".join(command)
    assert f"--{ours}" not in command


@pytest.mark.parametrize(
    ("trl", "vllm"),
    [
        ("--vllm_model_impl transformers --max_model_len 64", "--model-impl transformers --max_model_len 64"),
        ("--enforce_eager true --trust_remote_code", "--enforce-eager --trust_remote_code"),
        ("--enable_prefix_caching=false --log_level info", "--no-enable-prefix-caching --uvicorn-log-level info"),
        ("--enforce-eager --speculative_config {}", "--enforce-eager --speculative_config {}"),
    ],
)
def test_options_of_trls_server_are_vllms(trl, vllm):
    assert parse_server(["--model", "m", *trl.split()], {}).options == tuple(vllm.split())


def test_a_server_on_a_cpu_leaves_the_hosts_memory_to_others():
    default = ["--kv-cache-memory-bytes", str(1 << 30)]
    assert " ".join(default) in " ".join(text("--devices", "cpu"))
    for option_words in (["--kv-cache-memory-bytes", "9"], ["--gpu-memory-utilization", "0.2"]):
        written = text("--devices", "cpu", *option_words)
        assert " ".join(option_words) in " ".join(written)
        assert default[1] not in written


def test_a_token_is_demanded_by_a_middleware_and_stands_in_no_command_line():
    environ = {SERVER_TOKEN: "secret", "VLLM_API_KEY": "other"}
    server = parse_server(["--model", "m"], environ)
    assert server_command(server)[-2:] == ["--middleware", GUARD]  # before all others
    assert "secret" not in " ".join(server_command(server))
    given = server_environment(server, environ)
    assert (given[SERVER_TOKEN], "VLLM_API_KEY" in given) == ("secret", False)
    with pytest.raises(ArgumentError, match=r"VLLM_API_KEY .*LOWPEAK_SERVER_TOKEN"):  # which guards too little
        text(environ={"VLLM_API_KEY": "secret"})


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("box", "http://box:8000"),
    ],
)
def test_a_server_has_an_address_and_a_token_that_it_makes_if_none_is_given(host, url):
    first, second = (parse_server(["--model", "m", "--host", host], {}) for _ in range(2))
    assert first.url == url
    assert server_command(first)[-2:] == ["--middleware", GUARD]
    assert server_environment(first, {})[SERVER_TOKEN] == first.token
    assert len(first.token) >= 32
    assert first.token != second.token
    assert first.token not in repr(first)


def test_only_the_user_finds_the_servers_token_in_a_file(cache):
    with fake_server.serving(fake_server.FakeServer(token="made")) as fake:
        with saved_token(fake.port, "made") as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            for url in (fake.url, f"http://localhost:{fake.port}"):
                assert ServerVllm(url).info() == fake.facts
            with pytest.raises(EngineError, match="LOWPEAK_SERVER_TOKEN"):
                ServerVllm(fake.url, "another").info()
            with pytest.raises(ArgumentError, match=f"--port {fake.port}"):
                check_port(ServerSpec("m", port=fake.port))  # it is taken
        assert not path.exists()
        with pytest.raises(EngineError, match="LOWPEAK_SERVER_TOKEN"):
            ServerVllm(fake.url).info()


def test_a_token_is_written_to_a_new_file_alone_for_this_host(cache, monkeypatch):
    """Through no link, not over the token of a server that runs, and nowhere else if the folder is none."""
    with saved_token(8000, "first") as path:
        with pytest.raises(ArgumentError, match=r"8000.*--port"), saved_token(8000, "second"):
            pass
        found = [find_token(host, 8000) for host in ("127.0.0.1", "::1", "box", "10.0.0.7")]
        assert found == ["first", "first", None, None]
        assert find_token("127.0.0.1", 8001) is None
    (cache / "mine").write_text("precious")
    path.symlink_to(cache / "mine")
    for folder in (cache, cache / "mine"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        with pytest.raises(ArgumentError, match="LOWPEAK_SERVER_TOKEN"), saved_token(8000, "second"):
            pass
    assert (cache / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--worker-extension-cls", "x"], "--worker-extension-cls"),
        (["--api_key=x"], "--api-key"),
        (["--devices", "0,x"], "'x'"),
        (["--devices", ""], "''"),
        (["--devices", "0,1", "--tensor_parallel_size", "3"], "--tensor_parallel_size 3 .* 2"),
        (["--port", "many"], "'many'"),
        (["--port", "99999"], "--port 99999 .*1 to 65535"),
        (["--tensor_parallel_size", "0"], "size 0"),
        (["--model", ""], "--model"),
    ],
)
def test_a_server_that_cannot_start_is_refused_with_its_argument(argv, message):
    with pytest.raises(ArgumentError, match=message):
        text(*argv)


def test_the_environment_turns_the_routes_on_and_names_devices_and_parent():
    given = server_environment(
        ServerSpec("m", devices=("2", "0")), {"CUDA_VISIBLE_DEVICES": "5,6,7", "RANK": "1", "HOME": "h"}
    )
    assert len(given.pop(SERVER_TOKEN)) == 32
    assert given == {
        "CUDA_VISIBLE_DEVICES": "7,5",
        "HOME": "h",
        PARENT_VARIABLE: str(os.getpid()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
        "LOWPEAK_SERVES_TOKENS": "1",
    }

    given = server_environment(ServerSpec("m", devices=("cpu",)), {"VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    assert (given["VLLM_CPU_OMP_THREADS_BIND"], given["CUDA_VISIBLE_DEVICES"]) == ("0-3", "")
    with pytest.raises(ArgumentError, match=r"CUDA_VISIBLE_DEVICES .*1"):
        server_environment(ServerSpec("m", devices=("1",)), {"CUDA_VISIBLE_DEVICES": "5"})


def test_help_lists_the_arguments_and_says_whose_the_others_are(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in ("model", "host", "port", "token", "tensor_parallel_size", "devices"))
    assert "vLLM's own options" in shown


@pytest.mark.parametrize(("status", "shown"), [(1, True), (-9, True), (2, False)])
def test_the_end_of_a_server_shows_its_log_and_what_sizes_it_unless_it_was_an_option(tmp_path, status, shown):
    process = ServerProcess(ServerSpec("m"), os.environ, tmp_path / "log")
    process.log.write_text("no such --option\n")
    text = process.describe_end(status)
    assert "no such --option" in text
    assert ("vllm_gpu_memory_utilization" in text) == shown


def test_a_missing_vllm_is_reported_at_once(monkeypatch, capsys):
    monkeypatch.setattr("lowpeak.errors.find_spec", lambda name: None)
    assert main(["serve", "--model", "m"]) == 2
    assert "pip install '.[vllm]'" in capsys.readouterr().err


# how it ends, with a program that has vLLM's bad manners: deaf to SIGTERM, with a child of its own

SERVER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)'])
open('pids', 'w').write(f'{os.getpid()} {child.pid} ')
time.sleep(float(sys.argv[1]))
"""

SERVE = """
import os, sys
from lowpeak.cli.serve import wait_for
from lowpeak.vllm.serving.command import ServerSpec
from lowpeak.vllm.serving.process import ServerProcess
command = [sys.executable, 'server.py', sys.argv[1]]
sys.exit(wait_for(ServerProcess(ServerSpec('m', port=1), os.environ, command=lambda server: command)))
"""


def serving(folder, seconds):
    (folder / "server.py").write_text(SERVER)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, str(seconds)], cwd=folder, env=environ, stderr=subprocess.PIPE, text=True
    )


def pids(folder):
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if (folder / "pids").exists() and (folder / "pids").read_text().endswith(" "):
            return [int(pid) for pid in (folder / "pids").read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the server has not started")


@pytest.mark.extended
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_deaf_server_and_its_children_are_ended(number, status, tmp_path):
    process = serving(tmp_path, 60)
    started = pids(tmp_path)
    time.sleep(0.5)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == status
    assert are_gone(started, 5)


def test_a_server_that_ends_by_itself_leaves_no_child_and_is_told(tmp_path):
    process = serving(tmp_path, 0.2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert err.startswith("lowpeak: error: ")
    assert all(each in err for each in ("http://127.0.0.1:1 ", "status 0"))
    assert err.count("\n") == 1
    assert are_gone(pids(tmp_path), 5)
