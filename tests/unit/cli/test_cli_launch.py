"""`--accelerate_config`: what is launched, what is taken over, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from lowpeak.cli.accelerate_config import FOLDER, ORDER, read, text_of
from lowpeak.cli.arguments import LaunchArguments
from lowpeak.cli.launch import MARK, Places, launch_or_join, mesh_sizes
from lowpeak.cli.main import main
from lowpeak.errors import ArgumentError, MissingPackageError

COMMAND = ["grpo", "--model", "m"]
HOST = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher, and an environment that is put back."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", MARK, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.clear()
    os.environ.update(before)


def launch(name, on_cpu=True, **told):
    return launch_or_join(LaunchArguments(accelerate_config=name, **told), COMMAND, on_cpu=on_cpu)


def as_rank(monkeypatch, world_size=2, local=2):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local}.items():
        monkeypatch.setenv(name, str(value))


def written(folder, **settings):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def fsdp1(folder):
    fsdp = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True}
    return written(folder, distributed_type="FSDP", num_processes=2, fsdp_config=fsdp)


# presets


def test_every_preset_is_listed_and_accelerate_reads_it():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(ORDER)
    for name in ORDER:
        load_config_from_file(str(FOLDER / f"{name}.yaml"))


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-offload", "hsdp"])
def test_sharding_presets_are_fsdp2_by_layer(name):
    assert read(name).settings["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": name.endswith("offload"),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-offload"])
def test_zero_presets_clip_by_the_run_and_keep_nothing_gathered(name):
    file = read(name).settings["deepspeed_config"]["deepspeed_config_file"]
    config = json.loads(Path(file).read_text())
    zero = config["zero_optimization"]
    assert zero["stage"] == int(name[4])
    assert (config["gradient_clipping"], config["zero_allow_untested_optimizer"]) == ("auto", True)
    if zero["stage"] == 3:
        assert (zero["stage3_max_reuse_distance"], zero["stage3_prefetch_bucket_size"]) == (0, 0)
        assert zero["stage3_max_live_parameters"] <= 10**6
        assert zero["stage3_param_persistence_threshold"] <= 10**5
    assert ("offload_optimizer" in zero) == name.endswith("offload")


def test_a_preset_can_be_printed_for_other_launchers(capsys):
    assert main(["preset", "zero3"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert Path(printed["deepspeed_config"]["deepspeed_config_file"]).is_absolute()
    assert printed == yaml.safe_load(text_of("zero3"))
    assert main(["preset"]) == 2


def test_an_unknown_preset_is_answered_with_those_there_are():
    with pytest.raises(ArgumentError, match=f"'fsdp3' is neither a file nor a preset.*{', '.join(ORDER)}"):
        launch("fsdp3", num_processes=2)


# what is refused


@pytest.mark.parametrize(
    ("name", "told", "message"),
    [
        ("ddp", {}, "--num_processes is needed on CPUs"),
        ("ddp", {"num_processes": 3, **HOST}, "3 does not divide among 2 hosts"),
        (
            "ddp",
            {"num_processes": 4, "num_machines": 2},
            "--machine_rank and --main_process_ip and --main_process_port",
        ),
        (
            "ddp",
            {"num_processes": 2, "parallelism_config_dp_shard_size": 2},
            "no effect: that is --accelerate_config hsdp",
        ),
        ("single", {"num_processes": 2}, "2 was asked for, and the number of processes here is 1"),
        ("single", {"max_restarts": 2}, "--max_restarts 2 has no effect: the config has this one process alone"),
        ("fsdp2", {"num_processes": 2}, "on CPUs accelerate would train DDP in its place"),
        ("ddp", {"num_processes": 0}, "--num_processes 0 must be at least 1"),
        ("ddp", {"num_processes": -2}, "--num_processes -2 must be at least 1"),
        ("ddp", {"num_processes": 2, "num_machines": 0}, "--num_machines 0 must be at least 1"),
        ("ddp", {"num_processes": 2, "main_process_port": 99999}, "--main_process_port 99999 must be a port"),
        ("ddp", {"num_processes": 4, **HOST, "machine_rank": 2}, "machine_rank 2 names no host"),
    ],
)
def test_what_cannot_be_started_is_said_first(name, told, message):
    with pytest.raises(ArgumentError, match=message):
        launch(name, **told)


def test_more_processes_than_devices_are_refused():
    with pytest.raises(ArgumentError, match=r"needs devices, and there is none here|need as many devices"):
        launch("ddp", on_cpu=False, num_processes=99)


def test_sizes_of_processes_without_a_config_are_refused():
    with pytest.raises(ArgumentError, match="--num_processes 2 has no effect: there is no --accelerate_config"):
        launch_or_join(LaunchArguments(num_processes=2), COMMAND, on_cpu=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_type": "MULTI_CPU"}, "MPI alone: use the preset ddp with --use_cpu"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM, which lowpeak does not run"),
        (
            {"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_cp_size": 2}},
            "context parallelism",
        ),
        ({"zero_optimization": {"stage": 3}}, "no config of accelerate's.*--deepspeed"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "no.json"}}, "not there"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "cannot be run as FSDP2"),
        ({"distributed_type": "MULTI_GPU", "num_processes": "two"}, "num_processes: two, which is no whole number"),
        ({"distributed_type": "FSDP", "fsdp_config": "full"}, "fsdp_config: full, which is no group of settings"),
        ({"distributed_type": "MULTI_GPU", "parallelism_config": [1]}, "parallelism_config: .*no group of settings"),
        ({"distributed_type": "MULTI_GPU", "num_procs": 2}, "num_procs, which accelerate does not know; did you mean"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stagee": 3}},
            "deepspeed_config of .* has zero_stagee, which accelerate does not know; did you mean zero_stage",
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "bogus": 1}}, "has fsdp_bogus, which"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "three"}}, "zero_stage: three"),
    ],
)
def test_a_config_that_lowpeak_does_not_run_is_refused(settings, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        launch(written(tmp_path, **settings), num_processes=2)


def test_a_missing_deepspeed_is_said_before_anything_starts():
    program = (
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def find_spec(self, name, *more):\n"
        "        return None if name == 'deepspeed' else self.finder.find_spec(name, *more)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
        "from lowpeak.cli.accelerate_config import read\n"
        f"from lowpeak.errors import {MissingPackageError.__name__}\n"
        "try:\n"
        "    read('zero2')\n"
        f"except {MissingPackageError.__name__} as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("accelerate_config='zero2' needs deepspeed, which is not installed; pip install")


def test_a_config_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"\x00\xff")
    with pytest.raises(ArgumentError, match=r"config\.yaml cannot be read"):
        launch(str(tmp_path / "config.yaml"))


def test_names_of_older_configs_are_known(tmp_path):
    fsdp = {"fsdp_sharding_strategy": 1, "fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_use_orig_params": False}
    older = written(tmp_path, distributed_type="FSDP", fp16=False, fsdp_config=fsdp, downcast_bf16="no")
    assert "backward_prefetch_policy, use_orig_params left out" in str(read(older).converted)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc stands in the environment"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK=5 and WORLD_SIZE=2 stand in the environment"),
    ],
)
def test_an_environment_that_no_launcher_made_is_refused(environ, message, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=message):
        launch("ddp", num_processes=2)


REPLICATE, SHARD = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
TENSOR = "parallelism_config_tp_size"


@pytest.mark.parametrize(
    ("given", "sizes"), [({}, (2, 8)), ({REPLICATE: 4}, (4, 4)), ({REPLICATE: 1, SHARD: 16}, (1, 16))]
)
def test_hybrid_sharding_is_a_copy_a_host_unless_it_is_told_otherwise(given, sizes):
    assert mesh_sizes(read("hsdp"), given, Places(2, 8, on_cpu=False)) == {
        REPLICATE: sizes[0],
        SHARD: sizes[1],
        TENSOR: 1,
    }


def test_a_file_of_the_user_s_own_keeps_its_sizes(tmp_path):
    fsdp, sizes = {"fsdp_version": 2}, {REPLICATE: 2, SHARD: 4}
    file = written(tmp_path, distributed_type="FSDP", fsdp_config=fsdp, parallelism_config=sizes)
    assert mesh_sizes(read(file), {}, Places(1, 8, on_cpu=False)) == {**sizes, TENSOR: 1}


@pytest.mark.parametrize(
    ("given", "sizes"), [({}, (4, 2)), ({TENSOR: 4}, (2, 4)), ({TENSOR: 8}, (1, 8)), ({TENSOR: 2, SHARD: 4}, (4, 2))]
)
def test_tensors_are_cut_over_two_devices_unless_it_is_told_otherwise(given, sizes):
    found = mesh_sizes(read("fsdp2-tp"), given, Places(1, 8, on_cpu=False))
    assert found == {REPLICATE: 1, SHARD: sizes[0], TENSOR: sizes[1]}


def test_tensors_are_cut_within_a_host():
    with pytest.raises(ArgumentError, match="does not divide the 3 processes of a host"):
        mesh_sizes(read("fsdp2-tp"), {}, Places(2, 3, on_cpu=False))


@pytest.mark.parametrize(
    ("given", "places", "message"),
    [
        ({}, Places(1, 8, on_cpu=False), "there is one host: use fsdp2"),
        ({REPLICATE: 3}, Places(2, 4, on_cpu=False), "3 copies cut over 2 x 1 devices each do not fill 8 processes"),
        ({SHARD: 2}, Places(2, 4, on_cpu=False), "2 copies cut over 2 x 1 devices each do not fill 8 processes"),
        ({REPLICATE: 8}, Places(2, 4, on_cpu=False), "8 copies cut over 1 x 1 devices each"),
    ],
)
def test_hybrid_sharding_that_does_not_come_out_even_is_refused(given, places, message):
    with pytest.raises(ArgumentError, match=message):
        mesh_sizes(read("hsdp"), given, places)


# a process that a launcher started


def test_a_rank_never_launches_again(monkeypatch):
    monkeypatch.setenv(MARK, "1")
    assert launch("no such config", num_processes=7) is None


def test_a_rank_of_another_launcher_takes_the_config_over(monkeypatch):
    as_rank(monkeypatch)
    assert launch("zero2") is None
    assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(FOLDER / "zero2.json")
    assert (os.environ["WORLD_SIZE"], os.environ.get("MASTER_PORT")) == ("2", None)


def test_one_process_takes_the_config_of_one_over():
    assert launch("single") is None
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize(
    ("told", "message"),
    [({"num_processes": 3}, "the number of processes here is 2"), ({"machine_rank": 1}, "leave it to that launcher")],
)
def test_what_the_other_launcher_has_settled_is_refused(told, message, monkeypatch):
    as_rank(monkeypatch)
    with pytest.raises(ArgumentError, match=message):
        launch("ddp", **told)


def test_two_configs_are_one_too_many(monkeypatch):
    as_rank(monkeypatch)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ArgumentError, match="`accelerate launch` has a config of its own"):
        launch("ddp")


def test_fsdp1_in_a_file_becomes_fsdp2(tmp_path):
    config = read(fsdp1(tmp_path))
    assert config.settings["fsdp_config"] == {"fsdp_reshard_after_forward": True, "fsdp_version": 2}
    assert "use_orig_params left out" in config.converted.sentence(config.source)


# starting, with a program of no weight in the place of a run


def started(folder, program, *words, processes=2):
    """The launcher's exit status and what it and its ranks wrote."""
    process = start(folder, program, *words, processes=processes)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def start(folder, program, *words, processes=2):
    script = folder / "rank.py"
    script.write_text(f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{program}")
    config = ["--config_file", str(FOLDER / "ddp.yaml"), "--num_processes", str(processes), "--main_process_port", "0"]
    call = f"import sys; from lowpeak.cli.agent import run_agent; sys.exit(run_agent({[*config, *words, str(script)]!r}, {{}}))"
    return subprocess.Popen(
        [sys.executable, "-c", call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_port_that_is_taken_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        hosts = [
            "--num_machines",
            "2",
            "--machine_rank",
            "0",
            "--main_process_ip",
            "127.0.0.1",
            "--main_process_port",
            port,
        ]
        status, _, err = started(tmp_path, "", *hosts)
    last = err.strip().splitlines()[-1]
    assert status == 1
    assert last.startswith("lowpeak.errors.ArgumentError: the processes cannot be started: Tried to launch")
    assert f"on port `{port}`, but another process is utilizing it" in last


def test_the_same_command_runs_on_every_rank():
    call = (
        "from lowpeak.cli.arguments import LaunchArguments; from lowpeak.cli.launch import launch_or_join\n"
        "told = LaunchArguments(accelerate_config='ddp', num_processes=2)\n"
        "raise SystemExit(launch_or_join(told, ['preset', 'single'], on_cpu=True))"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 2 * text_of("single")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("RewardError('no luck')", 1),
        ("echo(RewardError('no luck, says rank 0'), 0)", 0),
        ("echo(RewardError('no luck, says rank 5'), 5)", 1),
        ("echo(RankError('rank 0 is gone'), 0)", 1),
    ],
    ids=["its own", "of a rank beside it", "of another host's rank", "of a rank that is gone"],
)
def test_an_error_is_told_by_the_rank_that_raised_it(error, told, tmp_path):
    """Others of its host repeat it to themselves alone; where it cannot speak, they speak."""
    program = (
        "from lowpeak.cli import main\nfrom lowpeak.errors import RankError, RewardError\n"
        "def echo(error, rank):\n    error.rank = rank\n    return error\n"
        f"def fail(words):\n    raise {error}\n"
        "main.COMMANDS['env'] = fail\nsys.exit(main.main(['env']))"
    )
    status, _, err = started(tmp_path, program, processes=1)
    assert (status, err.count("lowpeak: error: ")) == (2, told)


def test_ranks_that_end_well_are_a_run_that_ends_well(tmp_path):
    status, out, err = started(tmp_path, "os.write(1, f'{rank} of {os.environ[\"WORLD_SIZE\"]}\\n'.encode())")
    assert (status, sorted(out.split("\n")), err) == (0, ["", "0 of 2", "1 of 2"], "")


def test_a_sentence_that_all_ranks_have_to_say_is_said_once(tmp_path):
    program = "from lowpeak.cli.tell import tell\ntell('lowpeak: error: no.')\ntime.sleep(1)\nsys.exit(2)"
    assert started(tmp_path, program) == (2, "", "lowpeak: error: no.\n")


def test_a_rank_that_could_not_say_why_it_ended_is_named(tmp_path):
    program = "rank or time.sleep(30)\nos.kill(os.getpid(), signal.SIGKILL)"
    began = time.monotonic()
    status, _, err = started(tmp_path, program)
    assert status == 137
    assert err.startswith("lowpeak: error: rank 1 was ended by SIGKILL")
    assert err.count("\n") == 1
    assert time.monotonic() - began < 25


def test_ctrl_c_goes_through_to_the_ranks_which_end_by_themselves(tmp_path):
    program = (
        "def stop(*of):\n    time.sleep(1 + rank)\n    print('saved', rank, flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, stop)\nos.write(1, b'on\\n')\ntime.sleep(40)"
    )
    process = start(tmp_path, program)
    assert [process.stdout.readline(), process.stdout.readline()] == ["on\n", "on\n"]
    process.send_signal(2)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "saved 0\nsaved 1\n", "")


def test_a_second_ctrl_c_ends_the_ranks_now(tmp_path):
    program = (
        "pressed = 0\ndef stop(*of):\n    global pressed\n    pressed += 1\n    print('pressed', flush=True)\n"
        "    if pressed > 1:\n        sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\nos.write(1, b'on\\n')\nwhile True:\n    time.sleep(0.1)"
    )
    process = start(tmp_path, program, processes=1)
    assert process.stdout.readline() == "on\n"
    process.send_signal(2)
    assert process.stdout.readline() == "pressed\n"
    process.send_signal(2)
    process.communicate(timeout=30)
    assert process.returncode == 130
