"""An adapter alone is pushed into vLLM, takes the place of the former one, and answers as peft's model does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lowpeak.arguments.vllm import ServerSettings, VllmSettings
from lowpeak.errors import EngineError
from lowpeak.parallel.parameters import adapter_file_key, adapter_parameters
from lowpeak.records import WeightSlice
from lowpeak.vllm.weight_sync.lora import adapter_config
from lowpeak.vllm.weight_sync.push import loaded_version, push_weights, verify_unchanged
from vllm_in_process import TOLERANCE, InsideVllm, engine, gap, policy_of, slices

SETTINGS = VllmSettings(ServerSettings(()), bucket_bytes=1 << 14)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with engine(policy_of(), tmp_path_factory.mktemp("base"), enable_lora=True, max_lora_rank=8) as made:
        yield made


def _adapted(seed, rank=4, **options):
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = get_peft_model(policy_of(), LoraConfig(r=rank, lora_alpha=16, target_modules=targets, **options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def _slices(model):
    for name, parameter in adapter_parameters(model).items():
        flat = parameter.detach().reshape(-1)
        for start in range(0, len(flat), 300):
            values = flat[start : start + 300]
            yield WeightSlice(adapter_file_key(model, name), tuple(parameter.shape), flat.dtype, start, values)


def _request(report):
    from vllm.lora.request import LoRARequest

    (adapter,) = report.adapters
    return LoRARequest(adapter.name, adapter.number, adapter.folder)


def test_each_pushed_adapter_answers_as_pefts_model(vllm):
    folders = []
    for version, transport in enumerate(("process", "tcp", "process"), 1):
        settings = replace(SETTINGS, transport=transport)
        model = _adapted(version)
        report = push_weights(_slices(model), [vllm], settings, version, adapter=adapter_config(model))
        assert report.num_bytes == sum(4 * p.numel() for p in adapter_parameters(model).values())
        assert gap(vllm, model, _request(report)) < TOLERANCE
        assert gap(vllm, model) > 0.01
        assert loaded_version([vllm]) == version
        verify_unchanged([vllm])
        folders.append(Path(report.adapters[0].folder))
        assert [folder.exists() for folder in folders] == [False] * (len(folders) - 1) + [True]
        assert vllm.call("list_loras", {}, 60.0) == [{report.adapters[0].number}]


def test_an_adapter_of_a_higher_rank_than_the_engine_serves_is_refused(vllm):
    model = _adapted(1, rank=16)
    with pytest.raises(EngineError, match="rank"):
        push_weights(_slices(model), [vllm], SETTINGS, 1, adapter=adapter_config(model))
    assert loaded_version([vllm]) is None


def test_an_adapter_that_vllm_lost_is_found(vllm):
    model = _adapted(1)
    report = push_weights(_slices(model), [vllm], SETTINGS, 1, adapter=adapter_config(model))
    vllm.llm.llm_engine.remove_lora(report.adapters[0].number)
    with pytest.raises(EngineError):
        verify_unchanged([vllm])
    assert loaded_version([vllm]) is None


class Damaging(InsideVllm):
    """Changes a byte of each bucket on its way."""

    def call(self, method, arguments, timeout=None):
        if method == "lowpeak_receive":
            arguments["data"][arguments["pieces"][1]["offset"]] ^= 1
        return super().call(method, arguments, timeout)


def test_an_adapter_that_is_damaged_on_its_way_is_refused(vllm):
    model = _adapted(1)
    with pytest.raises(EngineError, match=r": base_model\.model\.model\.layers\.0"):
        push_weights(_slices(model), [Damaging(vllm.llm)], SETTINGS, 1, adapter=adapter_config(model))
    assert loaded_version([vllm]) is None


def test_an_adapter_is_verified_with_the_base_that_was_pushed(vllm):
    push_weights(slices(policy_of()), [vllm], SETTINGS, 1)
    model = _adapted(1)
    push_weights(_slices(model), [vllm], SETTINGS, 2, adapter=adapter_config(model))
    verify_unchanged([vllm])
    with torch.inference_mode():
        vllm.model.model.norm.weight[3] += 1
    with pytest.raises(EngineError, match=r": model\.norm\.weight"):
        verify_unchanged([vllm])
    assert loaded_version([vllm]) is None
    with pytest.raises(EngineError):
        push_weights(_slices(model), [vllm], SETTINGS, 2, adapter=adapter_config(model))
    push_weights(slices(policy_of()), [vllm], SETTINGS, 3)
    report = push_weights(_slices(model), [vllm], SETTINGS, 3, adapter=adapter_config(model))
    assert gap(vllm, model, _request(report)) < TOLERANCE


def test_merged_weights_go_into_an_engine_that_serves_adapters(vllm):
    changed = policy_of(5)
    push_weights(slices(changed), [vllm], SETTINGS, 7)
    assert gap(vllm, changed) < TOLERANCE
    assert loaded_version([vllm]) == 7
    verify_unchanged([vllm])
