"""A run that is resumed in another storage format: one line of the log names both formats, and the values are those saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowpeak.errors import CheckpointError
from lowpeak.optim.compact_adamw import MOMENTS, find_compact
from lowpeak.parallel.checkpoint_state import trained_parameters
from small_runs import SAVED, saved, trained
from tiny_models import tiny_model

pytestmark = pytest.mark.extended

RUN = {**SAVED, "max_steps": 2}
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
FORMATS = {
    "fp32": ({}, "weights in fp32, optimizer states as optim stores them"),
    "8-bit states": ({"state_bits": 8}, "weights in fp32, gradients in fp32, optimizer states in 8 bits"),
    "32": ({"weight_bits": 32}, "weights in bf16 with 16 more bits"),
    "16": ({"weight_bits": 16}, "weights in bf16 (stochastic rounding"),
}


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "resumed with other arguments" in each.getMessage()]


def real_values(run, key: str) -> dict[str, Tensor]:
    """The fp32 values of a run's weights ("weight") or moments, in any format."""
    compact, found = find_compact(run.optimizer), {}
    for name, parameter in trained_parameters(run.model).items():
        states = run.optimizer.state[parameter]
        exact = parameter.detach() if key == "weight" else states.get(key)
        found[name] = exact.flatten() if compact is None else compact.read(parameter, key, 0, parameter.numel())
    return found


def run_in(place: Path, storage: str, kind: str = "GRPO", **changes: Any) -> Any:
    return trained(kind, place, tiny_model(hidden=64), **{**RUN, **FORMATS[storage][0], **changes})


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Finished runs of two steps by their storage format; a test resumes from the checkpoint in `output_dir`."""
    return {name: run_in(tmp_path_factory.mktemp(name), name) for name in ("fp32", "32")}


def checkpoint_of(run: Any) -> Path:
    return Path(run.args.output_dir) / "checkpoint-2"


def assert_log_names(caplog: pytest.LogCaptureFixture, before: str, after: str) -> None:
    (message,) = changes(caplog)
    assert f"storage was '{FORMATS[before][1]}" in message
    assert f"is '{FORMATS[after][1]}" in message


@pytest.mark.parametrize(("kind", "before", "after"), [("GRPO", "8-bit states", "32"), ("SFT", "16", "8-bit states")])
def test_the_log_names_both_formats_once(tmp_path, caplog, kind, before, after):
    run_in(tmp_path, before, kind)
    assert changes(caplog) == []
    run_in(tmp_path, after, kind, resume=True)
    assert_log_names(caplog, before, after)


def test_bf16_weights_of_another_optimizer_are_a_format_too_and_the_same_format_is_no_change(tmp_path, caplog):
    model = saved(tmp_path / "model", tiny_model(hidden=64))
    sgd = {**RUN, "optim": "sgd"}
    trained("GRPO", tmp_path / "run", model, **sgd)
    trained("GRPO", tmp_path / "run", model, **sgd, resume=True)
    assert changes(caplog) == []
    trained("GRPO", tmp_path / "run", model, **sgd, **BF16, resume=True)
    (message,) = changes(caplog)
    assert "is 'weights in bf16, optimizer states as optim stores them'" in message


@pytest.mark.parametrize("state_bits", [8, 32])
def test_a_checkpoint_of_adamw_in_fp32_gives_its_moments_and_rounded_weights(tmp_path, caplog, first_runs, state_bits):
    before = first_runs["fp32"]
    assert (checkpoint_of(before) / "optimizer.pt").exists()
    after = run_in(tmp_path, "32", state_bits=state_bits, resume=checkpoint_of(before))
    assert_log_names(caplog, "fp32", "32")
    assert after.state.global_step == 2
    for name, weight in real_values(after, "weight").items():
        exact = real_values(before, "weight")[name]
        assert torch.equal(weight, exact.bfloat16().float()), "low bits are clear"
    for key in MOMENTS:
        for name, moment in real_values(after, key).items():
            exact = real_values(before, key)[name]
            tolerance = 0 if state_bits == 32 else 0.02 * float(exact.abs().max())
            torch.testing.assert_close(moment, exact, rtol=0, atol=tolerance)
    assert {int(state["step"]) for state in find_compact(after.optimizer).state.values()} == {2}


@pytest.mark.parametrize(
    ("storage", "states"), [("fp32", {}), ("32", {"state_bits": 32}), ("8-bit states", {})], ids=["fp32", "32", "8-bit"]
)
def test_a_checkpoint_of_32_bits_gives_the_weights_that_bf16_and_low_bits_are_together(
    tmp_path, first_runs, storage, states
):
    before = first_runs["32"]
    run = run_in(tmp_path, storage, **states, resume=checkpoint_of(before))
    expected = real_values(before, "weight")
    assert any(not torch.equal(values, values.bfloat16().float()) for values in expected.values())
    for name, weight in real_values(run, "weight").items():
        assert torch.equal(weight, expected[name])
    if storage == "fp32":  # a finished run takes no step, and exports the fp32 weights
        run.save_model(str(tmp_path / "fp32"))
        exported = load_file(tmp_path / "fp32" / "model.safetensors")
        assert all(torch.equal(values.flatten(), expected[name]) for name, values in exported.items())
    if storage != "8-bit states":
        for key in MOMENTS:
            moments = real_values(before, key)
            assert all(torch.equal(values, moments[name]) for name, values in real_values(run, key).items())


@pytest.mark.parametrize(("before", "after"), [("fp32", "32"), ("32", "fp32")])
def test_a_change_of_format_overrides_no_argument(tmp_path, first_runs, before, after):
    """The optimizers of two formats differ in `fused`, which the user has not set."""
    for max_steps, resume in ((3, checkpoint_of(first_runs[before])), (4, True)):
        run = run_in(tmp_path, after, max_steps=max_steps, strict_arguments=True, resume=resume)
        assert run.state.global_step == max_steps


@pytest.mark.parametrize(("optim", "names"), [("adafactor", "exp_avg_sq"), ("adamw_bnb_8bit", "bnb")])
def test_states_of_another_optimizer_are_named(tmp_path, optim, names):
    run_in(tmp_path, "fp32", optim=optim, max_steps=1)
    with pytest.raises(CheckpointError, match=f"optimizer's: .*{names}"):
        run_in(tmp_path, "32", resume=True)
