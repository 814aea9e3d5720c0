"""Another model or tokenizer than the trainer's is refused, with both names; an unsupported vLLM is a warning.

A sampler that lowpeak does not know is an error.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fake_server import FACTS
from lowpeak.errors import EngineError
from lowpeak.ranks import Ranks
from lowpeak.vllm.colocated import num_host_ranks
from lowpeak.vllm.compatibility import SUPPORTED, check_same_model, fingerprint, score_at_temperature, warn_unsupported
from tiny_models import char_tokenizer, tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def policy():
    model = tiny_model()
    model.config._name_or_path = "models/policy"
    return model


def served(model, tokenizer):
    return replace(FACTS, fingerprint=fingerprint(model.config, tokenizer.get_vocab()))


def test_the_same_sizes_and_vocabulary_are_the_same_whatever_weights_order_and_tokens_without_embedding(policy):
    check_same_model(served(tiny_model(seed=5), char_tokenizer()), policy, char_tokenizer())
    vocabulary = char_tokenizer().get_vocab()
    expected = fingerprint(policy.config, vocabulary)
    assert fingerprint(policy.config, dict(reversed(vocabulary.items()))) == expected
    assert fingerprint(policy.config, vocabulary | {"<|endoftext|>": policy.config.vocab_size}) == expected


@pytest.mark.parametrize("changed", [{"hidden": 64}, {"layers": 3}, {"vocab_size": 20}, None])
def test_a_model_of_other_sizes_or_another_vocabulary_is_refused_with_both_names(policy, changed):
    vocabulary = char_tokenizer("abcdefghijk") if changed is None else char_tokenizer()
    option = "--tokenizer" if changed is None else "--model models/policy"
    with pytest.raises(EngineError, match=f"'models/tiny'.*'models/policy'.*{option}"):
        check_same_model(served(tiny_model(**(changed or {})), vocabulary), policy, char_tokenizer())


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.1rc1", "0.30.2", "0.34.0", "1.0", "dev"])
def test_a_version_outside_the_supported_range_is_a_warning_that_names_both(version, caplog):
    with caplog.at_level(logging.WARNING):
        warn_unsupported(version)
    supported = version.startswith(("0.31", "0.32", "0.33"))
    assert [(version in r.getMessage(), SUPPORTED in r.getMessage()) for r in caplog.records] == [(True, True)] * (
        not supported
    )


def test_the_version_that_is_installed_with_the_package_is_in_the_range():
    assert f'"vllm{SUPPORTED}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_rank_of_the_host_counts_for_the_memory_of_engines_that_sleep():
    assert num_host_ranks(Ranks(), {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}) == 8
    assert num_host_ranks(Ranks(), {}) == 1


def test_an_unknown_sampler_is_refused_with_the_version_of_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.1"))
    for sampler in (SimpleNamespace(logprobs_mode="raw_logprobs", sampling_states=None), None):
        with pytest.raises(EngineError, match=rf"0\.34\.1 .*{SUPPORTED}.*use_vllm=False"):
            score_at_temperature(sampler)
    with pytest.raises(EngineError, match="logprobs_mode="):
        score_at_temperature(SimpleNamespace(logprobs_mode="processed_logprobs"))
