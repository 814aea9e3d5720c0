"""Tokens among the arguments: no text and no file about a run shows them, and the run itself has them."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import lowpeak
from lowpeak.arguments.online import resolve_online
from lowpeak.arguments.validation import EffectReport
from lowpeak.errors import ArgumentError
from lowpeak.trainers.constructor import base_arguments
from small_runs import KINDS, ONLINE_KINDS

SERVED = {"use_vllm": True, "vllm_mode": "server"}


def config(kind, folder):
    more = {} if kind in KINDS[len(ONLINE_KINDS) :] else {**SERVED, "vllm_server_token": "S3CRET"}
    arguments = {"hub_token": "S3CRET", "model_init_kwargs": {"token": "S3CRET", "revision": "main"}}
    return getattr(lowpeak, f"{kind}Config")(output_dir=str(folder), use_cpu=True, **arguments, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_arguments_hold_no_token_and_the_runs_do(kind, tmp_path):
    args = config(kind, tmp_path)
    inner = base_arguments(args)
    file = io.BytesIO()
    torch.save(inner, file)
    assert b"S3CRET" not in file.getvalue()
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert (saved.hub_token, saved.model_init_kwargs) == (None, {"token": None, "revision": "main"})
    assert saved.learning_rate == args.learning_rate
    assert (inner.hub_token, inner.model_init_kwargs["token"]) == ("S3CRET", "S3CRET")
    for other in (copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert other.hub_token == "S3CRET"


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_of_the_arguments_and_settings_shows_a_token(kind, tmp_path):
    args = config(kind, tmp_path)
    texts = [repr(args), str(args), str(args.to_dict()), args.to_json_string(), str(args.to_sanitized_dict())]
    if kind == "GRPO":
        texts.append(repr(resolve_online(args, 1, 1)))
    assert not [text for text in texts if "S3CRET" in text]


ADDRESS = {"vllm_server_base_url": "http://user:S3CRET@host:1"}


def report_effects(args):
    effects = EffectReport(args)
    effects.add_declared(resolve_online(args, 1, 1).facts)
    effects.report()


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({**ADDRESS, **SERVED}, "vllm_server_base_url"),
        (ADDRESS, "<hidden>@host"),
        ({"vllm_server_token": "S3CRET"}, "vllm_server_token=<hidden>"),
        ({"vllm_server_token": ["S3CRET"]}, "vllm_server_token=<hidden>"),
    ],
)
def test_an_address_with_a_password_or_a_token_that_is_refused_is_not_repeated(tmp_path, arguments, shown):
    args = lowpeak.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, strict_arguments=True, **arguments)
    with pytest.raises(ArgumentError, match=shown) as refused:
        report_effects(args)
    assert "S3CRET" not in str(refused.value) + repr(args)
