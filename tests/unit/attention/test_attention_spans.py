"""Windows that a config lists and its class does not apply, with which transformers' cache drops tokens."""

from __future__ import annotations

import pytest

from lowpeak.attention.spans import check_spans
from lowpeak.errors import ModelError
from model_families import FAMILIES, is_known, make_family
from small_runs import make, trained

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("Llama 3", {"sliding_window": 5}, "LlamaForCausalLM .*sliding_window=5"),
        ("GLM-4", {"sliding_window": 5}, "Glm4ForCausalLM .*sliding_window=5"),
        ("Llama 3", MIXED, "LlamaForCausalLM .*sliding_window=5"),
        ("Mixtral", MIXED, "MixtralForCausalLM .*layer_types"),
        ("Mistral-window", {"sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_a_window_that_the_class_does_not_apply_is_refused(family, changes, words):
    model = make_family(family)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelError, match=words):
        check_spans(model)


def test_a_run_that_generates_is_refused_and_training_on_data_is_not(tmp_path):
    model = make_family("Llama 3")
    model.config.sliding_window = 5
    with pytest.raises(ModelError, match="sliding_window=5"):
        make("GRPO", tmp_path, model=model)
    trained("SFT", tmp_path, model=model, max_steps=1)


def test_every_family_applies_its_windows():
    for family in filter(is_known, FAMILIES):
        check_spans(make_family(family).base_model)
