"""Plans of runs that no machine here could run: kinds that add up, strategies, formats, algorithms, what would lower a peak."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import Gemma3TextConfig, NemotronHConfig, Qwen2Config, Qwen3MoeConfig

from case_selection import mark_extended
from lowpeak import (
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)
from lowpeak.errors import ArgumentError
from lowpeak.memory import COPIES_UNDER_WAY
from lowpeak.memory.usage import Kind
from lowpeak.plan.advice import advise
from lowpeak.plan.computed import margin
from lowpeak.plan.hardware import GIB, Machine
from lowpeak.plan.inputs import RunInputs
from lowpeak.plan.layers import FewLayers
from lowpeak.plan.model_counts import ModelCounts
from lowpeak.plan.plan import Plan, make_plan
from lowpeak.plan.planned_batches import scored_batches
from lowpeak.plan.request import PlanRequest
from lowpeak.ranks import Ranks
from lowpeak.sizes import memory_budget
from lowpeak.sizes.run_sizes import Sizes

SMALL = Qwen2Config(
    vocab_size=8_192, hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=1_024, tie_word_embeddings=False, dtype="bfloat16",
)  # fmt: skip
WIDE = copy.deepcopy(SMALL)
WIDE.dtype = torch.float32
CONFIGS = {
    "grpo": GRPOConfig, "rloo": RLOOConfig, "ppo": PPOConfig, "online-dpo": OnlineDPOConfig, "sft": SFTConfig,
    "reward": RewardConfig, "dpo": DPOConfig, "kto": KTOConfig, "distillation": DistillationConfig,
}  # fmt: skip
ONLINE = ("grpo", "rloo", "ppo", "online-dpo", "distillation")
EIGHT = Machine(8, 80 * GIB)
ON_CPU = Machine(1, 80 * GIB, device="cpu")


def arguments(kind: str, **changes: Any) -> Any:
    sizes = {"micro_batch_tokens": 512, "logprob_chunk_size": 64}
    online = {
        "num_generations": 2 if kind == "online-dpo" else 4,
        "max_completion_length": 64,
        "kv_cache_bytes": 1 << 24,
    }
    more = (online if kind in ONLINE else {}) | ({} if kind != "reward" else {"logprob_chunk_size": None})
    batch = {"output_dir": "unused", "use_cpu": True, "per_device_train_batch_size": 8}
    return CONFIGS[kind](**{**batch, **sizes, **more, **changes})


def request(
    kind: str = "grpo", strategy: str = "single", machine: Machine | None = None, **changes: Any
) -> PlanRequest:
    machine = machine or (Machine(1, 80 * GIB) if strategy == "single" else EIGHT)
    teacher = SMALL if kind == "distillation" else None
    return PlanRequest(
        *(kind, arguments(kind, **changes), SMALL, machine, strategy), prompt_tokens=32, teacher_config=teacher
    )


@cache
def plan(*args: Any, **changes: Any) -> Plan:
    return make_plan(request(*args, **changes))


def tensors(found: Plan, phase: str) -> int:
    """The bytes of a phase without the margin."""
    return found.phases[phase].peak - found.phases[phase].device[Kind.MARGIN]


def test_a_rollout_has_bf16_copies_of_fp32_weights_within_the_gather_budget():
    embeddings_and_norms = SMALL.vocab_size * SMALL.hidden_size + (2 * SMALL.num_hidden_layers + 1) * SMALL.hidden_size
    copied, cast = (plan("grpo", gather_budget=budget) for budget in (1 << 40, 0))
    in_products = copied.counts.total - embeddings_and_norms
    assert copied.phases["rollout"].device[Kind.GATHERED] == pytest.approx(2 * in_products, rel=0.01)
    assert Kind.GATHERED not in cast.phases["rollout"].device
    works = (cast, copied, plan("grpo", use_vllm=True, vllm_mode="server"))
    assert [found.work.casts_weights for found in works] == [True, False, False]


def test_graphs_keep_the_logits_of_all_slots_twice_and_only_where_no_pass_gathers():
    eager, graphs = (plan("grpo", gather_budget=0, cuda_graphs=captured) for captured in (False, True))
    assert [found.work.has_graphs for found in (eager, graphs)] == [False, True]
    kept = tensors(graphs, "rollout") - tensors(eager, "rollout")
    assert kept == pytest.approx(2 * graphs.work.sequences * SMALL.vocab_size * 4, rel=0.05)
    assert graphs.seconds["rollout"] < eager.seconds["rollout"]
    assert not plan("grpo", "fsdp2", cuda_graphs=True).work.has_graphs


@pytest.mark.parametrize("kind", mark_extended(list(CONFIGS), ["grpo", "ppo", "sft"]))
def test_every_algorithm_has_a_plan_whose_kinds_add_up(kind):
    found = plan(kind, **({"beta": 0.1, "gather_budget": 0} if kind in ONLINE else {}))
    expected = {"load", "forward", "backward", "optimizer", "save"}
    scores = kind in (*ONLINE, "dpo", "kto")
    expected |= {"sync", "rollout", "reward"} if kind in ONLINE else set()
    expected |= {"score"} if scores else set()
    assert set(found.phases) == expected
    for phase in found.phases.values():
        assert phase.peak == sum(phase.device.values())
        assert all(value >= 0 for value in phase.device.values())
    if kind in ONLINE:
        others = (found.phases[name].peak for name in ("save", "rollout", "reward"))
        assert found.phases["sync"].peak <= min(others)
        assert found.phases["rollout"].device[Kind.KV_CACHE] > 0
    frozen = found.phases["load"].device.get(Kind.FROZEN, 0)
    # The reference is in the checkpoint's bf16; supervised trainers have none.
    assert frozen == (pytest.approx(2 * found.counts.total, rel=0.01) if scores else 0)
    held = found.phases["optimizer"].device
    assert held[Kind.WEIGHTS] == pytest.approx(4 * found.counts.total, rel=0.01)
    assert held[Kind.GRADIENTS] == pytest.approx(4 * found.counts.trained, rel=0.01)
    assert held[Kind.OPTIMIZER] == pytest.approx(8 * found.counts.trained, rel=0.01)
    assert found.fits


@pytest.mark.parametrize(
    ("strategy", "share"),
    mark_extended([("ddp", 1), ("fsdp2", 8), ("zero1", 1), ("zero2", 1), ("zero3", 8)], [("fsdp2", 8), ("zero2", 1)]),
)
def test_a_strategy_spreads_weights_gradients_and_states_over_its_devices(strategy, share):
    found = plan("grpo", strategy)
    width = 2 if strategy.startswith("zero") else 4
    assert found.phases["optimizer"].device[Kind.WEIGHTS] == pytest.approx(width * found.counts.total / share, rel=0.02)
    states = {"ddp": 8, "fsdp2": 1, "zero1": 12 / 8, "zero2": 12 / 8, "zero3": 12 / 8}[strategy]
    assert found.phases["optimizer"].device[Kind.OPTIMIZER] == pytest.approx(states * found.counts.total, rel=0.02)
    gradients = {"ddp": 4, "fsdp2": 4 / 8, "zero1": 2, "zero2": 2 / 8, "zero3": 2 / 8}[strategy]
    assert found.phases["optimizer"].device[Kind.GRADIENTS] == pytest.approx(gradients * found.counts.total, rel=0.02)
    assert found.phases["rollout"].device[Kind.MARGIN] > 0


@pytest.mark.parametrize(
    ("kind", "changes", "uses_nccl"),
    [
        ("grpo", {}, False),
        ("grpo", {"use_vllm": True}, False),
        ("grpo", {"use_vllm": True, "vllm_mode": "server"}, True),
        ("grpo", {"use_vllm": True, "vllm_mode": "server", "vllm_transport": "tcp"}, False),
        ("sft", {}, False),
    ],
)
def test_one_device_has_nccls_memory_if_it_sends_weights_to_servers_in_the_plan_and_in_a_runs_cap(
    monkeypatch, kind, changes, uses_nccl
):
    inputs, capped = RunInputs(request(kind, memory_budget="16GiB", **changes)), []
    assert margin(inputs.request.machine, 0) == (1_500_000_000 if uses_nccl else 800_000_000)
    monkeypatch.setattr(memory_budget, "budget_bytes", lambda *given: 16 * GIB)
    monkeypatch.setattr(memory_budget, "plan_sizes", lambda *given: memory_budget.BudgetPlan({}, {}))
    monkeypatch.setattr(memory_budget.Sizes, "of", lambda *given, **more: Sizes(1, 1, 1, None))
    monkeypatch.setattr(memory_budget, "cap_allocator", lambda *given: capped.append(given))
    gpu = torch.device("cuda:0")
    context = SimpleNamespace(accelerator=SimpleNamespace(device=gpu), acting_args=inputs.args)
    strategy = SimpleNamespace(ranks=Ranks())
    memory_budget.resolve_sizes(context, inputs.settings, None, strategy, None, None, None, None, None)
    assert capped == [(gpu, 16 * GIB, uses_nccl)]


@pytest.mark.extended
def test_phases_that_are_arithmetic_say_so():
    sources = {name: phase.source for name, phase in plan("grpo").phases.items()}
    assert {name for name, source in sources.items() if source == "computed"} == {"sync", "reward", "save"}
    assert {phase.source for phase in plan("grpo", "zero2").phases.values()} == {"computed"}


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_a_preset_with_offload_keeps_shards_in_host_memory(strategy):
    on_device, away = plan("grpo", strategy), plan("grpo", f"{strategy}-offload")
    for kind in (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER):
        moved = on_device.phases["optimizer"].device[kind]
        assert moved > 0 == away.phases["optimizer"].device[kind]
        assert away.phases["optimizer"].host[kind] == moved
    # Each process has its shards; the checkpoint that one reads counts once.
    per_process = sum(away.phases["optimizer"].host.values())
    assert away.host_peak >= 8 * per_process > on_device.host_peak - away.phases["load"].host.get(Kind.CHECKPOINT, 0)


@pytest.mark.extended
def test_a_bf16_policy_stays_bf16_under_fsdp2_whose_autocast_would_make_it_fp32():
    found = plan("grpo", "fsdp2", weight_bits=32)
    held = found.phases["sync"].device
    assert 8 * held[Kind.WEIGHTS] / found.counts.trained == pytest.approx(2, rel=0.02)
    assert 8 * held[Kind.OPTIMIZER] / found.counts.trained == pytest.approx(4, rel=0.05)


DENSE_BEFORE_EXPERTS = Qwen3MoeConfig(
    vocab_size=1_024, hidden_size=256, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=8, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=256, mlp_only_layers=[0], dtype="bfloat16",
)  # fmt: skip
SLIDING_AND_FULL = Gemma3TextConfig(
    vocab_size=1_024, hidden_size=256, num_hidden_layers=30, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    intermediate_size=512, sliding_window=64, dtype="bfloat16",
)  # fmt: skip
MAMBA_AND_FULL = NemotronHConfig(
    vocab_size=1_024, hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=32, intermediate_size=512,
    layers_block_type=["linear_attention", "mlp"] * 5 + ["full_attention", "mlp", "linear_attention"] * 3
    + ["linear_attention", "mlp"] * 4 + ["full_attention"] * 2, mamba_num_heads=8, mamba_head_dim=32, n_groups=1,
    ssm_state_size=16, conv_kernel=4, chunk_size=32, dtype="bfloat16",
)  # fmt: skip
DEEP = copy.deepcopy(SMALL)
DEEP.num_hidden_layers = 12
DEEP.layer_types = ["full_attention"] * 12


@pytest.mark.parametrize(
    ("config", "strategy", "few", "changes"),
    mark_extended(
        [
            (DEEP, "single", (3, 4), {"beta": 0.1}),
            (DEEP, "ddp", (3, 4), {"gradient_checkpointing": True}),
            (DEEP, "fsdp2", (3, 4), {"weight_bits": 16, "offload_optimizer": True}),
            (DEEP, "fsdp2", (3, 4), {"gather_budget": 12 << 20}),
            (DEEP, "hsdp", (3, 4), {}),
            (DENSE_BEFORE_EXPERTS, "fsdp2", (4, 5), {}),
            (SLIDING_AND_FULL, "single", (6, 12), {}),
            (MAMBA_AND_FULL, "single", (6, 7, 7, 7), {}),
        ],
        [(DEEP, "fsdp2", (3, 4), {"gather_budget": 12 << 20})],
        "release",
    ),
)
def test_a_deep_model_has_the_plan_that_few_of_its_layers_show(config, strategy, few, changes, monkeypatch):
    planned = replace(request("grpo", strategy, **changes), config=config)
    planned = replace(planned, machine=Machine(16, 80 * GIB)) if strategy == "hsdp" else planned
    quick = make_plan(planned)
    found = FewLayers.of(RunInputs(planned))
    assert (len(found.few), *(len(each.layers) for each in found.more)) == few
    monkeypatch.setattr(FewLayers, "extrapolates", False)
    whole = make_plan(planned)
    assert {name: phase.peak for name, phase in quick.phases.items()} == {
        name: pytest.approx(phase.peak, rel=1e-3) for name, phase in whole.phases.items()
    }
    assert (quick.to_host, quick.to_device) == (whole.to_host, whole.to_device)
    assert all(value >= 0 for phase in quick.phases.values() for value in phase.device.values())


def test_hsdp_shards_within_a_host_alone():
    found = plan("grpo", "hsdp", machine=Machine(16, 80 * GIB, per_host=4))
    assert found.phases["optimizer"].device[Kind.WEIGHTS] == pytest.approx(4 * found.counts.total / 4, rel=0.02)


@pytest.mark.extended
def test_tensor_parallel_devices_have_parts_of_every_layer():
    on_four = request("grpo", "tp", Machine(4, 80 * GIB))
    parts = make_plan(replace(on_four, tensor_parallel=2))
    assert parts.counts.total == pytest.approx(plan("grpo").counts.total / 2, rel=0.1)
    assert parts.phases["optimizer"].device[Kind.WEIGHTS] == pytest.approx(4 * parts.counts.total / 2, rel=0.02)
    with pytest.raises(ArgumentError, match=r"num_key_value_heads=2.*tp_size=4"):
        make_plan(replace(on_four, tensor_parallel=4))
    with pytest.raises(ArgumentError, match="adapters"):
        make_plan(replace(on_four, tensor_parallel=2, peft_config=LoraConfig(task_type="CAUSAL_LM")))


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [True, False])
def test_offloaded_activations_are_in_host_memory_between_forward_and_backward(checkpointing):
    changes = {} if checkpointing else {"gradient_checkpointing": False}
    on_device, away = plan("grpo", **changes), plan("grpo", **changes, activation_offloading=True)
    moved = away.phases["backward"].host[Kind.ACTIVATIONS]
    # The last copies are under way when the forward's peak is there; each is a layer's input here.
    under_way = COPIES_UNDER_WAY * 4 * away.tokens * away.inputs.config.hidden_size
    left = on_device.phases["forward"].device[Kind.ACTIVATIONS] - away.phases["forward"].device[Kind.ACTIVATIONS]
    assert left == moved - under_way > 0
    if checkpointing:  # the inputs of each layer, of the last norm and of the head, in fp32
        assert moved == pytest.approx((SMALL.num_hidden_layers + 2) * away.tokens * SMALL.hidden_size * 4, rel=0.05)
    assert away.to_host - on_device.to_host >= away.num_batches * moved
    assert tensors(away, "optimizer") == tensors(on_device, "optimizer")


def test_frozen_models_in_host_memory_have_two_units_on_the_device_in_their_phase():
    on_device = make_plan(replace(request(beta=0.1), reward_configs=[WIDE]))
    away = make_plan(replace(request(beta=0.1, offload_frozen_models=True), reward_configs=[WIDE]))
    whole = on_device.phases["score"].device[Kind.FROZEN]
    assert away.phases["score"].host[Kind.FROZEN] == whole
    # A layer's weights and the embeddings or the head, which are larger, in bf16.
    layer, table = 2 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1_024), 2 * 8_192 * 512
    assert away.phases["score"].device[Kind.FROZEN] == pytest.approx(layer + table, rel=0.001)
    assert away.phases["reward"].device[Kind.FROZEN] == pytest.approx(2 * (layer + table), rel=0.001)
    others = {away.phases[name].device[Kind.FROZEN] for name in away.phases.keys() - {"score", "reward"}}
    assert others == {0}


@pytest.mark.extended
def test_a_format_and_an_offload_move_bytes_to_where_they_belong():
    fp32, bf16 = plan("grpo"), plan("grpo", weight_bits=32)
    assert tensors(bf16, "optimizer") < 0.6 * tensors(fp32, "optimizer")
    away = plan("grpo", weight_bits=32, offload_optimizer=True)
    phase = away.phases["backward"]
    assert phase.device.get(Kind.OPTIMIZER, 0) == 0
    assert phase.host[Kind.OPTIMIZER] + phase.host[Kind.GRADIENTS] == pytest.approx(
        8.06 * away.counts.trained, rel=0.05
    )
    assert away.to_host > 0 < away.to_device


@pytest.mark.extended
def test_an_adapter_trains_few_bytes_on_a_frozen_base():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = replace(request(beta=0.1), peft_config=adapter)
    full, lora, four = plan("grpo", beta=0.1), make_plan(adapted), make_plan(replace(adapted, quantized_bits=4))
    assert lora.phases["optimizer"].device[Kind.WEIGHTS] < 0.6 * full.phases["optimizer"].device[Kind.WEIGHTS]
    assert lora.phases["load"].device.get(Kind.FROZEN, 0) == 0  # the reference is the base
    assert four.counts.total == lora.counts.total


def test_a_reward_model_is_frozen_on_the_device_and_has_a_phase():
    found = make_plan(replace(request(), reward_configs=[SMALL]))
    assert found.phases["load"].device[Kind.FROZEN] > 0
    assert found.phases["reward"].device[Kind.ACTIVATIONS] > 0


def test_a_mixture_of_experts_counts_the_parameters_of_a_token():
    config = Qwen3MoeConfig(
        vocab_size=4_096, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, dtype="bfloat16",
    )  # fmt: skip
    counts = ModelCounts.of(RunInputs(replace(request(machine=ON_CPU), config=config)).make_policy)
    assert counts.active < 0.95 * counts.total


def test_a_colocated_vllm_takes_its_share_while_it_generates():
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5, "kv_cache_bytes": None}
    found = plan("grpo", **engine)
    assert found.phases["rollout"].device[Kind.ENGINE] == pytest.approx(40 * GIB)
    assert found.phases["load"].device[Kind.ENGINE] == 0
    asleep = plan("grpo", **engine, vllm_enable_sleep_mode=True)
    assert asleep.phases["backward"].device[Kind.ENGINE] < 2 * GIB


def test_an_engine_that_is_idle_while_the_run_trains_is_advised_to_sleep():
    engine = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5, "kv_cache_bytes": None}
    engine["vllm_bucket_size"] = 1 << 20  # so that the sync, in which it is awake, is no peak
    awake, asleep = (
        plan("grpo", machine=Machine(1, 4 * GIB), **engine, vllm_enable_sleep_mode=x) for x in (False, True)
    )
    advice = next(each for each in advise(awake, count=None) if each.setting == "vllm_enable_sleep_mode=True")
    assert advice.peak < awake.peak
    assert advice.peak == pytest.approx(asleep.peak, rel=0.01)


def test_advice_is_what_a_plan_with_the_setting_takes():
    found = plan("grpo")
    followed = {
        "offload_optimizer=True": plan("grpo", offload_optimizer=True),
        "--gpus 2 --accelerate_config fsdp2": plan("grpo", "fsdp2", machine=Machine(2, 80 * GIB)),
    }
    advised = {each.setting: each.peak for each in advise(found, count=None)}
    lower = {setting: then.peak for setting, then in followed.items() if then.peak < found.peak}
    assert advised.keys() & followed.keys() == lower.keys()
    assert {setting: advised[setting] for setting in lower} == pytest.approx(lower, rel=0.01)


def test_advice_names_settings_that_lower_the_peak_and_their_time():
    found = plan("grpo", gradient_checkpointing=False)
    advice = advise(found)
    assert 1 <= len(advice) <= 3
    assert all(each.peak < found.peak for each in advice)
    assert [each.peak for each in advice] == sorted(each.peak for each in advice)
    rounded = next(each for each in advise(found, count=None) if each.setting == "weight_bits=16")
    assert "stochastic" in rounded.note


@pytest.mark.extended
def test_more_devices_take_shards_and_not_work_from_a_device():
    found = plan("grpo", "fsdp2", Machine(2, 80 * GIB))
    advice = next(each for each in advise(found, count=None) if each.setting == "--gpus 4")
    assert advice.peak < found.peak
    assert advice.added_seconds > -0.1 * sum(found.seconds.values())  # each device has as many sequences as before


def test_advice_is_for_the_phase_that_peaks():
    found = plan("grpo", kv_cache_bytes=GIB, per_device_train_batch_size=1_024, gradient_checkpointing=False)
    assert found.peak_phase == "rollout"
    cache = found.phases["rollout"].device[Kind.KV_CACHE]
    settings = [each.setting for each in advise(found, count=None)]
    assert {f"kv_cache_bytes={cache // 2}", "gather_budget=0"} < set(settings)
    assert "gradient_checkpointing=True" not in settings


@pytest.mark.parametrize(
    ("kind", "length", "longest"), [("sft", 24, 24), ("sft", 200, 96), ("reward", 200, 95), ("sft", 64, 64)]
)
def test_rows_of_offline_runs_are_planned_at_the_length_that_the_run_keeps(kind, length, longest):
    config = Qwen2Config.from_dict({**SMALL.to_dict(), "max_position_embeddings": 96})
    assert (
        RunInputs(replace(request(kind, machine=ON_CPU, max_length=length), config=config)).longest_sequence == longest
    )


@pytest.mark.parametrize("padding_free", [None, False])
def test_branches_lengthen_what_a_run_scores_and_trains_on_and_no_sequence(padding_free):
    changes = {"padding_free": padding_free, "num_iterations": 2, "micro_batch_tokens": 100}
    one, three = (RunInputs(request(machine=ON_CPU, max_branches=number, **changes)) for number in (1, 3))
    for batches_of in (RunInputs.step_batches, scored_batches):
        few, many = batches_of(one), batches_of(three)
        assert sum(len(batch.targets_T) for batch in many) == 3 * sum(len(batch.targets_T) for batch in few)
        positions = [batch.forest.position_ids_1L if batch.forest else batch.input_ids_BL[0] for batch in many]
        assert max(batch.input_ids_BL.numel() for batch in many) > 200  # a record stays whole
        assert {int(each.max()) + 1 if padding_free is None else len(each) for each in positions} == {32 + 64 - 1}
    assert three.least_cache_bytes == one.least_cache_bytes
    peaks = [tensors(plan(max_branches=number, **changes), "backward") for number in (1, 3)]
    assert peaks[0] < peaks[1]
