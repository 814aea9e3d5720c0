"""Rows as forests or padded: the same weights, chosen once, kept by a resumed run, refused where a model cannot."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from file_damage import sign_again
from forest_cases import shared_of
from lowpeak.arguments.base import MemorySettings
from lowpeak.errors import ArgumentError
from lowpeak.plan.rehearsal.fake_ranks import fake_process_group, make_mesh, prepare_like_accelerate
from lowpeak.ranks import Ranks
from lowpeak.sizes.run_sizes import choose_layout, device_at_start, prepare_layout
from rounding import assert_each_close_to_largest
from small_runs import LAYOUTS, SAVED, SGD, column, make, refused_model, trained, weights
from tiny_models import tiny_model


def rows(count=16):
    data = [{"prompt": f"{i % 10}{i * 7 % 10}12345678=", "completion": "31"[: 1 + i % 2]} for i in range(count)]
    return Dataset.from_list(data)


SMALL = {"micro_batch_tokens": 60, "logprob_chunk_size": 16}
ONLINE = {**SMALL, "data": rows().remove_columns("completion"), "max_completion_length": 6}
grpo, trained_grpo = partial(make, "GRPO", **ONLINE), partial(trained, "GRPO", **ONLINE)
sft = partial(make, "SFT", **SMALL, data=rows(), eval_dataset=rows(4))


def kinds(run):
    """The layout of each micro-batch of a step."""
    return {
        "padded" if batch.forest is None else "shared" if shared_of(batch.forest) else "rows"
        for batch in run.next_step().micro_batches
    }


def test_every_layout_trains_the_same_weights_and_forests_compute_fewer_tokens(tmp_path):
    found, computed = {}, {}
    for layout, arguments in LAYOUTS.items():
        run = trained_grpo(tmp_path, beta=0.1, num_iterations=2, **SGD, **arguments)
        found[layout] = weights(run)
        assert kinds(run) == {layout}
        computed[layout] = run.next_step().num_computed
        useful = [share for phase in ("score", "train") for share in column(run, f"useful_tokens/{phase}")]
        assert layout != "shared" or min(useful) >= 0.8
    assert computed["shared"] < computed["rows"] < computed["padded"]
    for layout in ("shared", "rows"):
        assert_each_close_to_largest(found[layout], found["padded"], 4e-6)


def test_supervised_training_is_the_same_without_padding(tmp_path):
    padded, free = (sft(tmp_path / str(on), padding_free=on, max_steps=1, **SGD) for on in (False, True))
    for run in (padded, free):
        run.train()
    assert (kinds(padded), kinds(free)) == ({"padded"}, {"rows"})
    assert free.evaluate()["eval_loss"] == pytest.approx(padded.evaluate()["eval_loss"], rel=1e-5)
    assert_each_close_to_largest(weights(free), weights(padded), 4e-6)


@pytest.fixture(scope="module")
def first_step(tmp_path_factory):
    """The checkpoint of a run's first step."""
    folder = tmp_path_factory.mktemp("first")
    trained_grpo(folder, max_steps=1, **SAVED)
    return folder / "checkpoint-1"


@pytest.mark.extended
@pytest.mark.parametrize("saved", ["rows", "padded", None])
def test_a_resumed_run_keeps_the_layout_that_auto_became(tmp_path, first_step, saved):
    checkpoint = Path(shutil.copytree(first_step, tmp_path / "checkpoint-1"))
    state_file = checkpoint / "lowpeak_state.json"
    state = json.loads(state_file.read_text())
    assert state["resolved"]["layout"] == "shared"
    if saved is None:  # as a version wrote it that knew no layouts
        del state["resolved"]["layout"]
    else:
        state["resolved"]["layout"] = saved
    state_file.write_text(json.dumps(state))
    sign_again(checkpoint)
    resumed = trained_grpo(tmp_path / "again", max_steps=1, resume=checkpoint)
    assert resumed.run.budget.layout == resumed.run.sizes.layout_choice.layout == (saved or "padded")
    if saved == "padded":
        assert kinds(trained_grpo(tmp_path / "again", max_steps=1, share_prompt=True, resume=checkpoint)) == {"shared"}


def test_a_model_that_packed_rows_refuse_trains_on_padded_ones_and_log_and_dry_run_say_why(tmp_path, caplog):
    run = grpo(tmp_path, refused_model(), beta=0.1)
    assert kinds(run) == {"padded"}
    resolved = run.dry_run()
    for name, path in (("layout", "padded"), ("generation", "generate()")):
        (line,) = [record.message for record in caplog.records if record.message.startswith(name.title())]
        assert all(path in text and "attn_temperature_tuning" in text for text in (line, resolved[name]))


def test_a_reference_that_takes_no_forest_pads_the_policys_rows_too_and_the_log_names_each_layout(caplog):
    policy = tiny_model()
    caplog.set_level(logging.INFO, "lowpeak")
    alone = prepare_layout(MemorySettings(), [policy], torch.device("cpu"), Ranks())
    together = prepare_layout(MemorySettings(), [policy, refused_model()], torch.device("cpu"), Ranks())
    assert (alone.layout, together.layout) == ("shared", "padded")
    assert "attn_temperature_tuning" in together.why
    shared, padded = [record.message for record in caplog.records if record.message.startswith("Layout")]
    assert "prompt" in shared
    assert "attn_temperature_tuning" in padded


def test_an_attention_that_was_chosen_by_name_is_kept(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    run = grpo(tmp_path / "out", str(tmp_path / "model"), beta=0.1, model_init_kwargs={"attn_implementation": "eager"})
    assert run.run.sizes.layout_choice.layout == "padded"
    assert "eager" in run.run.sizes.layout_choice.why


def test_a_layout_that_a_model_cannot_have_is_refused_with_the_reason(tmp_path):
    for trainer, name in ((grpo, "padding_free"), (grpo, "share_prompt"), (sft, "padding_free")):
        with pytest.raises(ArgumentError, match=rf"{name}=True .*attn_temperature_tuning"):
            trainer(tmp_path, refused_model(), **{name: True})
    assert kinds(sft(tmp_path, refused_model())) == {"padded"}
    with pytest.raises(ArgumentError, match=r"share_prompt=True.*padding_free=False"):
        grpo(tmp_path, share_prompt=True, padding_free=False)


@pytest.mark.extended
def test_a_prompt_that_does_not_pay_is_shared_when_asked_for_alone(tmp_path):
    assert kinds(grpo(tmp_path, share_prompt=True)) == {"shared"}
    assert kinds(grpo(tmp_path)) == {"rows"}
    wide = grpo(tmp_path, tiny_model(hidden=256))
    assert kinds(wide) == {"shared"}


@pytest.mark.parametrize(
    ("padding_free", "share_prompt", "layout"),
    [
        (None, None, "shared"),
        (None, True, "shared"),
        (None, False, "rows"),
        (True, None, "shared"),
        (True, False, "rows"),
        (False, None, "padded"),
        (False, False, "padded"),
    ],
)
def test_what_was_asked_decides_the_layout(padding_free, share_prompt, layout):
    settings = MemorySettings(padding_free=padding_free, share_prompt=share_prompt)
    choice = choose_layout(settings, None)
    assert choice.layout == layout
    assert choice.resumed(layout) is choice
    if padding_free or share_prompt:
        assert choice.resumed("padded").layout == layout


def test_every_model_is_asked_also_where_one_takes_no_forest():
    """Where they are sharded, a rank that stopped at the first would leave the others in the second's collectives."""
    first, second = tiny_model(), tiny_model()
    first.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    calls = []
    second.register_forward_hook(lambda *args: calls.append(1))
    choice = prepare_layout(MemorySettings(), [first, second], torch.device("cpu"), Ranks())
    assert choice.layout == "padded"
    assert calls


def test_a_policy_that_waits_on_the_host_to_be_cut_runs_there_and_what_is_cut_on_the_device():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert device_at_start(tiny_model(), gpu) == device_at_start(tiny_model(), cpu) == cpu
    with fake_process_group(2):
        assert device_at_start(prepare_like_accelerate(tiny_model(), make_mesh(2), None), gpu) == gpu
