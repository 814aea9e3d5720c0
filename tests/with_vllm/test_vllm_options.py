"""The names of engine arguments that are read from vLLM's source are those that it takes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest

from lowpeak.cli.beside import plan
from lowpeak.config.vllm import ColocateSettings, VllmSettings
from lowpeak.errors import ArgumentError
from lowpeak.rollout.vllm.options import check_options, known_options
from lowpeak.training.engines import check_engine


def test_they_are_read_without_importing_vllm():
    code = "from lowpeak.rollout.vllm.options import known_options\nassert known_options(True)\n"
    code += "import sys\nassert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_they_are_vllms_own():
    from vllm import LLM
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    mine = set(inspect.signature(LLM.__init__).parameters) - {"self", "kwargs"}
    assert mine | {field.name for field in fields(EngineArgs)} <= known_options(False)
    assert {field.name for field in fields(AsyncEngineArgs)} | {"uvicorn_log_level", "headless"} <= known_options(True)
    check_options({field.name for field in fields(EngineArgs)}, server=True)


def test_an_unknown_one_is_refused_before_anything_loads():
    where = ColocateSettings(engine_kwargs={"enforce_eger": True})
    with pytest.raises(
        ArgumentError, match=r"has enforce_eger, which vLLM does not take; did you mean enforce_eager\?"
    ):
        check_engine(VllmSettings(where))
    given = {"use_vllm": True, "model": "m", "vllm_devices": "cpu", "vllm_engine_kwargs": {"banana": 1}}
    with pytest.raises(ArgumentError, match="has banana, which vLLM does not take"):
        plan("grpo", [], given, 0, {})
