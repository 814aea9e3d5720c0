"""Rows as forests or padded: the same weights, chosen once, kept by a resumed run, refused where a model cannot."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset
from transformers import MistralConfig, MistralForCausalLM

from closeness import assert_each_close_to_largest
from damage import sign_again
from lowpeak import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from lowpeak.config.training import MemorySettings
from lowpeak.errors import ArgumentError
from lowpeak.ranks import Ranks
from lowpeak.strategies.pretended import make_mesh, prepare, pretended_ranks
from lowpeak.training.layouts import choose_layout, now_on, prepare_layout
from tiny import char_tokenizer, tiny_model

TOKENIZER = char_tokenizer()
SMALL = {
    "per_device_train_batch_size": 8,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "micro_batch_tokens": 60,
    "logprob_chunk_size": 16,
}
SGD = {"optim": "sgd", "learning_rate": 0.1}  # AdamW makes whole steps of gradients that are rounding alone
LAYOUTS = {"shared": {"share_prompt": True}, "rows": {"share_prompt": False}, "padded": {"padding_free": False}}


def rows(count=16):
    data = [{"prompt": f"{i % 10}{i * 7 % 10}12345678=", "completion": "31"[: 1 + i % 2]} for i in range(count)]
    return Dataset.from_list(data)


def ones(completions, **columns):
    return [float(text.count("1")) for text in completions]


def sliding_model():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=13, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=6, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return MistralForCausalLM(config)


def grpo(tmp_path, model=None, **changes):
    settings = {**SMALL, "num_generations": 4, "max_completion_length": 6, **changes}
    args = GRPOConfig(output_dir=str(tmp_path), **settings)
    return GRPOTrainer(
        model or tiny_model(), ones, args, rows().remove_columns("completion"), processing_class=TOKENIZER
    )


def rloo(tmp_path, **changes):
    settings = {**SMALL, "num_generations": 4, "max_completion_length": 6, **changes}
    args = RLOOConfig(output_dir=str(tmp_path), **settings)
    return RLOOTrainer(tiny_model(), ones, args, rows().remove_columns("completion"), processing_class=TOKENIZER)


def sft(tmp_path, model=None, **changes):
    args = SFTConfig(output_dir=str(tmp_path), **{**SMALL, **changes})
    return SFTTrainer(
        model or tiny_model(), args, train_dataset=rows(), eval_dataset=rows(4), processing_class=TOKENIZER
    )


def weights(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def kinds(run):
    """The layout of each micro-batch of a step."""
    return {
        "padded" if batch.forest is None else "shared" if any(tree.prompt for tree in batch.forest.trees) else "rows"
        for batch in run.next_step().micro_batches
    }


@pytest.mark.parametrize("make", [grpo, rloo], ids=["grpo", "rloo"])
@pytest.mark.parametrize("changes", [{}, {"beta": 0.1, "num_iterations": 2}], ids=["on-policy", "scored and reused"])
def test_every_layout_trains_the_same_weights(tmp_path, make, changes):
    runs = {layout: make(tmp_path / layout, **asked, **changes, **SGD) for layout, asked in LAYOUTS.items()}
    for layout, run in runs.items():
        run.train()
        assert kinds(run) == {layout}
    for layout in ("shared", "rows"):
        assert_each_close_to_largest(weights(runs[layout]), weights(runs["padded"]), 4e-6)


def test_supervised_training_is_the_same_without_padding(tmp_path):
    padded, free = (sft(tmp_path / str(on), padding_free=on, **SGD) for on in (False, True))
    for run in (padded, free):
        run.train()
    assert (kinds(padded), kinds(free)) == ({"padded"}, {"rows"})
    assert free.evaluate()["eval_loss"] == pytest.approx(padded.evaluate()["eval_loss"], rel=1e-5)
    assert_each_close_to_largest(weights(free), weights(padded), 4e-6)


def test_forests_compute_fewer_tokens_and_nearly_all_of_them_useful(tmp_path):
    runs = {layout: grpo(tmp_path / layout, beta=0.1, **asked) for layout, asked in LAYOUTS.items()}
    computed = {layout: run.next_step().num_computed for layout, run in runs.items()}
    assert computed["shared"] < computed["rows"] < computed["padded"]
    runs["shared"].train()
    for phase in ("score", "train"):
        assert all(row[f"useful_tokens/{phase}"] >= 0.8 for row in runs["shared"].state.log_history if "loss" in row)


@pytest.mark.parametrize("asked", [{}, *LAYOUTS.values()], ids=["auto", *LAYOUTS])
def test_a_run_resumed_in_the_middle_of_a_rollout_goes_on_to_the_same_weights(tmp_path, asked):
    settings = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "save_strategy": "steps", "save_steps": 3, **asked}
    whole = grpo(tmp_path, **settings)
    whole.train()
    resumed = grpo(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("saved", ["shared", "rows", "padded", None])
def test_a_resumed_run_keeps_the_layout_that_auto_became(tmp_path, saved):
    run = grpo(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    run.train()
    state_file = tmp_path / "checkpoint-1" / "lowpeak_state.json"
    state = json.loads(state_file.read_text())
    assert state["resolved"]["layout"] == "shared"
    if saved is None:  # as a version wrote it that knew no layouts
        del state["resolved"]["layout"]
    else:
        state["resolved"]["layout"] = saved
    state_file.write_text(json.dumps(state))
    sign_again(state_file.parent)
    resumed = grpo(tmp_path, max_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.maker.budget.layout == resumed.run.sizes.choice.layout == (saved or "padded")
    asked = grpo(tmp_path, max_steps=2, share_prompt=True)
    asked.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert kinds(asked) == {"shared"}


def test_a_model_with_sliding_windows_trains_on_padded_rows_and_the_log_says_why(tmp_path, caplog):
    run = grpo(tmp_path, sliding_model(), beta=0.1)
    run.train()
    assert kinds(run) == {"padded"}
    (line,) = [record.message for record in caplog.records if record.message.startswith("Layout")]
    assert "padded" in line
    assert "sliding" in line
    assert "sliding" in run.dry_run()["layout"]


def test_the_log_says_in_one_line_that_prompts_are_shared(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lowpeak"):
        grpo(tmp_path, beta=0.1)
    (line,) = [record.message for record in caplog.records if record.message.startswith("Layout")]
    assert "prompt is forwarded once" in line


def test_a_reference_that_takes_no_forest_pads_the_policys_rows_too():
    policy = tiny_model()
    alone = prepare_layout(MemorySettings(), [policy], torch.device("cpu"), Ranks())
    together = prepare_layout(MemorySettings(), [policy, sliding_model()], torch.device("cpu"), Ranks())
    assert (alone.layout, together.layout) == ("shared", "padded")
    assert "sliding" in together.why


def test_an_attention_that_was_chosen_by_name_is_kept(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    eager = {"model_init_kwargs": {"attn_implementation": "eager"}}
    run = grpo(tmp_path / "out", str(tmp_path / "model"), beta=0.1, **eager)
    assert run.run.sizes.choice.layout == "padded"
    assert "eager" in run.run.sizes.choice.why


@pytest.mark.parametrize("name", ["padding_free", "share_prompt"])
def test_asking_for_what_a_model_cannot_is_an_error_with_the_reason(tmp_path, name):
    with pytest.raises(ArgumentError, match=rf"{name}=True cannot act: .*sliding"):
        grpo(tmp_path, sliding_model(), **{name: True})


def test_supervised_training_refuses_it_too(tmp_path):
    with pytest.raises(ArgumentError, match="padding_free=True cannot act"):
        sft(tmp_path, sliding_model(), padding_free=True)
    assert kinds(sft(tmp_path, sliding_model())) == {"padded"}


def test_sharing_prompts_in_padded_rows_contradicts_itself(tmp_path):
    with pytest.raises(ArgumentError, match="share_prompt=True with padding_free=False"):
        grpo(tmp_path, share_prompt=True, padding_free=False)


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
    asked = []
    second.register_forward_hook(lambda *args: asked.append(1))
    choice = prepare_layout(MemorySettings(), [first, second], torch.device("cpu"), Ranks())
    assert "other hidden states" in choice.why
    assert asked


def test_a_policy_that_waits_on_the_host_to_be_cut_runs_there_and_what_is_cut_on_the_device():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert now_on(tiny_model(), gpu) == now_on(tiny_model(), cpu) == cpu
    with pretended_ranks(2):
        assert now_on(prepare(tiny_model(), make_mesh(), None), gpu) == gpu
