"""How a user starts a run: presets through accelerate's launcher, torchrun, and several hosts."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from hosts import SCRIPT, Host, finish, kill_all, two_hosts, wait_for
from safetensors.torch import load_file

from child_processes import free_port, run_ranks, succeed_on_ranks
from lowpeak.cli.accelerate_config import PRESET_FOLDER
from lowpeak.cli.commands import main
from lowpeak.journal import read_rows, read_steps
from process_ends import are_gone
from tiny_models import char_tokenizer, tiny_model

REWARD = """
import os
import torch
from lowpeak.setup import num_restarts

def exhaust(completions, trainer_state, **columns):
    # In the first step of the first life, and the fourth of the second, rank 1 runs out of memory in a layer.
    life = num_restarts(), os.environ.get("RANK"), trainer_state.global_step
    if life in ((0, "1", 0), (1, "1", 3)):
        torch.nn.modules.module.register_module_forward_pre_hook(fail)
    return spread(completions)

def fail(module, args):
    if module.training and type(module).__name__.endswith("DecoderLayer"):
        raise torch.OutOfMemoryError("injected")

def spread(completions, **columns):
    return [sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 7 / 7 for text in completions]
"""
ROWS = 16
ORPHANS_S = 60  # one that does not end by itself is killed after 30, and then its log does not say that all is saved
START_S = 300  # until a run has started, or has ended that trains a few steps; on a machine that others use, too


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    tokenizer = char_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.dumps({"prompt": f"{i % 10}{i // 10}="}) for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "judge.py").write_text(REWARD)
    return folder


def words(folder: Path, out: str, ranks: int, **settings: Any) -> list[str]:
    """A run's command: 16 completions of 4 prompts a step, whatever the number of ranks."""
    arguments = {
        "model": folder / "model", "dataset": folder / "rows.jsonl", "reward": f"{folder / 'judge.py'}:spread",
        "output_dir": folder / out, "per_device_train_batch_size": 16 // ranks, "num_generations": 4,
        "max_completion_length": 4, "max_steps": 2, "learning_rate": 1e-2, "adam_epsilon": 1e-3, "max_grad_norm": 0.5,
        "logging_steps": 1, "beta": 0.1, "save_strategy": "no", "report_to": "none", "kv_cache_bytes": 1 << 24,
        "micro_batch_tokens": 64, "logprob_chunk_size": 16, **settings,
    }  # fmt: skip
    return ["grpo", "--use_cpu", *(str(word) for name, value in arguments.items() for word in (f"--{name}", value))]


def found(folder: Path, name: str) -> dict[str, Any]:
    return {
        **json.loads((folder / name / "found.json").read_text()),
        "weights": torch.load(folder / name / "weights.pt"),
    }


@pytest.fixture(scope="module")
def alone(folder):
    """The same run in one process: this one."""
    assert main(words(folder, "out1", 1)) == 0
    steps = (folder / "out1/journal/steps.jsonl").read_text().splitlines()
    return {
        "losses": [json.loads(line)["loss"] for line in steps],
        "weights": load_file(folder / "out1/model.safetensors"),
    }


def is_the_same_run(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(other["losses"], abs=1e-5)
    for name, values in other["weights"].items():
        torch.testing.assert_close(one["weights"][name], values, atol=5e-6, rtol=0)


def dry_run(place: Path, arguments: list[str]) -> None:
    assert main([*arguments, "--accelerate_config", "ddp", "--dry_run"]) == 0


@pytest.mark.release
def test_a_dry_run_of_several_ranks_speaks_once(folder, tmp_path):
    ended = run_ranks(dry_run, tmp_path, words(folder, "out2", 2))
    assert [rank.code for rank in ended] == [0, 0], ended
    assert ["micro_batches_at_most: " in rank.log for rank in ended] == [True, False]
    plan = yaml.safe_load(ended[0].log[ended[0].log.index("micro_batches:") :])["micro_batches"]
    assert plan["ranks"] == 2
    assert plan["rows_per_step"] == 2 * plan["rows_per_rank_at_most"]
    assert (plan["micro_batches_at_most"], plan["rows_per_micro_batch_at_least"]) == (1, plan["rows_per_rank_at_most"])


def train_twice(place: Path, arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert main([*arguments, "--output_dir", str(place / "again")]) == 0


def test_ranks_without_a_config_train_twice_as_one_process_does(folder, tmp_path, alone):
    succeed_on_ranks(train_twice, tmp_path, words(folder, "out7", 2))
    for name, values in load_file(folder / "out7/model.safetensors").items():
        torch.testing.assert_close(values, alone["weights"][name], atol=5e-6, rtol=0)
    assert (folder / "out7/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


@pytest.mark.extended
def test_ranks_save_and_end_when_their_launcher_was_killed(folder):
    here, log, out = Host("127.0.0.1", "lo", None), folder / "orphans.log", folder / "out9"
    command = words(folder, "out9", 2, max_steps=100_000)
    launcher = here.start(["-m", "lowpeak", *command, "--accelerate_config", "ddp", "--num_processes", "2"], log)
    ranks: list[psutil.Process] = []
    try:
        wait_for('"step":3,', out / "journal/steps.jsonl", launcher, START_S)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        launcher.kill()
        launcher.wait(10)
        assert len(ranks) == 2
        assert are_gone([rank.pid for rank in ranks], ORPHANS_S)
        assert list(out.glob("checkpoint-*/lowpeak_state.json"))
        assert re.search("lowpeak: .*checkpoint-", log.read_text())
    finally:
        kill_all(launcher)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGKILL)


@pytest.mark.release
def test_a_command_that_runs_out_of_memory_goes_on_by_itself_with_smaller_sizes(folder):
    """Under ZeRO-3 on two hosts, before the first checkpoint and after it."""
    out, logs = folder / "exhausted", [folder / f"exhausted{i}.log" for i in range(2)]
    settings = {"reward": f"{folder / 'judge.py'}:exhaust", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    settings |= {"accelerate_config": "zero3", "num_processes": 2, "num_machines": 2}
    with two_hosts() as hosts:
        settings |= {"main_process_ip": hosts[0].address, "main_process_port": free_port()}
        command = ["-m", "lowpeak", *words(folder, out.name, 2, **settings)]
        processes = [host.start([*command, "--machine_rank", str(i)], logs[i]) for i, host in enumerate(hosts)]
        ended = finish(processes, logs, 2 * START_S)
    assert [status for status, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    assert [row["step"] for row in read_steps(out / "journal")] == [1, 2, 3, 4]
    events = list(read_rows(out / "journal", "events"))
    assert [(row["step"], row["event"], row.get("restarts")) for row in events] == [
        *((0, "resumed", 1), (0, "out of memory", None), (2, "resumed", 2), (2, "out of memory", None))
    ]
    sizes = [row["micro_batch_tokens"] for row in events[1::2]]
    assert 64 > sizes[0] > sizes[1]
    for _, output in ended:
        restarts = re.findall(r"^lowpeak: .* train .*injected.* micro_batch_tokens (\d+)\.$", output, re.MULTILINE)
        assert [int(size) for size in restarts] == sizes
    assert main(words(folder, "undisturbed", 1, max_steps=4)) == 0
    undisturbed = load_file(folder / "undisturbed/model.safetensors")
    for name, values in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(values, undisturbed[name], atol=5e-6, rtol=0)


@pytest.mark.extended
def test_a_preset_of_zero_on_two_hosts_trains_as_one_process_does(folder, alone):
    """torchrun's own options on each host; its ranks take the preset over."""
    with two_hosts() as hosts:
        logs = [folder / f"zero{i}.log" for i in range(2)]
        meet = ["--nnodes", "2", "--nproc_per_node", "1"]
        meet += ["--master_addr", hosts[0].address, "--master_port", str(free_port())]
        command = [SCRIPT, str(folder / "zero3"), *words(folder, "out3", 2), "--accelerate_config", "zero3"]
        processes = [
            host.start(["-m", "torch.distributed.run", *meet, "--node_rank", str(i), *command], logs[i])
            for i, host in enumerate(hosts)
        ]
        ended = finish(processes, logs, START_S)
    assert [status for status, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    run = found(folder, "zero3")
    zero = run["deepspeed"]["zero_optimization"]
    assert (run["strategy"], run["world_size"], zero["stage"]) == ("Zero", 2, 3)
    assert run["deepspeed"]["gradient_clipping"] == 0.5
    assert (zero["stage3_max_reuse_distance"], zero["stage3_prefetch_bucket_size"]) == (0, 0)
    is_the_same_run(run, alone)


@pytest.mark.release
def test_a_preset_whose_tensors_are_cut_trains_as_one_process_does_and_leaves_its_group(folder, alone):
    """accelerate's launcher has FSDP in force; the ranks hand it to transformers, which cuts tensors and rows."""
    here, log = Host("127.0.0.1", "lo", None), folder / "tensor.log"
    run = ["--config_file", str(PRESET_FOLDER / "fsdp2-tp.yaml"), "--num_processes", "2"]
    run += ["--main_process_port", str(free_port())]
    run += ["--parallelism_config_dp_shard_size", "1", "--parallelism_config_tp_size", "2"]
    command = [SCRIPT, str(folder / "tensor"), *words(folder, "out6", 1)]
    ended = finish([here.start(["-m", "accelerate.commands.launch", *run, *command], log)], [log], START_S)
    assert [status for status, _ in ended] == [0], ended
    assert ended[0][1].count("at exit in a process group: False") == 2
    found_here = found(folder, "tensor")
    assert (found_here["strategy"], found_here["world_size"]) == ("TensorParallel", 1)
    is_the_same_run(found_here, alone)


@dataclass(frozen=True)
class Gone:
    """How a host's launcher ended when the other host went away."""

    status: int
    output: str
    seconds: float


@pytest.fixture(scope="module")
def gone(folder):
    """accelerate's launcher and options on two hosts of two ranks: a whole run, and one in which the second host goes away."""
    logs = [folder / f"hsdp{i}.log" for i in range(2)]
    with two_hosts() as hosts:
        run = ["--config_file", str(PRESET_FOLDER / "hsdp.yaml"), "--num_processes", "4", "--num_machines", "2"]
        run += ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"]
        run += ["--main_process_ip", hosts[0].address, "--main_process_port", str(free_port())]
        command = [SCRIPT, str(folder / "hsdp"), *words(folder, "out4", 4)]
        again = f"--output_dir {folder}/out5 --max_steps 900 --logging_steps 100"
        processes = [
            host.start(
                ["-m", "accelerate.commands.launch", *run, "--machine_rank", str(i), *command],
                logs[i],
                HIDE="deepspeed,vllm",
                AGAIN=again,
            )
            for i, host in enumerate(hosts)
        ]
        try:
            wait_for("again", logs[0], processes[0], START_S)
            wait_for('"step":3,', folder / "out5/journal/steps.jsonl", processes[0], START_S)
            hosts[1].go_away(processes[1])
            began = time.monotonic()
            status, output = finish(processes[:1], logs[:1], 60)[0]
            return Gone(status, output, time.monotonic() - began)
        finally:
            for process in processes:
                kill_all(process)


@pytest.mark.release
def test_hybrid_sharding_over_two_hosts_trains_as_one_process_does(folder, gone, alone):
    """FSDP2 with neither DeepSpeed nor vLLM in reach."""
    run = found(folder, "hsdp")
    assert (run["parameter"], run["placements"]) == ("DTensor", "(Replicate(), Shard(dim=0))")
    assert (run["strategy"], run["world_size"], run["absent"]) == ("Fsdp2", 4, ["deepspeed", "vllm"])
    is_the_same_run(run, alone)


@pytest.mark.release
def test_a_host_that_goes_away_ends_the_run_on_the_other(gone):
    assert gone.status != 0
    assert gone.seconds < 60
    sentences = [line for line in gone.output.splitlines() if line.startswith("lowpeak: error: ")]
    assert any(f"rank {rank} is gone" in line for line in sentences for rank in (2, 3)), gone.output
