"""One command for servers and trainer: what each gets to see, what is refused, and that all of them end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from lowpeak.arguments.vllm import SERVER_TOKEN
from lowpeak.cli.commands import main
from lowpeak.cli.vllm_devices import (
    SERVER_ARGUMENTS,
    SERVER_URLS,
    STARTED_WITH_SERVERS,
    plan_processes,
    trainer_settings,
)
from lowpeak.errors import ArgumentError
from process_ends import are_gone
from tiny_models import char_tokenizer, tiny_model

GIVEN = {"use_vllm": True, "model": "m", "output_dir": "out"}


def planned(environ=None, num_devices=4, **given):
    return plan_processes("grpo", ["--model", "m"], GIVEN | given, num_devices, environ or {})


# devices


@pytest.mark.parametrize(
    ("given", "trainer", "servers"),
    [
        ({"train_devices": "0", "vllm_devices": "1"}, "0", [("1",)]),
        ({"train_devices": "0,3", "vllm_devices": "1,2", "accelerate_config": "ddp"}, "0,3", [("1",), ("2",)]),
        ({"vllm_devices": "3,1", "vllm_tensor_parallel_size": 2, "accelerate_config": "ddp"}, "0,2", [("3", "1")]),
        ({"vllm_devices": "cuda:1"}, "0", [("1",)]),
        ({"train_devices": "GPU-8f", "vllm_devices": "GPU-2a,MIG-1"}, "GPU-8f", [("GPU-2a",), ("MIG-1",)]),
        ({"vllm_devices": "cpu", "accelerate_config": "ddp"}, "0,1,2,3", [("cpu",)]),
        ({"train_devices": "2"}, "2", []),
        ({"train_devices": "cpu", "vllm_devices": "0"}, "", [("0",)]),
        (
            {"environ": {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "train_devices": "0,3", "vllm_devices": "1"},
            "4,7",
            [("1",)],
        ),
        ({"num_devices": 0, "vllm_devices": "cpu"}, None, [("cpu",)]),
    ],
)
def test_each_list_names_what_its_processes_see(given, trainer, servers):
    both = planned(**given)
    assert both.trainer_environ.get("CUDA_VISIBLE_DEVICES") == trainer
    assert [each.devices for each in both.servers] == servers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_devices": "0,1", "vllm_devices": "1,2"}, "--train_devices 0,1 .*--vllm_devices 1,2"),
        ({"vllm_devices": "1,1"}, "--vllm_devices 1,1"),
        ({"vllm_devices": "4"}, "--vllm_devices .*4.*0 to 3"),
        ({"train_devices": "9", "vllm_devices": "1"}, "--train_devices .*9.*0 to 3"),
        ({"vllm_devices": "one"}, "--vllm_devices one: 'one'"),
        ({"vllm_devices": ""}, "--vllm_devices : ''"),
        ({"vllm_devices": "1,cpu"}, "--vllm_devices 1,cpu: cpu"),
        ({"vllm_devices": "1,2,3", "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=2 .* 3 devices.* 1 or 3"),
        ({"vllm_devices": "0,1,2,3"}, "--vllm_devices"),
        ({"vllm_devices": "GPU-2a"}, "--vllm_devices .*UUIDs.*--train_devices"),
        ({"train_devices": "0", "vllm_devices": "GPU-2a"}, "--train_devices .*--vllm_devices .*UUIDs"),
        ({"train_devices": "0,GPU-8f", "vllm_devices": "cpu"}, "--train_devices .*--vllm_devices .*UUIDs"),
        ({"train_devices": "0", "vllm_devices": "2", "gpu_ids": "0"}, "--gpu_ids"),
        ({"vllm_devices": "1", "use_vllm": False}, "--use_vllm true"),
        ({"vllm_devices": "1", "vllm_mode": "colocate"}, "--vllm_mode colocate"),
        ({"vllm_devices": "1", "vllm_server_port": 8000}, "--vllm_server_port 8000"),
        ({"vllm_devices": "1", "vllm_enable_sleep_mode": True}, "--vllm_enable_sleep_mode True"),
        ({"vllm_devices": "1", "num_machines": 2}, "--num_machines 2.*--vllm_server_base_url"),
        ({"vllm_devices": "cpu", "vllm_tensor_parallel_size": 0}, "size 0"),
        ({"vllm_devices": "1", "vllm_engine_kwargs": {"model": "x"}}, "model"),
        ({"vllm_devices": "1", "vllm_engine_kwargs": "x"}, "vllm_engine_kwargs .*JSON"),
        ({"vllm_devices": "1", "kv_cache_bytes": 1, "vllm_gpu_memory_utilization": 0.8},
         r"--vllm_gpu_memory_utilization 0\.8 .*--kv_cache_bytes 1"),
        ({"vllm_devices": "1", "vllm_engine_kwargs": {"api_key": "x"}}, "--api-key"),
        ({"num_devices": 0, "vllm_devices": "0"}, "this machine has no GPU; cpu"),
        *(({"environ": {name: "2"}, "vllm_devices": "1"}, "--accelerate_config")
          for name in ("LOCAL_RANK", "WORLD_SIZE", "LOWPEAK_LAUNCHED")),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused_before_anything_starts(given, message):
    with pytest.raises(ArgumentError, match=message):
        planned(**given)


# what servers and trainer are told


def test_what_was_said_of_the_engine_goes_to_the_servers():
    more = {
        "enforce_eager": True,
        "hf_overrides": {"a": 1},
        "enable_chunked_prefill": False,
        "lora_modules": ["a", "b"],
    }
    expected = {"vllm_tensor_parallel_size": 2, "vllm_max_model_length": 512, "kv_cache_bytes": 1 << 20, "bf16": True}
    (server,) = planned(vllm_devices="1,2", **expected, vllm_engine_kwargs={**more, "seed": None}).servers
    assert (server.model, server.tensor_parallel_size, server.dtype, server.host) == ("m", 2, "bfloat16", "127.0.0.1")
    expected = "--gpu-memory-utilization 0.01 --max-model-len 512 --kv-cache-memory-bytes 1048576 --enforce-eager --hf-overrides"
    assert server.options == (*expected.split(), '{"a": 1}', "--no-enable-chunked-prefill", "--lora-modules", "a", "b")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"vllm_devices": "cpu"}, "float32"),
        ({"vllm_devices": "1"}, None),
        ({"vllm_devices": "1", "bf16": False}, "float32"),
        ({"vllm_devices": "1", "fp16": True}, "float16"),
        ({"vllm_devices": "1", "bf16": True, "vllm_engine_kwargs": {"dtype": "float32"}}, None),
    ],
)
def test_a_server_computes_in_the_trainers_dtype_where_that_is_known(given, dtype):
    assert planned(**given).servers[0].dtype == dtype


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ()),
        ({"use_peft": True}, ("--enable-lora", "--max-lora-rank", "16")),
        ({"use_peft": True, "lora_r": 20}, ("--enable-lora", "--max-lora-rank", "32")),
        ({"use_peft": True, "max_staleness": 2}, ("--enable-lora", "--max-lora-rank", "16", "--max-loras", "3")),
        ({"use_peft": True, "vllm_adapters": False}, ()),
        ({"use_peft": True, "vllm_engine_kwargs": {"max_lora_rank": 64}}, ("--enable-lora", "--max-lora-rank", "64")),
        ({"vllm_gpu_memory_utilization": 0.8}, ("--gpu-memory-utilization", "0.8")),
    ],
)
def test_a_server_gets_its_share_and_room_for_the_runs_adapter(given, expected):
    assert planned(vllm_devices="1", **given).servers[0].options == expected


def test_the_trainer_is_configured_with_the_servers_and_without_what_was_said_to_them():
    both = planned(vllm_devices="1,2", vllm_max_model_length=512)
    urls = [each.url for each in both.servers]
    assert len(set(urls)) == 2
    script = trainer_settings(GIVEN | {"vllm_max_model_length": 512, "kv_cache_bytes": 1}, both.trainer_environ)
    own = {"vllm_mode": "server", "vllm_server_base_url": ",".join(urls), "vllm_max_model_length": 512}
    assert script == GIVEN | own  # the length too: prompts that do not fit are found before anything trains
    assert trainer_settings(GIVEN, {}) == GIVEN
    assert both.command == (sys.executable, "-m", "lowpeak", "grpo", "--model", "m")
    assert "vllm_max_model_length" not in SERVER_ARGUMENTS


def test_several_devices_without_a_word_on_how_train_under_fsdp2():
    assert planned(train_devices="0,3", vllm_devices="1,2").command[-2:] == ("--accelerate_config", "fsdp2")
    assert "--accelerate_config" not in planned(train_devices="0,3", vllm_devices="1", accelerate_config="ddp").command
    assert "--accelerate_config" not in planned(vllm_devices="1").command


def test_servers_on_this_host_demand_a_token_that_nobody_else_knows():
    one, other = planned(vllm_devices="1"), planned(vllm_devices="1")
    assert one.servers[0].token == one.trainer_environ[SERVER_TOKEN] != other.servers[0].token
    assert planned({SERVER_TOKEN: "mine"}, vllm_devices="1").servers[0].token == "mine"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_dry_run_needs_vllm_as_the_run_does(capfd):
    words = "--model m --dataset d --reward exact_match --use_vllm true --vllm_devices cpu --dry_run"
    assert main(["grpo", *words.split()]) == 2
    assert "--vllm_devices needs vLLM" in capfd.readouterr().err


@pytest.mark.extended
def test_a_dry_run_starts_no_server_and_resolves_what_the_trainer_would(tmp_path, monkeypatch, capfd):
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    tiny_model().save_pretrained(tmp_path / "model")
    char_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}="}}\n' for i in range(8)))
    (tmp_path / "judge.py").write_text("def judge(completions, **columns):\n    return [0.0] * len(completions)\n")
    words = f"--model {tmp_path}/model --dataset {tmp_path}/rows.jsonl --reward {tmp_path}/judge.py:judge --dry_run"
    words += f" --output_dir {tmp_path}/out --use_cpu --report_to none --max_steps 1 --max_completion_length 8"
    words += " --use_vllm true --vllm_devices cpu --vllm_max_model_length 64"
    assert main(["grpo", *words.split()]) == 0
    assert "vllm_devices: cpu" in capfd.readouterr().out
    assert STARTED_WITH_SERVERS not in os.environ


# under way, with programs of no weight in the place of vLLM and of a run

SERVER = """
import http.server, json, os, signal, sys, threading
name, port = sys.argv[1:]
if os.path.exists('broken'):
    sys.exit('vLLM: no such option')
with open(f'{name}.json', 'a') as file:
    file.write(json.dumps(dict(os.environ, PID=os.getpid())) + '\\n')
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if os.path.exists('dying'):
            print('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.', flush=True)
            os._exit(9)
    do_POST = do_GET
    def log_message(self, *args): pass
print('serving', flush=True)
http.server.ThreadingHTTPServer(('127.0.0.1', int(port)), Handler).serve_forever()
"""

START = """
import os, sys
from pathlib import Path
from lowpeak.cli.vllm_devices import plan_processes
from lowpeak.cli.supervisor import supervise
from lowpeak.errors import EngineError
from dataclasses import replace
given = {'use_vllm': True, 'model': 'm', 'output_dir': 'logs', 'vllm_devices': '1,2', 'train_devices': '0,3',
         'accelerate_config': 'ddp'}
plan = replace(plan_processes('grpo', [], given, 4, os.environ), command=(sys.executable, 'trainer.py'))
def command(server):
    return [sys.executable, 'server.py', 'server' + server.devices[0], str(server.port)]
try:
    sys.exit(supervise(plan, os.environ, command))
except EngineError as error:
    sys.exit(f'lowpeak: error: {error}')
"""

RECORD = "import json, os, signal, sys, time\nopen('trainer.json', 'w').write(json.dumps(dict(os.environ, PID=os.getpid())))\n"


@pytest.fixture
def start(tmp_path):
    """Starts both in a folder; what a failed test leaves is ended."""
    made = []

    def started(trainer):
        (tmp_path / "server.py").write_text(SERVER)
        (tmp_path / "trainer.py").write_text(RECORD + trainer)
        ours = (STARTED_WITH_SERVERS, SERVER_URLS, "CUDA_VISIBLE_DEVICES")
        environ = {name: value for name, value in os.environ.items() if name not in ours}
        environ["PYTHONPATH"] = str(Path(__file__).parents[3] / "src")
        command = [sys.executable, "-c", START]
        made.append(subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True))
        return made[-1]

    yield started
    for each in made:
        each.terminate()
        each.communicate(timeout=30)


def ended(process, seconds=30):
    _, err = process.communicate(timeout=seconds)
    return process.returncode, err


def recorded(folder, name, life=0):
    """The environment that a child was started with, once it has written it."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        file = folder / f"{name}.json"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) > life:
            return json.loads(lines[life])
        time.sleep(0.05)
    raise AssertionError(f"{name} has not started")


def gone(folder, *names):
    return are_gone([recorded(folder, name)["PID"] for name in names], 10)


def ready(process, folder):
    """The supervisor once both servers are ready, and the first one's id."""
    expected = ""
    while expected.count("is ready") < 2:
        expected += process.stderr.readline()
    return process, recorded(folder, "server1")["PID"]


ALL = ("server1", "server2", "trainer")


def test_the_children_see_what_they_need_and_a_trainer_that_dies_takes_the_servers_along(start, tmp_path):
    wait = "while not all(os.path.exists(f'server{i}.json') for i in (1, 2)): time.sleep(0.05)\n"
    status, err = ended(start(f"{wait}time.sleep(1)\nos.kill(os.getpid(), signal.SIGKILL)"))
    assert status == 137
    first, second, trainer = (recorded(tmp_path, name) for name in ALL)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in (first, second, trainer)] == ["1", "2", "0,3"]
    assert first["VLLM_SERVER_DEV_MODE"] == "1"
    assert first[SERVER_TOKEN] == trainer[SERVER_TOKEN]
    assert trainer[SERVER_URLS].count("http://127.0.0.1:") == 2
    assert " 1 at http://127.0.0.1:" in err
    assert gone(tmp_path, *ALL)
    assert (tmp_path / "logs/vllm-0.log").read_text() == "serving\n"


def test_a_server_that_never_was_ready_ends_all_and_its_last_words_are_shown(start, tmp_path):
    (tmp_path / "broken").touch()
    status, err = ended(start("time.sleep(60)"))
    assert status == 1
    assert "vLLM: no such option" in err.rpartition("logs/vllm-")[2]
    assert gone(tmp_path, "trainer")


def test_a_server_that_dies_later_is_started_again(start, tmp_path):
    process, first = ready(start("while not os.path.exists('end'): time.sleep(0.05)"), tmp_path)
    os.kill(first, signal.SIGKILL)
    assert recorded(tmp_path, "server1", life=1)["PID"] != first
    (tmp_path / "end").touch()
    status, err = ended(process)
    assert (status, "again (process" in err) == (0, True)
    assert gone(tmp_path, "server2", "trainer")


SAVES = "signal.signal(signal.SIGTERM, lambda *of: (time.sleep(2), open('saved', 'w').close(), sys.exit(3)))\n"


def test_a_server_that_dies_again_and_again_ends_all_with_its_last_words_and_what_to_change(start, tmp_path):
    (tmp_path / "dying").touch()
    status, err = ended(start(f"{SAVES}time.sleep(60)"))
    assert status == 1
    assert 3 <= err.count("again (process") <= 6  # there are two of them
    assert all(each in err for each in ("(after 3 restarts)", "status 9", "vllm_batch_size", "logs/vllm-"))
    assert (tmp_path / "saved").exists()
    assert gone(tmp_path, *ALL)


def test_a_server_that_cannot_be_started_again_is_given_up_soon_and_only_its_last_life_is_shown(start, tmp_path):
    process, first = ready(start("time.sleep(60)"), tmp_path)
    (tmp_path / "broken").touch()
    os.kill(first, signal.SIGKILL)
    status, err = ended(process)
    assert (status, err.count("again (process")) == (1, 2)
    assert "(after 2 restarts)" in err
    last = err.rpartition("logs/vllm-")[2]
    assert ("vLLM: no such option" in last, "serving" in last) == (True, False)
    assert gone(tmp_path, "server2", "trainer")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_goes_to_the_trainer_which_ends_as_it_does_and_the_servers_after_it(number, start, tmp_path):
    script = f"signal.signal({int(number)}, lambda *of: (open('ended', 'w').close(), sys.exit(5)))\n"
    process = start(script + "open('on.json', 'w').write('{}')\ntime.sleep(60)")
    for name in (*ALL, "on"):
        recorded(tmp_path, name)
    process.send_signal(number)
    assert ended(process)[0] == 5
    assert (tmp_path / "ended").exists()
    assert gone(tmp_path, *ALL)
