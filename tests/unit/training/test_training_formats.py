"""A run that is resumed in another storage format: one line of the log names both formats, and the values are those saved."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowpeak.errors import CheckpointError
from lowpeak.optim.compact_adamw import MOMENTS, find_compact
from lowpeak.parallel.checkpoint_state import trained_parameters
from small_runs import SAVED, make, saved, trained
from tiny_models import tiny_model

pytestmark = pytest.mark.extended

RUN = {**SAVED, "max_steps": 2}
BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
FORMATS = {
    "fp32": ({}, "weights in fp32, optimizer states as optim stores them"),
    "fp32, 8-bit states": ({"state_bits": 8}, "weights in fp32, gradients in fp32, optimizer states in 8 bits"),
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


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        *(("GRPO", "fp32", "16"), ("SFT", "16", "fp32, 8-bit states")),
        *(("GRPO", "fp32, 8-bit states", "32"), ("SFT", "32", "fp32")),
    ],
)
def test_the_log_names_both_formats_once(tmp_path, caplog, kind, before, after):
    trained(kind, tmp_path, tiny_model(hidden=64), **RUN, **FORMATS[before][0])
    assert changes(caplog) == []
    trained(kind, tmp_path, tiny_model(hidden=64), **RUN, **FORMATS[after][0], resume=True)
    (message,) = changes(caplog)
    assert f"storage was '{FORMATS[before][1]}" in message
    assert f"is '{FORMATS[after][1]}" in message


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
def test_a_checkpoint_of_adamw_in_fp32_gives_its_moments_and_rounded_weights(tmp_path, state_bits):
    before = trained("GRPO", tmp_path, tiny_model(hidden=64), **RUN)
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    compact = {"weight_bits": 32, "state_bits": state_bits}
    after = trained("GRPO", tmp_path, tiny_model(hidden=64), **RUN, **compact, resume=True)
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


@pytest.mark.parametrize("after", [{}, {"weight_bits": 32, "state_bits": 32}, {"state_bits": 8}])
def test_a_checkpoint_of_32_bits_gives_the_weights_that_bf16_and_low_bits_are_together(tmp_path, after):
    before = trained("GRPO", tmp_path, tiny_model(hidden=64), **RUN, weight_bits=32)
    run = make("GRPO", tmp_path, tiny_model(hidden=64), **RUN, **after)
    run.train(resume_from_checkpoint=True)
    expected = real_values(before, "weight")
    assert any(not torch.equal(values, values.bfloat16().float()) for values in expected.values())
    for name, weight in real_values(run, "weight").items():
        assert torch.equal(weight, expected[name])
    if not after:  # a finished run takes no step, and exports the fp32 weights
        run.save_model(str(tmp_path / "fp32"))
        exported = load_file(tmp_path / "fp32" / "model.safetensors")
        assert all(torch.equal(values.flatten(), expected[name]) for name, values in exported.items())
    if after.get("state_bits") != 8:
        for key in MOMENTS:
            assert all(
                torch.equal(values, real_values(before, key)[name]) for name, values in real_values(run, key).items()
            )


@pytest.mark.parametrize(("before", "after"), [("fp32", "32"), ("32", "fp32")])
def test_a_change_of_format_overrides_no_argument(tmp_path, caplog, before, after):
    """The optimizers of two formats differ in `fused`, which the user has not set."""
    trained("GRPO", tmp_path, tiny_model(hidden=64), **RUN, **FORMATS[before][0])
    strict = {**RUN, "max_steps": 3, "strict_arguments": True}
    assert (
        trained("GRPO", tmp_path, tiny_model(hidden=64), **strict, **FORMATS[after][0], resume=True).state.global_step
        == 3
    )
    again = {**strict, "max_steps": 4}
    trained("GRPO", tmp_path, tiny_model(hidden=64), **again, **FORMATS[after][0], resume=True)


@pytest.mark.parametrize(("optim", "names"), [("adafactor", "exp_avg_sq"), ("adamw_bnb_8bit", "bnb")])
def test_states_of_another_optimizer_are_named(tmp_path, optim, names):
    trained("GRPO", tmp_path, tiny_model(hidden=64), **RUN, optim=optim)
    run = make("GRPO", tmp_path, tiny_model(hidden=64), **RUN, weight_bits=32)
    with pytest.raises(CheckpointError, match=f"optimizer's: .*{names}"):
        run.train(resume_from_checkpoint=True)
