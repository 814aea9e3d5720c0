"""FSDP2's units of each family: every layer is one, no parameter is in two, and little is left for the root."""

from __future__ import annotations

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from test_family_training import CLASSES
from torch import nn

from case_selection import mark_extended
from lowpeak.models.load import freeze_other_modalities
from lowpeak.parallel.partial_gather import block_modules, unit_classes
from model_families import FAMILIES, is_known, make_family

# Nested classes, shared attention, two attentions in a layer, classes that only the family with images has.
ALSO = ("Falcon-Mamba", "Zamba2", "LongCat-Flash", "Gemma 4", "Gemma 3 with vision", "Qwen3-VL")

# Zamba2's attention, which its layers share; Gemma 3n's projection for all layers, which is small in published sizes.
ROOT_SHARES = {"Zamba2": 0.5, "Gemma 3n": 0.15}


@pytest.mark.parametrize("family", mark_extended(list(FAMILIES), CLASSES + ALSO, "release"))
def test_each_layer_is_a_unit_and_the_root_has_little(family):
    if not is_known(family):
        pytest.skip(f"this transformers has no {FAMILIES[family][0]}")
    model = make_family(family)
    freeze_other_modalities(model)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=unit_classes(model),
        cpu_ram_efficient_loading=False,
    )
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model)
    units = [module for module in model.modules() if is_unit(module)]
    assert {id(unit) for unit in units} == {id(layer) for layer in block_modules(model)}
    in_units = [id(parameter) for unit in units for parameter in unit.parameters()]
    assert len(in_units) == len(set(in_units))
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    stacks = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    assert len(units) >= max(map(len, stacks))
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(p) for table in filter(None, [*tables, model.get_output_embeddings()]) for p in table.parameters()}
    sizes = {id(p): p.numel() for p in model.parameters() if p.requires_grad and id(p) not in apart}
    of_root = sum(size for key, size in sizes.items() if key not in set(in_units))
    assert of_root <= ROOT_SHARES.get(family, 0.1) * sum(sizes.values())
