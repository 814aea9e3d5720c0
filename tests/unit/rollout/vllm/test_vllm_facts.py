"""Another model or tokenizer than the trainer's is refused, with both names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_server import FACTS
from lowpeak.errors import EngineError
from lowpeak.rollout.vllm.facts import check_same, fingerprint
from tiny import char_tokenizer, tiny_model


@pytest.fixture(scope="module")
def policy():
    model = tiny_model()
    model.config._name_or_path = "models/policy"
    return model


def served(model, tokenizer):
    return replace(FACTS, fingerprint=fingerprint(model.config, tokenizer.get_vocab()))


def test_the_same_sizes_and_vocabulary_are_the_same_whatever_the_weights(policy):
    check_same(served(tiny_model(seed=5), char_tokenizer()), policy, char_tokenizer())


@pytest.mark.parametrize("changed", [{"hidden": 64}, {"layers": 3}, {"vocab_size": 20}])
def test_a_model_of_other_sizes_is_refused_with_both_names(policy, changed):
    with pytest.raises(
        EngineError, match=r"'models/tiny' loaded.*'models/policy'.*lowpeak serve --model models/policy"
    ):
        check_same(served(tiny_model(**changed), char_tokenizer()), policy, char_tokenizer())


def test_another_vocabulary_is_refused_with_both_names(policy):
    with pytest.raises(EngineError, match=r"tokenizer, from 'models/tiny'.*'models/policy'"):
        check_same(served(policy, char_tokenizer("abcdefghijk")), policy, char_tokenizer())


def test_the_order_in_which_a_vocabulary_is_listed_does_not_matter(policy):
    vocabulary = char_tokenizer().get_vocab()
    backwards = dict(reversed(vocabulary.items()))
    assert fingerprint(policy.config, vocabulary) == fingerprint(policy.config, backwards)


def test_tokens_that_the_model_does_not_embed_do_not_count(policy):
    vocabulary = char_tokenizer().get_vocab()
    more = vocabulary | {"<|endoftext|>": policy.config.vocab_size}
    assert fingerprint(policy.config, vocabulary) == fingerprint(policy.config, more)
