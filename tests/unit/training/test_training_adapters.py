"""LoRA, a trained adapter, a quantised base: what trains, what the reference is, what a checkpoint holds."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowpeak.errors import ArgumentError, ModelError
from model_families import make_family
from small_runs import SAVED, make, rows, same, weights
from tiny_models import tiny_model

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
IDS = torch.tensor([[3, 4, 5, 6]])


def trainer(tmp_path, model, peft_config=None, **changes):
    return make("GRPO", tmp_path, model, **{"data": rows(32), **SAVED, "peft_config": peft_config, **changes})


def randomised(policy):
    """The policy with adapters that act."""
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy


def trainable(run):
    return {name: parameter.clone() for name, parameter in run.model.named_parameters() if parameter.requires_grad}


def plain_logprobs(model, record):
    """The log-probs of a record's completion, by one plain forward."""
    ids = torch.tensor([*record.prompt_ids, *record.completion.ids.tolist()])
    start = len(record.prompt_ids)
    logits = model(input_ids=ids[None]).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[start:, None]).squeeze(1).detach()


def test_lora_trains_fp32_adapters_on_a_base_that_keeps_its_dtype(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    run = trainer(tmp_path, model, LoraConfig(**LORA), beta=0.04)
    before, adapters = weights(run), trainable(run).keys()
    assert {p.dtype for name, p in before.items() if name in adapters} == {torch.float32}
    assert {p.dtype for name, p in before.items() if name not in adapters} == {torch.bfloat16}
    run.train()
    moved = {name for name, p in weights(run).items() if not torch.equal(p, before[name])}
    assert moved
    assert moved <= adapters


def test_under_lora_the_reference_is_the_model_with_adapters_off(tmp_path):
    plain = tiny_model()
    run = trainer(tmp_path, copy.deepcopy(plain), LoraConfig(**LORA), beta=0.04, max_steps=1)
    randomised(run.model)
    for record in run.collector.collect(0, 0, run.state).records:
        expected = plain_logprobs(plain, record)
        torch.testing.assert_close(record.reference, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(record.completion.logprobs, expected, atol=1e-3)


def test_a_trained_adapter_that_came_in_is_the_reference_as_it_was_and_is_saved_without_it(tmp_path):
    model = randomised(get_peft_model(tiny_model(), LoraConfig(**LORA)))
    origin = copy.deepcopy(model).eval()
    run = trainer(tmp_path, model, beta=0.04)
    run.train()
    record = run.collector.collect(9, 2, run.state).records[0]
    torch.testing.assert_close(record.reference, plain_logprobs(origin, record), rtol=1e-4, atol=1e-5)
    assert not [name for name in trainable(run) if ".reference." in name]
    assert not (tmp_path / "checkpoint-2" / "reference").exists()
    names = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors").keys()
    assert {"reference" in name for name in names} == {False}


def four_bit(tmp_path):
    tiny_model(hidden=64).save_pretrained(tmp_path / "base")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)


def test_a_lora_run_on_4_bits_resumes_to_the_same_weights(tmp_path):
    whole, resumed = (trainer(tmp_path / "run", four_bit(tmp_path), LoraConfig(**LORA), beta=0.04) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert same(trainable(whole), trainable(resumed))
    assert any(weight.any() for name, weight in trainable(whole).items() if "lora_B" in name)
    with pytest.raises(ArgumentError, match="peft_config"):
        trainer(tmp_path / "plain", four_bit(tmp_path))


def parting(**settings):
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], **settings})


def test_a_merged_model_whose_adapter_parts_tied_weights_is_written_with_both(tmp_path):
    run = trainer(tmp_path / "run", tiny_model(), parting(target_modules=["embed_tokens", "q_proj"]))
    randomised(run.model)
    run.save_merged_model(str(tmp_path / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is False
    assert tiny_model().config.tie_word_embeddings is True
    torch.testing.assert_close(merged(IDS).logits, run.model.eval()(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.extended
def test_a_merged_model_replaces_an_adapter_in_its_folder_and_an_adapter_over_a_whole_model_is_warned_of(
    tmp_path, caplog
):
    def warnings():
        return [record for record in caplog.records if str(tmp_path / "used") in record.message]

    run = trainer(tmp_path / "run", tiny_model(), LoraConfig(**LORA))
    randomised(run.model)
    run.save_model(str(tmp_path / "used"))
    assert not warnings()
    for folder in ("fresh", "used"):
        run.save_merged_model(str(tmp_path / folder))
    fresh, used = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("fresh", "used"))
    assert used.state_dict().keys() == fresh.state_dict().keys()
    torch.testing.assert_close(used(IDS).logits, run.model.eval()(IDS).logits, atol=1e-5, rtol=1e-5)
    run.save_model(str(tmp_path / "used"))
    assert warnings()


def test_an_adapter_that_parts_what_vllm_keeps_as_one_is_refused(tmp_path):
    vllm = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://127.0.0.1:9"}
    with pytest.raises(ArgumentError, match=r"adapter.*embedding.*vLLM"):
        trainer(tmp_path, tiny_model(), parting(), **vllm)
    trainer(tmp_path, tiny_model(tied=False), parting(), **vllm)


def test_lora_on_tied_weights_that_peft_ties_is_refused(tmp_path):
    config = {"target_modules": ["embed_tokens"], "modules_to_save": None}
    with pytest.raises(ArgumentError, match="ensure_weight_tying=True"):
        trainer(tmp_path, tiny_model(), parting(**config, ensure_weight_tying=True))
    trainer(tmp_path, tiny_model(), parting(**config))


@pytest.mark.extended
@pytest.mark.parametrize(
    "family", ["Nemotron-H", "Mamba2", "Falcon-H1", "Falcon-Mamba", "PhiMoE", "DeepSeek-V4", "Falcon", "Qwen3-VL"]
)
def test_all_linear_leaves_out_what_cannot_be_adapted(tmp_path, family, caplog):
    model = make_family(family)
    run = trainer(
        tmp_path, model, LoraConfig(r=2, target_modules="all-linear", exclude_modules=["k_proj"]), max_steps=1
    )
    run.train()
    adapted = {name.split(".lora_A")[0] for name in trainable(run) if ".lora_A." in name}
    assert len(adapted) >= 2
    assert not [name for name in adapted if "visual" in name or name.endswith(("router", "k_proj", "mixer.out_proj"))]
    run.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(make_family(family), tmp_path / "adapter")
    saved = dict(loaded.named_parameters())
    assert all(torch.equal(parameter, saved[name]) for name, parameter in trainable(run).items())
    has_experts = "experts.gate_up_proj" in caplog.text
    assert has_experts == (family in ("PhiMoE", "DeepSeek-V4"))


def test_an_adapters_start_follows_the_runs_seed(tmp_path):
    def start(seed):
        torch.manual_seed(99 + seed)  # whatever a script drew before
        run = trainer(tmp_path / str(seed), tiny_model(), LoraConfig(**LORA), seed=seed)
        return {name: p for name, p in weights(run).items() if "lora_A" in name}

    first, again, other = start(0), start(0), start(1)
    assert same(first, again)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def kinds_of_adapters():
    attention = ["q_proj", "v_proj"]
    lora = partial(LoraConfig, r=4, task_type="CAUSAL_LM")
    return {
        "embedding": lora(target_modules=[*attention, "embed_tokens"]),
        "tokens": lora(target_modules=attention, trainable_token_indices=[3, 5]),
        "saved head": lora(target_modules=attention, modules_to_save=["lm_head"]),
        "dora": lora(target_modules=attention, use_dora=True),
        "ia3": IA3Config(task_type="CAUSAL_LM", target_modules=attention, feedforward_modules=[]),
        "norms": LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]),
    }


@pytest.mark.extended
@pytest.mark.parametrize("kind", kinds_of_adapters())
def test_the_reference_of_a_trained_adapter_of_any_kind_is_what_came_in(tmp_path, kind):
    policy = get_peft_model(tiny_model(tied=False), kinds_of_adapters()[kind])
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    run = trainer(tmp_path, policy, beta=0.5, num_iterations=2)
    run.next_step()
    for record in run.rollout.records:
        torch.testing.assert_close(record.reference, record.old, rtol=0, atol=1e-6)


@pytest.mark.parametrize("parts", [{}, {"modules_to_save": ["lm_head"]}])
def test_a_fresh_adapter_leaves_the_base_as_the_reference(tmp_path, parts):
    policy = get_peft_model(tiny_model(tied=False), LoraConfig(**LORA, **parts))
    trainer(tmp_path, policy, beta=0.5)
    assert list(policy.peft_config) == ["default"]


@pytest.mark.extended
def test_of_several_adapters_the_active_one_trains_beside_its_own_copy(tmp_path):
    policy = get_peft_model(tiny_model(), LoraConfig(**LORA), adapter_name="first")
    policy.add_adapter("second", LoraConfig(**LORA))
    randomised(policy).set_adapter("second")
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    run = trainer(tmp_path, policy, beta=0.5)
    run.train()
    moved = {name for name, p in policy.named_parameters() if name in before and not torch.equal(p, before[name])}
    assert policy.active_adapters == ["second"]
    assert moved
    assert all(".second." in name for name in moved)


def test_a_reference_by_several_adapters_or_one_that_trains_the_base_is_refused(tmp_path):
    policy = get_peft_model(tiny_model(), LoraConfig(**LORA), adapter_name="first")
    policy.add_adapter("second", LoraConfig(**LORA))
    policy.base_model.set_adapter(["first", "second"])
    with pytest.raises(ArgumentError, match=r"beta .*first, second"):
        trainer(tmp_path, policy, beta=0.5)
    with pytest.raises(ArgumentError, match="bias='none'"):
        trainer(tmp_path, tiny_model(), LoraConfig(**LORA, bias="lora_only"), beta=0.5)


@pytest.mark.extended
def test_parts_that_are_saved_whole_beside_a_half_precision_base_train_under_autocast_alone(tmp_path):
    parts = LoraConfig(**LORA, modules_to_save=["lm_head"])
    half = partial(tiny_model, dtype=torch.bfloat16, tied=False)
    run = trainer(tmp_path / "bf16", half(), parts, bf16=True)
    run.train()
    assert run.state.global_step == 2
    with pytest.raises(ModelError, match=r"bfloat16 and float32.*bf16=True"):
        trainer(tmp_path / "fp32", half(), parts, bf16=False)
