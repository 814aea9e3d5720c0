"""What a run asks of servers before it trusts them with its weights."""

from __future__ import annotations

import logging

import pytest

from fake_server import FakeServer, serving
from longrope import FIRST, longrope_model
from lowpeak.config.vllm import ColocateSettings, ServerSettings
from lowpeak.errors import ArgumentError, EngineError
from lowpeak.rollout.vllm.facts import fingerprint
from lowpeak.training.engines import served, within_rotations
from tiny import char_tokenizer, tiny_model


def named(fake):
    return [path for path, body in fake.calls if path == "/health"]


@pytest.mark.parametrize(("version", "num_warnings"), [("0.32.0", 0), ("0.30.1", 1)])
def test_a_server_of_a_version_that_was_not_tried_is_warned_of(version, num_warnings, caplog):
    policy, tokenizer = tiny_model(), char_tokenizer()
    same = fingerprint(policy.config, tokenizer.get_vocab())
    with serving(FakeServer(fingerprint=same, version=version)) as fake, caplog.at_level(logging.WARNING):
        (vllm,) = served(ServerSettings((fake.url,), timeout=10.0), policy, tokenizer)
        assert vllm.url == fake.url
        assert len(named(fake)) == 1  # it was waited for once
    said = [record.getMessage() for record in caplog.records if version in record.getMessage()]
    assert len(said) == num_warnings


def test_a_server_of_another_model_is_refused():
    with serving(FakeServer()) as fake, pytest.raises(EngineError, match="sizes"):
        served(ServerSettings((fake.url,), timeout=10.0), tiny_model(), char_tokenizer())


def test_a_context_beyond_the_first_rotations_of_a_longrope_model_is_refused():
    policy, tokenizer = longrope_model(), char_tokenizer()
    same = fingerprint(policy.config, tokenizer.get_vocab())
    beyond = pytest.raises(EngineError, match="`lowpeak serve --max_model_len` 16")
    with serving(FakeServer(fingerprint=same)) as fake, beyond:
        served(ServerSettings((fake.url,), timeout=10.0), policy, tokenizer)
    assert within_rotations(ColocateSettings(), FIRST).max_model_length == FIRST
    assert within_rotations(ColocateSettings(max_model_length=8), FIRST).max_model_length == 8
    assert within_rotations(ColocateSettings(), None).max_model_length is None
    with pytest.raises(ArgumentError, match=r"vllm_max_model_length=32 .* 16"):
        within_rotations(ColocateSettings(max_model_length=32), FIRST)
