"""Each family's tensors have the published checkpoint's names and shapes, in vLLM and in the files that lowpeak writes.

One family of each class runs with the other tests, the rest in `make test-families`.
"""

from __future__ import annotations

import pytest
import torch
from name_checks import SETTINGS, PublishedModel, check_weight_names, exported_tensors, published_tensors, slices
from test_family_training import CLASSES

from case_selection import mark_extended
from fused_model import FusedVllm
from lowpeak.errors import EngineError
from lowpeak.vllm.weight_sync.push import push_weights
from model_families import FAMILIES, is_known, make_family

EACH = mark_extended(list(FAMILIES), CLASSES, "release")


def made(family):
    if not is_known(family):
        pytest.skip(f"this transformers has no {FAMILIES[family][0]}")
    return make_family(family)


@pytest.mark.parametrize("family", EACH)
def test_vllm_gets_each_tensor_of_the_checkpoint_and_frozen_ones_once(family):
    assert check_weight_names(made(family)) == "yes"


@pytest.mark.parametrize("family", EACH)
def test_files_have_the_tensors_that_transformers_writes(family):
    model = made(family)
    ours, theirs = exported_tensors(model), published_tensors(model)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize(("family", "part"), [("GLM-4-MoE", "correction_bias"), ("Qwen2.5-VL", "visual.")])
def test_vllm_may_lack_buffers_and_parts_for_images_but_no_weight_for_text(family, part):
    model = made(family)
    published = published_tensors(model)

    def push_without(part):
        accepted = {name: tensor for name, tensor in published.items() if part not in name}
        assert len(accepted) < len(published)
        push_weights(slices(model), [FusedVllm(PublishedModel(model.config, accepted))], SETTINGS, 0)

    push_without(part)
    with pytest.raises(EngineError, match=r"layers\.1\.self_attn\.o_proj\.weight"):
        push_without("layers.1.self_attn.o_proj")
