"""`lowpeak plan` and `lowpeak env CONFIG`: what they print and write, and wrong arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import Qwen2Config

from lowpeak.cli.accelerate_config import strategy_of
from lowpeak.cli.commands import dispatch
from lowpeak.cli.plan_request import machine_of, parse_plan, plan_request
from lowpeak.errors import ArgumentError, ModelError
from lowpeak.memory.usage import Kind
from lowpeak.plan.request import PlanRequest

SMALL = {
    "--num_generations": 4, "--max_completion_length": 32, "--per_device_train_batch_size": 8, "--prompt_tokens": 16,
}  # fmt: skip
GPU = {"--gpus": 1, "--gpu_memory": "8GiB"}


@pytest.fixture
def model(tmp_path) -> str:
    """A folder with a config.json, and no weights."""
    config = Qwen2Config(
        vocab_size=1_024, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def words(model: str, *more: dict[str, Any]) -> list[str]:
    arguments = {"--model": model, **SMALL, **GPU}
    for each in more:
        arguments |= each
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return ["plan", *(str(word) for pair in arguments.items() for word in pair)]


def planned(capsys: Any, model: str, *more: dict[str, Any]) -> dict[str, Any]:
    assert dispatch(words(model, *more, {"--format": "json"})) == 0
    return json.loads(capsys.readouterr().out)


def requested(argv: list[str]) -> PlanRequest:
    """What would be planned; nothing is."""
    options, job = parse_plan(argv)
    return plan_request(options, job, machine_of(options, job))


PRICED = {"--max_steps": 300, "--price_per_hour": 2.5}


def test_a_plan_is_a_table_with_the_phase_that_peaks_and_a_page_without_a_network(model, tmp_path, capsys):
    assert dispatch(words(model, PRICED, {"--plot": tmp_path / "plan.html"})) == 0
    text = capsys.readouterr().out
    for word in ("backward", "weights", "gradients", "8 GiB", "MiB per device", "cost model"):
        assert word in text
    assert " dollars at 2.5 an hour for all GPUs" in text
    page = (tmp_path / "plan.html").read_text()
    assert "backward" in page
    assert 'src="http' not in page


@pytest.mark.release
def test_a_plan_within_a_budget_has_the_sizes_that_keep_to_it(model, capsys):
    small, large = (planned(capsys, model, {"--memory_budget": budget}) for budget in ("900MiB", "4GiB"))
    assert small["peak"] <= small["device_memory"] == 900 << 20
    assert small["sizes"]["kv_cache_bytes"] <= large["sizes"]["kv_cache_bytes"]
    assert small["sizes"]["logprob_chunk_size"] == 1024
    assert dispatch(words(model, {"--memory_budget": "20MiB"})) == 1
    assert "memory_budget is 20 MiB" in capsys.readouterr().err


def test_a_plan_in_json_adds_up_and_has_the_runs_minutes_and_dollars(model, capsys):
    found = planned(capsys, model, PRICED)
    assert found["fits"]
    assert found["peak"] == max(phase["peak"] for phase in found["phases"].values())
    for phase in found["phases"].values():
        assert sum(phase["device"].values()) == phase["peak"]
    assert found["advice"]
    seconds = sum(found["seconds_per_step"].values())
    assert found["minutes"] == pytest.approx(300 * seconds / 60)
    assert found["dollars"] == pytest.approx(300 * seconds / 3600 * 2.5)
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / seconds)


@pytest.mark.extended
def test_the_gpus_of_vllm_servers_share_the_rollout_and_are_paid_for(model, capsys):
    split = {"--gpus": None, "--train_devices": "0,1", "--accelerate_config": "fsdp2", "--use_vllm": True}
    words_of = {"--price_per_hour": 1, "--per_device_train_batch_size": 64}
    one, two, tensor = (
        planned(capsys, model, split, words_of, {"--vllm_devices": devices, "--vllm_tensor_parallel_size": size})
        for devices, size in (("2", 1), ("2,3", 1), ("2,3", 2))
    )
    assert one["devices"] == two["devices"] == 2
    assert one["phases"]["rollout"]["device"].get(Kind.ENGINE, 0) == 0
    assert one["seconds_per_step"]["rollout"] > two["seconds_per_step"]["rollout"]
    assert tensor["seconds_per_step"]["rollout"] == one["seconds_per_step"]["rollout"]
    for found, gpus in ((one, 3), (two, 4)):
        assert found["dollars"] == pytest.approx(found["minutes"] / 60 * gpus)


def test_a_yaml_file_names_the_algorithm_and_the_command_line_overrides_it(model, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"model": model, "algorithm": "ppo", "max_completion_length": 16}))
    common = ["--config", str(run), "--gpu", "rtx4090"]
    assert requested(common).kind == "ppo"
    overridden = requested([*common, "--algorithm", "rloo", "--max_completion_length", "32"])
    assert (overridden.kind, overridden.args.max_completion_length) == ("rloo", 32)


@pytest.mark.parametrize(
    ("preset", "strategy"), [("ddp", "ddp"), ("zero3", "zero3"), ("fsdp2", "fsdp2"), (None, "fsdp2")]
)
def test_the_accelerate_config_places_the_model(preset, strategy, model):
    found = requested(words(model, {"--gpus": 4, "--accelerate_config": preset})[1:])
    assert (found.strategy, found.machine.num_devices) == (strategy, 4)


FSDP2: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def with_mesh(**sizes: int) -> dict[str, Any]:
    return {**FSDP2, "parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


def deepspeed(**section: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "deepspeed_config": section}


@pytest.mark.parametrize(
    ("config", "strategy", "tensor_parallel"),
    [
        (FSDP2, "fsdp2", 1),
        ({**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}, "fsdp2-offload", 1),
        (with_mesh(dp_replicate=2, dp_shard=4), "hsdp", 1),
        (with_mesh(tp=4, dp_shard=2), "tp", 4),
        (deepspeed(zero_stage=2), "zero2", 1),
        (deepspeed(zero_stage=3, offload_optimizer_device="cpu", offload_param_device="cpu"), "zero3-offload", 1),
        ({"distributed_type": "MULTI_GPU"}, "ddp", 1),
    ],
)
def test_a_users_accelerate_file_places_the_model(config, strategy, tensor_parallel, tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", "num_processes": 8, **config}))
    assert strategy_of(str(path)) == (strategy, tensor_parallel)


@pytest.mark.extended
def test_adapters_and_formats_change_the_plan(model, capsys):
    full = planned(capsys, model)["phases"]["optimizer"]["device"][Kind.GRADIENTS]
    bf16 = planned(capsys, model, {"--weight_bits": 32})["phases"]["optimizer"]["device"][Kind.GRADIENTS]
    assert bf16 == pytest.approx(full / 2, rel=0.01)
    pytest.importorskip("peft")
    adapter = planned(capsys, model, {"--use_peft": True, "--lora_target_modules": "all-linear"})
    assert adapter["trained_parameters"] < 0.3 * adapter["parameters"]


def test_fit_writes_files_that_the_trainer_reads(model, tmp_path, capsys):
    out = tmp_path / "plan"
    fit = {"--fit": True, "--output": out, "--emit": "slurm", "--gpus": 16, "--weight_bits": 32}
    assert dispatch(words(model, fit, {"--dataset": "data.jsonl", "--reward": "r.py:f"})) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Chosen: ")
    assert len(lines) <= 15
    run = yaml.safe_load((out / "run.yaml").read_text())
    assert run["model"] == model
    assert run["num_processes"] == 16
    assert run["num_machines"] == 2
    launched = yaml.safe_load(Path(run["accelerate_config"]).read_text())
    launched |= launched.get("parallelism_config", {})
    numbers = run.keys() & launched.keys()
    assert {"num_processes", "num_machines"} <= numbers
    assert all(run[name] == launched[name] for name in numbers)
    slurm = (out / "train.slurm").read_text()
    assert "--nodes=2" in slurm
    assert "--signal=TERM@600" in slurm
    script = (out / "train.sh").read_text()
    assert f"exec lowpeak grpo --config {out / 'run.yaml'} --resume_from_checkpoint auto" in script
    _, job = parse_plan(["--config", str(out / "run.yaml")])
    assert job.config.micro_batch_tokens == run["micro_batch_tokens"]


@pytest.mark.extended
def test_a_server_has_a_job_of_its_own_that_other_hosts_reach(model, tmp_path):
    out = tmp_path / "plan"
    engine = {"--use_vllm": True, "--vllm_mode": "server", "--vllm_server_base_url": "http://a:8000"}
    fit = {"--fit": True, "--output": out, "--emit": "shell", "--micro_batch_tokens": 1_024, "--weight_bits": 32}
    assert dispatch(words(model, engine, fit, {"--dataset": "data.jsonl", "--reward": "r.py:f"})) == 0
    assert {path.name for path in out.glob("*.sh")} == {"train.sh", "serve.sh"}
    assert "--host 0.0.0.0" in (out / "serve.sh").read_text()


@pytest.mark.extended
def test_servers_that_the_run_starts_itself_share_its_job(model, tmp_path):
    out = tmp_path / "plan"
    engine = {"--use_vllm": True, "--vllm_mode": "server", "--vllm_devices": "2", "--gpus": 2}
    fit = {"--fit": True, "--output": out, "--emit": "slurm", "--micro_batch_tokens": 1_024, "--weight_bits": 32}
    assert dispatch(words(model, engine, fit, {"--dataset": "data.jsonl", "--reward": "r.py:f"})) == 0
    assert not list(out.glob("serve*"))
    assert "--gpus-per-node=3" in (out / "train.slurm").read_text()


def test_priced_cards_are_quoted_for_all_steps_the_cheapest_first(model, tmp_path, capsys):
    run = {"--gpu_memory": None, "--gpus": 2, "--max_steps": 300, "--output_dir": tmp_path / "run"}
    prices = tmp_path / "prices.yaml"
    prices.write_text("h100: 2.5\nrtx3060: 0.02\n")
    assert dispatch(words(model, run, {"--prices": prices})) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"2 x rtx3060: [\d.]+ (s|min) to [\d.]+ (s|min) for 300 steps, \$.* to \$.*, the cheapest\.", first
    )
    assert second.startswith("2 x h100: ")
    quote = json.loads((tmp_path / "run/quote.json").read_text())
    fast, slow = quote["hours"]
    assert 0 < fast < slow
    assert quote["dollars"] == pytest.approx([0.04 * fast, 0.04 * slow])
    assert dispatch(words(model, run, {"--prices": "h100=1", "--memory_budget": "16MiB"})) == 1

    journal = tmp_path / "run/journal/steps.jsonl"
    journal.parent.mkdir()
    thrice = {"step": 1} | {f"time/{phase}": 3 * seconds for phase, seconds in quote["seconds_per_step"].items()}
    journal.write_text(3 * f"{json.dumps(thrice)}\n")
    capsys.readouterr()
    longer = {"--gpu": "rtx3060", "--gpus": 2, "--max_completion_length": 64, "--format": "json"}
    found = []
    for options in ({}, {"--journal": tmp_path / "run"}):
        assert dispatch(words(model, longer, {"--gpu_memory": None}, options)) == 0
        found.append(json.loads(capsys.readouterr().out)["seconds_per_step"])
    assert found[1] == pytest.approx({phase: 3 * value for phase, value in found[0].items()})
    (tmp_path / "run/quote.json").write_text("{")
    capsys.readouterr()
    assert dispatch(words(model, longer, {"--gpu_memory": None, "--journal": tmp_path / "run"})) == 0
    assert "no quote with seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "per_host"),
    [({"--gpus": 2, "--gpus_per_host": 3}, 2), ({"--gpus": 12, "--num_machines": 3}, 4), ({"--gpus": 16}, 8)],
)
def test_a_host_has_its_part_of_the_processes(hosts, per_host, model):
    assert requested(words(model, hosts)[1:]).machine.devices_on_host == per_host


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "cause", "on_device"),
    [
        ({}, "2.79 GiB, is the processes themselves", "The run fits on each device: "),
        ({"--gpus": 4}, "11.18 GiB, is the processes themselves", "The run fits on each device: "),
        ({"--gpu_memory": "0.5GiB"}, "2.79 GiB, is the processes themselves", "The run does not fit on a device: "),
    ],
)
def test_too_little_memory_of_host_or_device_is_the_verdict(settings, cause, on_device, model, capsys):
    assert dispatch(words(model, settings, {"--host_memory": "1MiB"})) == 1
    verdict, device, *_ = [line for line in capsys.readouterr().out.splitlines() if line.startswith("The run")]
    assert verdict.startswith("The run does not fit in host memory: ")
    assert ", of 1 MiB, " in verdict
    assert "GiB too much; most of it, " in verdict
    assert cause in verdict
    assert device.startswith(on_device)


@pytest.mark.parametrize("name", ["prompt_tokens", "teacher_prompt_tokens"])
def test_prompts_beyond_the_context_are_a_warning(model, capsys, name):
    distills = {"--algorithm": "distillation", "--teacher_model_kind": "live"} if name != "prompt_tokens" else {}
    requested(words(model, {f"--{name}": 32760, **distills})[1:])
    warning = capsys.readouterr().err
    assert f"warning: {name}=32760 and max_completion_length=32 exceed the model's context of 32768 tokens" in warning
    assert f"the run refuses prompts of more than 32736 tokens; lower {name}" in warning
    requested(words(model, {"--prompt_tokens": 100})[1:])
    assert "exceed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"--gpu": "h1000", "--gpu_memory": "8GiB"}, "h1000"),
        ({"--gpu_memory": "much"}, "gpu_memory"),
        ({"--gpus": 0}, "gpus"),
        ({"--teacher_prompt_tokens": 600}, "teacher_prompt_tokens"),
        ({"--format": "xml"}, "format"),
        ({"--price_per_hour": 0}, "price_per_hour .*0"),
        ({"--emit": "slurm"}, "emit"),
        ({"--fit": True, "--emit": "sky"}, "sky .* --gpu"),
        ({"--output": "folder"}, "output"),
        ({"--gpu": "h100", "--use_cpu": True}, "gpu"),
        ({"--algorithm": "simpo"}, "simpo"),
        ({"--accelerate_config": "fsdp2"}, "gpus"),
        ({"--gpus": 3, "--accelerate_config": "fsdp2-tp"}, "3"),
        ({"--gpus": 8, "--gpus_per_host": 3}, "8 GPUs are not a multiple of 3 per host: set --gpus 6 or 9, or .* 2"),
        ({"--gpus": 8, "--num_machines": 3}, "8 .* 3"),
        ({"--gpu_memory": "24"}, "24 .*24GiB"),
        ({"--gpus": 2, "--accelerate_config": "single"}, "--gpus 1"),
        ({"--gpus": 12}, "12 GPUs are not a multiple of 8 per host: set --gpus 8 or 16, or --gpus_per_host 6"),
        ({"--max_completion_length": 32768}, "leaves no room for a prompt in the model's context of 32768"),
        ({"--journal": "nothing-here"}, "journal"),
        ({"--model": "not/here"}, "not/here.*config.json is enough"),
        ({"--learning_rates": 1}, "learning_rate"),
        ({"--gpu_memory": None, "--prices": "h1oo=2"}, "h1oo, which is not in the table of cards: "),
        ({"--gpu_memory": None, "--prices": "h100"}, "neither a file nor name=price"),
        ({"--gpu_memory": None, "--prices": "h100=-1"}, "h100 costs '-1'"),
        ({"--prices": "h100=2"}, "--gpu_memory has no effect with --prices"),
        ({"--gpu_memory": None, "--prices": "h100=2", "--fit": True, "--output": "o"}, "--output has no effect with"),
        ({"--gpu_memory": None, "--prices": "h100=2,H100=3"}, "names h100 twice"),
    ],
)
def test_a_wrong_argument_is_named(wrong, named, model):
    with pytest.raises((ArgumentError, ModelError), match=named):
        dispatch(words(model, wrong))


def test_an_algorithm_without_its_argument_is_named(model):
    with pytest.raises(ArgumentError, match=r"--algorithm\s+online-dpo"):
        dispatch(["plan", "online-dpo", *words(model)[1:], "--beta", "0.1"])


def test_a_plan_needs_a_model_and_the_memory_of_a_gpu(model):
    with pytest.raises(ArgumentError, match="model"):
        dispatch(["plan", "--gpus", "1", "--gpu", "h100"])
    with pytest.raises(ArgumentError, match="gpu_memory"):
        dispatch(["plan", "--model", model])


@pytest.mark.extended
def test_a_machine_is_checked_against_a_config_and_one_without_gpus_as_the_cpus_that_the_run_would_use(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run = tmp_path / "run.yaml"
    settings = {"model": model, "max_completion_length": 16, "output_dir": str(tmp_path)}
    run.write_text(yaml.safe_dump(settings))
    assert dispatch(["env", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    checked = {line.split(": ")[0] for line in lines}
    assert checked >= {f"ok    {each}" for each in ("devices", "torch", "generation", "device memory", "disk")}
    for name, value in (("plot", "page.html"), ("prices", "h100=2")):
        with pytest.raises(ArgumentError, match=f"--{name} "):
            dispatch(["env", "--config", str(run), f"--{name}", value])
    on_gpu = {name: value for name, value in settings.items() if name != "use_cpu"}
    run.write_text(yaml.safe_dump(on_gpu))
    assert dispatch(["env", str(run)]) == 0
    assert "ok    devices: torch finds no GPU: the run trains on CPUs" in capsys.readouterr().out
    run.write_text(yaml.safe_dump({**on_gpu, "bf16": True}))
    assert dispatch(["env", str(run)]) == 1
    assert re.search(r"FAIL  devices: torch finds no GPU: .*bf16.*use_cpu", capsys.readouterr().out)
    run.write_text(yaml.safe_dump({**settings, "use_cpu": False, "num_processes": 512}))
    assert dispatch(["env", str(run)]) == 1
    assert "FAIL  devices" in capsys.readouterr().out


@pytest.mark.release
def test_a_machine_is_checked_within_the_budget_of_the_run(model, tmp_path, capsys):
    run = tmp_path / "run.yaml"
    settings = {"model": model, "use_cpu": True, "num_generations": 4, "max_completion_length": 16}
    run.write_text(yaml.safe_dump({**settings, "output_dir": str(tmp_path), "memory_budget": "100MiB"}))
    assert dispatch(["env", str(run)]) == 0
    assert ", of 100 MiB\n" in capsys.readouterr().out
    assert dispatch(["env", str(run), "--memory_budget", "2MiB"]) == 1
    assert "memory_budget is 2 MiB: " in capsys.readouterr().out


def test_a_check_of_a_machine_names_its_command(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text("use_cpu: true\n")
    with pytest.raises(ArgumentError, match=r"env.*model"):
        dispatch(["env", str(run)])
