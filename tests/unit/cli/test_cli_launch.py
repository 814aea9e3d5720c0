"""`--accelerate_config`: what is launched, what is taken over, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from lowpeak.cli.accelerate_config import PRESET_FOLDER, PRESETS, find_accelerate_config, preset_text, read_config
from lowpeak.cli.arguments import LaunchArguments
from lowpeak.cli.commands import COMMANDS, main
from lowpeak.cli.launch import LAUNCHED, launch_or_join, launcher_arguments
from lowpeak.errors import ArgumentError, RankError, RewardError
from lowpeak.training.recorded_sizes import record_sizes

COMMAND = ["grpo", "--model", "m"]
HOST = {"num_machines": 2, "machine_rank": 0, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
COPIES, SHARDS, TENSORS = (f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp"))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No launcher, and an environment that is put back."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", LAUNCHED, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.clear()
    os.environ.update(before)


def launch(name, on_cpu=True, **settings):
    return launch_or_join(LaunchArguments(accelerate_config=name, **settings), COMMAND, Path("out"), on_cpu=on_cpu)


def as_rank(world_size=2):
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})


def written(folder, **settings):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def words_of(name, devices=8, **given):
    """The launcher's arguments as a mapping."""
    path = find_accelerate_config(name)
    words = launcher_arguments(path, read_config(path), given, devices)
    assert words[-2:] == ["-m", "lowpeak"]
    return dict(zip(words[:-2:2], words[1:-2:2], strict=True))


def test_more_processes_than_devices_are_an_error_whose_remedy_can_be_followed(monkeypatch):
    with pytest.raises(ArgumentError, match=r" 1: .*--num_processes .* 1, .*--use_cpu"):
        words_of("ddp", devices=1, num_processes=2)
    monkeypatch.setattr("lowpeak.cli.launch.num_devices", lambda: 0)
    with pytest.raises(ArgumentError, match=r" has 0: [^,]*--use_cpu"):
        words_of("ddp", devices=None, num_processes=2)


# presets


def test_every_preset_is_listed_and_accelerate_reads_it():
    assert sorted(path.stem for path in PRESET_FOLDER.glob("*.yaml")) == sorted(PRESETS)
    for name in PRESETS:
        load_config_from_file(str(PRESET_FOLDER / f"{name}.yaml"))


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-offload", "hsdp"])
def test_sharding_presets_are_fsdp2_by_layer(name):
    assert read_config(find_accelerate_config(name)).fsdp_config == {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": name.endswith("offload"),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero3-offload"])
def test_zero_presets_clip_by_the_run_and_keep_nothing_gathered(name):
    file = read_config(find_accelerate_config(name)).deepspeed_config["deepspeed_config_file"]
    assert Path(file).stem == name
    config = json.loads(Path(file).read_text())
    zero = config["zero_optimization"]
    assert (config["gradient_clipping"], config["zero_allow_untested_optimizer"]) == ("auto", True)
    if zero["stage"] == 3:
        assert zero["stage3_max_reuse_distance"] == 0
        assert zero["stage3_max_live_parameters"] <= 10**6


def test_a_preset_can_be_printed_for_other_launchers(capsys):
    assert main(["preset", "zero3"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["deepspeed_config"]["deepspeed_config_file"] == str(PRESET_FOLDER / "zero3.json")
    assert main(["preset"]) == main(["preset", "zero4"]) == 2


# what accelerate's launcher is called with


def test_trls_presets_are_known():
    named = {"single_gpu": "single", "multi_gpu": "ddp", "fsdp1": "fsdp2", "fsdp2": "fsdp2", "zero3": "zero3"}
    assert {name: find_accelerate_config(name).stem for name in named} == named


@pytest.mark.parametrize(("on_cpu", "preset"), [(True, "ddp"), (False, "fsdp2")])
def test_several_processes_without_a_config_have_a_preset(on_cpu, preset, monkeypatch):
    started = []
    monkeypatch.setattr("lowpeak.cli.launch.run_launcher", lambda words, folder: started.append(words) or 0)
    monkeypatch.setattr("lowpeak.cli.launch.num_devices", lambda: 2)
    monkeypatch.setattr("lowpeak.cli.launch.allowed_cores", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch(None, on_cpu=on_cpu, num_processes=2) == 0
    assert os.environ["OMP_NUM_THREADS"] == "3"  # what is set stays
    assert str(PRESET_FOLDER / f"{preset}.yaml") in started[0]
    as_rank()
    with pytest.raises(ArgumentError, match=r"--num_processes 2 .*--accelerate_config"):
        launch(None, on_cpu=on_cpu, num_processes=2)


def test_the_launcher_gets_the_file_the_ranks_and_a_free_port():
    files = {
        "--config_file": str(PRESET_FOLDER / "zero2.yaml"),
        "--deepspeed_config_file": str(PRESET_FOLDER / "zero2.json"),
    }
    more = {"--main_process_port": "0", "--num_processes": "4", "--monitor_interval": "0.5"}
    assert words_of("zero2", num_processes=4, monitor_interval=0.5) == files | more


def test_all_devices_of_all_hosts_train_unless_it_is_said_otherwise(tmp_path):
    assert words_of("ddp")["--num_processes"] == "8"
    assert words_of("ddp", gpu_ids="0,3")["--num_processes"] == "2"
    assert words_of("ddp", **HOST)["--num_processes"] == "16"
    assert words_of(written(tmp_path, distributed_type="MULTI_GPU", num_processes=3))["--num_processes"] == "3"


@pytest.mark.parametrize(
    ("name", "given", "sizes"),
    [
        ("hsdp", HOST, (2, 8, 1)),
        ("hsdp", {COPIES: 4, **HOST}, (4, 4, 1)),
        ("hsdp", {COPIES: 1, SHARDS: 16, **HOST}, (1, 16, 1)),
        ("hsdp", {COPIES: 2}, (2, 4, 1)),
        ("fsdp2-tp", {}, (1, 4, 2)),
        ("fsdp2-tp", {TENSORS: 8}, (1, 1, 8)),
        ("fsdp2-tp", {TENSORS: 2, SHARDS: 4}, (1, 4, 2)),
        ("fsdp2-tp", HOST, (1, 8, 2)),
    ],
)
def test_a_preset_shards_over_the_devices_that_are_left(name, given, sizes):
    words = words_of(name, **given)
    assert tuple(int(words[f"--{size}"]) for size in (COPIES, SHARDS, TENSORS)) == sizes


def test_a_file_of_the_users_keeps_its_sizes_and_port(tmp_path):
    settings = {**FSDP2, "parallelism_config": {COPIES: 2, SHARDS: 4}, "main_process_port": 29501}
    words = words_of(written(tmp_path, **settings))
    assert [words[f"--{size}"] for size in (COPIES, SHARDS, TENSORS)] == ["2", "4", "1"]
    assert words["--main_process_port"] == "29501"
    words = words_of(written(tmp_path, **settings), main_process_port=29502, **{SHARDS: 2, TENSORS: 2})
    assert [words[f"--{size}"] for size in (COPIES, SHARDS, TENSORS)] == ["2", "2", "2"]
    assert words["--main_process_port"] == "29502"
    one = written(tmp_path, distributed_type="MULTI_GPU", gpu_ids=0)
    assert words_of(one)["--num_processes"] == "1"


# what is refused


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fsdp3", {"num_processes": 2}, rf"'fsdp3'.*{', '.join(PRESETS)}"),
        ("ddp", {}, "--num_processes .*CPUs"),
        ("ddp", {"num_processes": 3, **HOST}, "--num_processes 3 .* 2 hosts"),
        ("ddp", {"num_processes": 4, "num_machines": 2}, "--machine_rank .*--main_process_ip .*--main_process_port"),
        ("ddp", {"num_processes": 2, SHARDS: 2}, f"--{SHARDS} 2 .*hsdp"),
        ("hsdp", {"num_processes": 2}, f"hsdp .*fsdp2.*--{COPIES}"),
        ("fsdp2-tp", {"num_processes": 6, **HOST}, f"--{TENSORS} 2 .* 3 processes"),
        ("single", {"num_processes": 2}, "--num_processes 2 .*1"),
        ("single", {"max_restarts": 2}, "--max_restarts 2"),
        ("ddp", {"num_processes": 0}, "--num_processes .*1, got 0"),
        ("ddp", {"num_processes": 2, "num_machines": 0}, "--num_machines .*1, got 0"),
        ("ddp", {"num_processes": 2, "main_process_port": 99999}, "--main_process_port 99999"),
        ("ddp", {"num_processes": 4, **HOST, "machine_rank": 2}, "--machine_rank 2 .*0 to 1"),
        (None, {"max_restarts": 2}, "--max_restarts 2 .*--accelerate_config"),
    ],
)
def test_a_launch_that_cannot_work_is_refused_with_its_argument(name, settings, message):
    with pytest.raises(ArgumentError, match=message):
        launch(name, **settings)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        *(("hsdp", {**HOST, size: number}, r"dp_replicate_size=.* 16 processes") for size, number in (
            (COPIES, 3), (SHARDS, 2), (COPIES, 16), (SHARDS, 1))),
        ("ddp", {"num_processes": 5, "devices": 4}, r"5 processes .* 4: .*--num_processes"),
        ("ddp", {"num_processes": 5, "gpu_ids": "0,1,2,3"}, r"5 processes .* 4: .*--num_processes"),
    ],
)  # fmt: skip
def test_processes_that_do_not_match_the_devices_or_the_mesh_are_refused(name, given, message):
    with pytest.raises(ArgumentError, match=message):
        words_of(name, **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distributed_type": "MULTI_CPU"}, "MULTI_CPU .*--use_cpu"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM"),
        ({**FSDP2, "parallelism_config": {"parallelism_config_cp_size": 2}}, "cp_size=2"),
        ({"zero_optimization": {"stage": 3}}, "distributed_type.*--deepspeed"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "no.json"}}, r"no\.json"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}, "version 1.*to-fsdp2"),
        ({"distributed_type": "MULTI_GPU", "num_processes": "two"}, "num_processes .*'two'"),
        ({"distributed_type": "FSDP", "fsdp_config": "full"}, "fsdp_config .*'full'"),
        ({"distributed_type": "MULTI_GPU", "parallelism_config": [1]}, r"parallelism_config .*\[1\]"),
        ({"distributed_type": "MULTI_GPU", "num_procs": 2}, "num_procs"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stagee": 3}}, r"zero_stagee.*'zero_stage'\?"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "bogus": 1}}, "fsdp_bogus"),
        ("\0", r"config\.yaml"),
        ("- 1", r"config\.yaml"),
    ],
)
def test_a_config_that_lowpeak_does_not_run_is_refused(settings, message, tmp_path):
    file = written(tmp_path, **(settings if isinstance(settings, dict) else {}))
    if isinstance(settings, str):
        Path(file).write_text(settings)
    with pytest.raises(ArgumentError, match=message):
        launch(file, num_processes=2)


def test_names_of_older_configs_are_known(tmp_path):
    older = {"fsdp_version": 2, "fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_use_orig_params": False}
    read_config(Path(written(tmp_path, distributed_type="FSDP", fp16=False, fsdp_config=older, downcast_bf16="no")))


def test_a_missing_deepspeed_is_reported_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr("lowpeak.errors.find_spec", lambda name: None)
    words = [*COMMAND, "--dataset", "d", "--reward", "r", "--use_cpu", "--num_processes", "2"]
    assert main([*words, "--accelerate_config", "zero2"]) == 2
    assert "pip install '.[deepspeed]'" in capsys.readouterr().err


# a process that a launcher started


def test_a_rank_never_launches_again():
    os.environ[LAUNCHED] = "1"
    assert launch("no such config", num_processes=7) is None


ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(PRESET_FOLDER / "zero2.json")}
MESH = {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2", "PARALLELISM_CONFIG_TP_SIZE": "2"}


@pytest.mark.parametrize(
    ("name", "world_size", "taken"),
    [
        ("zero2", 2, {**ZERO, "WORLD_SIZE": "2", "MASTER_PORT": None}),
        ("fsdp2-tp", 4, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **MESH}),
        ("single", None, {"ACCELERATE_MIXED_PRECISION": "no"}),
    ],
)
def test_a_rank_of_another_launcher_and_one_process_take_the_config_over(name, world_size, taken):
    if world_size:
        as_rank(world_size)
    assert launch(name) is None
    assert {name: os.environ.get(name) for name in taken} == taken


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        ({"num_processes": 3}, {}, "--num_processes 3 .*2"),
        ({"machine_rank": 1}, {}, "--machine_rank 1"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "no"}, "`accelerate launch`.*--accelerate_config"),
    ],
)
def test_what_the_other_launcher_has_settled_is_refused(settings, environ, message):
    as_rank()
    os.environ.update(environ)
    with pytest.raises(ArgumentError, match=message):
        launch("ddp", **settings)


def test_a_port_that_is_taken_is_reported_with_its_number():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        here = {**HOST, "main_process_ip": "127.0.0.1", "main_process_port": taken.getsockname()[1]}
        with pytest.raises(ArgumentError, match=f"port `{here['main_process_port']}`"):
            launch("ddp", num_processes=2, **here)


# which rank speaks


@pytest.mark.parametrize(
    ("kind", "failed_on", "lines"),
    [(RewardError, None, 1), (RewardError, 0, 0), (RewardError, 5, 1), (RankError, 0, 1)],
    ids=["its own", "of a rank beside it", "of another host's rank", "of a rank that is gone"],
)
def test_an_error_is_printed_by_the_rank_that_raised_it(kind, failed_on, lines, monkeypatch, capsys):
    """Others of its host stay silent; if that rank cannot speak, they speak."""

    def fail(words):
        error = kind("no luck")
        error.rank = failed_on
        raise error

    as_rank()
    os.environ.update(RANK="1", LOCAL_RANK="1")
    monkeypatch.setitem(COMMANDS, "env", fail)
    assert main(["env"]) == 2
    assert capsys.readouterr().err.count("lowpeak: error: ") == lines


# ranks under way: a program takes the place of a run


def start(folder, program, processes=2):
    script = folder / "rank.py"
    script.write_text(f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{program}")
    words = ["--config_file", str(PRESET_FOLDER / "ddp.yaml"), "--num_processes", str(processes)]
    words += ["--main_process_port", "0"]
    call = (
        "import sys; from pathlib import Path; from lowpeak.cli.launch import run_launcher\n"
        f"sys.exit(run_launcher({[*words, str(script)]!r}, Path({str(folder)!r})))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", call], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_the_same_command_runs_on_every_rank():
    call = (
        "from pathlib import Path\n"
        "from lowpeak.cli.arguments import LaunchArguments; from lowpeak.cli.launch import launch_or_join\n"
        "told = LaunchArguments(accelerate_config='ddp', num_processes=2)\n"
        "raise SystemExit(launch_or_join(told, ['preset', 'single'], Path('out'), on_cpu=True))"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, 2 * preset_text("single"), "")


@pytest.mark.release
def test_ranks_share_the_cores():
    call = (
        "from pathlib import Path\n"
        "from lowpeak.cli import launch; from lowpeak.cli.arguments import LaunchArguments\n"
        "launch.allowed_cores = lambda: 12\n"
        "told = LaunchArguments(accelerate_config='ddp', num_processes=2)\n"
        "raise SystemExit(launch.launch_or_join(told, ['env'], Path('out'), on_cpu=True))"
    )
    os.environ.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.count("OMP_NUM_THREADS: 6\n") == 2, done.stderr


def test_a_message_of_all_ranks_is_written_once(tmp_path):
    process = start(
        tmp_path,
        "from lowpeak.cli.output import print_once\nprint_once('lowpeak: error: no.')\ntime.sleep(1)\nsys.exit(2)",
    )
    assert process.communicate(timeout=60) == ("", "lowpeak: error: no.\n")
    assert process.returncode == 2


def test_a_rank_that_was_killed_is_named(tmp_path):
    process = start(tmp_path, "rank or time.sleep(300)\nos.kill(os.getpid(), signal.SIGKILL)")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 137
    assert err.startswith("lowpeak: error: rank 1 ")
    assert "SIGKILL" in err
    assert err.count("\n") == 1


RECORD = "from pathlib import Path; from lowpeak.training.recorded_sizes import record_sizes\n"
RECORD += "def record(): record_sizes(Path(__file__).parent, 'train', 'full', {'micro_batch_tokens': 8}, rank)\n"
RECORD += "print('relaunches', os.environ['LOWPEAK_RELAUNCHES'], flush=True)\n"
SIGNAL = "os.kill(os.getppid(), signal.{name})\ntime.sleep(20)"


@pytest.mark.parametrize(
    ("program", "launches", "status", "has_earlier_record"),
    [
        ("sys.exit(3)", 1, 3, True),
        ("os.environ['LOWPEAK_RELAUNCHES'] == '0' and record()\nsys.exit(3)", 2, 3, False),
        ("os.environ['LOWPEAK_RELAUNCHES'] == '2' or sys.exit(record() or 3)", 3, 0, True),
        (f"record()\n{SIGNAL.format(name='SIGTERM')}", 1, 143, False),
        (
            f"signal.signal(signal.SIGINT, lambda *of: sys.exit(3))\nrecord()\n{SIGNAL.format(name='SIGINT')}",
            1,
            130,
            True,
        ),
    ],
    ids=["another failure", "it fails before it reads the record", "out of memory twice", "a signal", "ctrl-c"],
)
def test_ranks_start_again_only_with_sizes_that_this_launch_has_recorded(
    tmp_path, program, launches, status, has_earlier_record
):
    if has_earlier_record:
        record_sizes(tmp_path, "train", "full", {"micro_batch_tokens": 8}, 0)
    process = start(tmp_path, RECORD + program, processes=1)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert out.split() == [word for i in range(launches) for word in ("relaunches", str(i))], err
    assert process.returncode == status
    assert err.count("micro_batch_tokens 8") == launches - 1


@pytest.mark.extended
def test_ranks_have_more_than_half_a_minute_to_save_after_sigterm(tmp_path):
    program = (
        "def stop(*of):\n    time.sleep(32)\n    os.write(1, b'saved\\n')\n    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nos.write(1, b'on\\n')\ntime.sleep(60)"
    )
    process = start(tmp_path, program)
    assert [process.stdout.readline(), process.stdout.readline()] == ["on\n", "on\n"]
    process.terminate()
    assert process.communicate(timeout=60)[0] == "saved\nsaved\n"
    assert process.returncode == 143


def test_the_first_ctrl_c_goes_to_the_ranks_which_end_by_themselves(tmp_path):
    program = (
        "def stop(*of):\n    time.sleep(1 + rank)\n    print('saved', rank, flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, stop)\nos.write(1, b'on\\n')\ntime.sleep(40)"
    )
    process = start(tmp_path, program)
    assert [process.stdout.readline(), process.stdout.readline()] == ["on\n", "on\n"]
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("saved 0\nsaved 1\n", "")
    assert process.returncode == 130


def test_the_second_ctrl_c_ends_the_ranks_at_once(tmp_path):
    program = (
        "pressed = 0\ndef stop(*of):\n    global pressed\n    pressed += 1\n    print('pressed', flush=True)\n"
        "    if pressed > 1:\n        sys.exit(130)\n"
        "signal.signal(signal.SIGINT, stop)\nos.write(1, b'on\\n')\nwhile True:\n    time.sleep(0.1)"
    )
    process = start(tmp_path, program, processes=1)
    for line in ("on\n", "pressed\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
