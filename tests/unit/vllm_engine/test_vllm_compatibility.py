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
import torch

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


def compute_topk_scores(logits, num_logprobs, *, logprob_token_ids_state, expanded_idx_mapping):
    return logits.float().log_softmax(-1)


class V2Sampler:
    """As much of the V2 runner's sampler as its log-probs need; `tests/with_vllm` runs both of vLLM's."""

    logprobs_mode = "raw_logprobs"

    def __init__(self, temperatures):
        values = torch.tensor(temperatures)
        self.sampling_states = SimpleNamespace(temperature=SimpleNamespace(gpu=values, np=values.numpy()))
        self.logprob_token_ids_state = SimpleNamespace()

    def __call__(self, logits, mapping):
        state = self.logprob_token_ids_state
        return compute_topk_scores(logits, 0, logprob_token_ids_state=state, expanded_idx_mapping=mapping)


def test_each_row_of_a_v2_sampler_is_scored_at_the_temperature_of_its_own_sequence():
    logits, mapping = torch.randn(4, 7), torch.tensor([2, 0, 2, 1])
    samplers = [V2Sampler([0.0, 1.3, 0.7]), V2Sampler([0.0, 1.0, 0.0]), V2Sampler([0.5, 0.5, 0.5])]
    for sampler in (*samplers[:2], *samplers[:2]):
        score_at_temperature(sampler)
    expected = logits / torch.tensor([0.7, 1.0, 0.7, 1.3])[:, None]
    torch.testing.assert_close(samplers[0](logits, mapping), expected.log_softmax(-1))
    for untouched in samplers[1:]:  # at temperature 1, and of an engine that was not asked
        assert torch.equal(untouched(logits, mapping), logits.log_softmax(-1))


def test_an_unknown_sampler_is_refused_with_the_version_of_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.1"))
    for sampler in (SimpleNamespace(logprobs_mode="raw_logprobs", sampling_states=None), None):
        with pytest.raises(EngineError, match=rf"0\.34\.1 .*{SUPPORTED}.*use_vllm=False"):
            score_at_temperature(sampler)
    with pytest.raises(EngineError, match="logprobs_mode="):
        score_at_temperature(SimpleNamespace(logprobs_mode="processed_logprobs"))
