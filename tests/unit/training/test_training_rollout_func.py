"""A user's own generation: what it must answer, and that tokens which the policy did not write are context alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from lowpeak.arguments.sampling import Sampling
from lowpeak.errors import EngineError, LostEngineError
from lowpeak.records import Prompt
from lowpeak.rollout.function import FunctionEngine, _FunctionCall
from rounding import assert_each_close_to_largest
from small_runs import SAVED, TOKENIZER, column, journal, make
from tiny_models import char_tokenizer, tiny_model

PROMPT = TOKENIZER("12=")["input_ids"]
OTHER_PROMPT = TOKENIZER("3=")["input_ids"]
# Two rows of one group; the second has a prompt of its own, as after a tool's call.
ROWS = [
    {"prompt": PROMPT, "ids": [4, 7, 8, 1], "mask": [1, 0, 1, 1], "reward": 1.0},
    {"prompt": OTHER_PROMPT, "ids": [5, 9, 2, 6, 1], "mask": [1, 1, 0, 0, 1], "reward": 0.0},
]


def answer(rows=ROWS, masked_logprob=-1.0, **changes):
    """What a `rollout_func` returns for one prompt."""
    return {
        "prompt_ids": [row["prompt"] for row in rows],
        "completion_ids": [row["ids"] for row in rows],
        "logprobs": [[-2.0 if flag else masked_logprob for flag in row["mask"]] for row in rows],
        "env_mask": [row["mask"] for row in rows],
        "score": [row["reward"] for row in rows],
        **changes,
    }


def scored(completions, score, **columns):
    return score


class KeepGradients(TrainerCallback):
    """Remember each step's gradients and the weights that they belong to."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})


def trainer(tmp_path, rollout_func, reward=scored, model=None, data=None, tokenizer=None, **changes):
    settings = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 8, "max_steps": 1}
    data = Dataset.from_list(data or [{"prompt": "12="}] * 4)
    parts = {"reward_funcs": reward, "rollout_func": rollout_func, "max_grad_norm": 0.0}
    return make("GRPO", tmp_path, model, data, tokenizer, **{**settings, **parts, **changes})


def train(tmp_path, rollout_func, **changes):
    kept = KeepGradients()
    run = trainer(tmp_path, rollout_func, callbacks=[kept], **changes)
    run.train()
    return run, kept.steps


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Give the completions of a rollout in which the function returns this."""
    run = trainer(tmp_path_factory.mktemp("collected"), lambda prompts, trainer: answer())

    def collect(output):
        run.collector.engine.function = lambda prompts, trainer: output
        return [record.completion for record in run.collector.collect(0, 0, None).records]

    return collect


def gradients_by_hand(model, rows, advantages):
    """DAPO's gradient, row by row without padding: minus the mean of A * log-prob over the policy's own tokens."""
    model = copy.deepcopy(model)
    num_tokens = sum(sum(row["mask"]) for row in rows)
    for row, advantage in zip(rows, advantages, strict=True):
        ids = torch.tensor([[*row["prompt"], *row["ids"]]])
        logprobs = model(input_ids=ids).logits[0, len(row["prompt"]) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(-1, torch.tensor(row["ids"])[:, None])[:, 0]
        (-advantage * (own * torch.tensor(row["mask"])).sum() / num_tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


UNWRITTEN = [ROWS[0], {**ROWS[1], "mask": [0] * 5}]


@pytest.mark.parametrize("rows", [ROWS, UNWRITTEN], ids=["some masked", "all of one masked"])
def test_masked_tokens_have_no_gradient_of_their_own_are_context_and_count_in_their_group(tmp_path, rows):
    model = tiny_model()
    std = torch.tensor([1.0, 0.0]).std() + 1e-4
    written = [row for row in rows if any(row["mask"])]
    expected = gradients_by_hand(model, written, [0.5 / std, -0.5 / std][: len(written)])
    _, (gradients,) = train(tmp_path, lambda prompts, trainer: answer(rows), model=model)
    assert_each_close_to_largest(gradients, expected, 2e-5)


def test_what_a_sampler_says_of_masked_tokens_changes_nothing(tmp_path):
    settings = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "top_entropy_quantile": 0.5}
    runs = [
        train(tmp_path / str(x), lambda prompts, trainer, x=x: answer(masked_logprob=x), **settings)
        for x in (-1.0, -50.0)
    ]
    (_, first), (_, second) = runs
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    timed = ("time/", "peak_memory/", "step_time", "tokens_per_second")
    for pair in zip(*(journal(tmp_path / str(x)) for x in (-1.0, -50.0)), strict=True):
        one, other = ({name: value for name, value in row.items() if not name.startswith(timed)} for row in pair)
        assert one == other


def test_without_a_mask_all_tokens_count_and_nested_logprobs_are_taken(collected):
    whole = [{**row, "mask": [1] * len(row["ids"])} for row in ROWS]
    plain = answer(whole)
    del plain["env_mask"]
    nested = {**plain, "logprobs": [[[x, -9.0] for x in row] for row in plain["logprobs"]]}
    assert contents(collected(nested)) == contents(collected(answer(whole)))


def contents(completions):
    """Prompt, ids, mask and log-probs of each; None for a log-prob that is not known."""
    return [
        (
            each.prompt_ids,
            each.ids.tolist(),
            each.loss_mask.tolist(),
            [None if x != x else x for x in each.logprobs.tolist()],
        )
        for each in completions
    ]


def test_the_function_gets_each_prompt_once_per_completion_and_a_model_ready_to_generate(tmp_path):
    seen, dtypes = [], set()

    def generate(prompts, trainer):
        seen.append((prompts, [module.training for module in trainer.model.model.modules()]))
        dtypes.update(parameter.dtype for parameter in trainer.model.parameters())
        return answer()

    run, _ = train(tmp_path, generate, max_steps=2, bf16=True)
    assert [prompts for prompts, _ in seen] == [["12=", "12="]] * 2
    assert not any(flag for _, flags in seen for flag in flags)
    assert dtypes == {torch.float32}  # its own weights, not the copies that the native engine decodes with
    assert all(module.training for module in run.model.modules())


def test_entries_of_one_prompt_are_copies_of_their_own_and_a_field_that_is_no_list_is_every_rows(tmp_path):
    seen = []

    def generate(prompts, trainer):
        for i, messages in enumerate(prompts):
            messages.append({"role": "tool", "content": str(i)})
        return answer(task="sort", seed=3, env_mask=None)

    def reward(prompts, completions, score, task, seed, **columns):
        seen.append((prompts, task, seed))
        return score

    chat_prompts = [{"role": "user", "content": "12="}]
    chat = {"data": [{"prompt": chat_prompts}] * 4, "tokenizer": char_tokenizer(chat=True), "model": tiny_model(16)}
    trainer(tmp_path, generate, reward, **chat).collector.collect(0, 0, None)
    assert seen == [([chat_prompts, chat_prompts], ["sort", "sort"], [3, 3])]


def test_other_fields_reach_the_rewards_also_where_a_checkpoint_cannot_hold_them(tmp_path):
    seen = []

    def reward(completions, score, image, **columns):
        seen.append(image)
        return score

    fields = answer(image=[np.zeros(2), torch.ones(2)])
    run, _ = train(tmp_path, lambda prompts, trainer: fields, reward=reward, num_iterations=2, **SAVED)
    assert [type(x).__name__ for x in seen[0]] == ["ndarray", "Tensor"]
    assert (tmp_path / "checkpoint-1").is_dir()
    assert run.state.global_step == 1


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (None, "rollout_func .*NoneType"),
        ({}, "rollout_func.*prompt_ids, completion_ids, logprobs"),
        (answer(ROWS[:1]), "'prompt_ids' .*1 .* 2 "),
        (answer([*ROWS, *ROWS]), "'prompt_ids' .*4 .* 2 "),
        (answer(score=[1.0]), "'score' .*1 .* 2 "),
        (answer(logprobs=0.0), "'logprobs' is 0.0"),
        (answer(env_mask=1), "'env_mask' is 1"),
        (answer(completion_ids=5), "'completion_ids' is 5"),
        (answer(logprobs=[[-1.0] * 4, [-1.0] * 4]), "entry 1 has 5 completion_ids, 4 logprobs .* 5 .*env_mask"),
        (answer(env_mask=[[1] * 3, [1] * 5]), "entry 0 has 4 completion_ids, 4 logprobs .* 3 .*env_mask"),
        (
            answer(completion_ids=[[], [4]], logprobs=[[], [-1.0]], env_mask=[[], [1]]),
            "entry 0 has 0 completion_ids, 0 logprobs .* 0 .*env_mask",
        ),
        (answer(prompt_ids=[PROMPT, []]), "entry 1 .*prompt_ids"),
        (answer(completion_ids=[[4, 7, 13, 1], ROWS[1]["ids"]]), "entry 0: completion_ids has 13.* 0 to 12"),
        *(
            (answer(logprobs=[[number, -1.0, -1.0, -1.0], [-1.0] * 5]), f"entry 0: logprobs has {number}")
            for number in (float("nan"), float("-inf"), float("inf"), 5.0)
        ),
        (answer(completions=["a", "b"]), "'completions'"),
        (answer(env_mask=[[1, 2, 1, 1], [1] * 5]), "entry 0: env_mask"),
        (
            answer([{**ROWS[0], "ids": [4] * 200, "mask": [1] * 200, "logprobs": [-1.0] * 200}, ROWS[1]]),
            r"entry 0 has 20\d .* 128",
        ),
        (answer(prompt_ids=[[-1], PROMPT]), "entry 0: prompt_ids has -1"),
        (answer(prompt_ids=[["1"], PROMPT]), "entry 0: prompt_ids has '1'"),
        (answer(completion_ids=[[4.5, 7, 8, 1], ROWS[1]["ids"]]), "entry 0: completion_ids has 4.5"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(collected, output, names):
    with pytest.raises(EngineError, match=names):
        collected(output)


# TRL's own generation says None, and its vLLM says None for a token that it could not score.
UNKNOWN = [{"logprobs": logprobs} for logprobs in (None, [None, None], [[None] * 4, [None] * 5])]


@pytest.mark.extended
def test_log_probs_may_be_unknown_and_ids_arrays_and_tensors(tmp_path, collected):
    arrays = {
        "completion_ids": [torch.tensor(ROWS[0]["ids"]), np.array(ROWS[1]["ids"])],
        "prompt_ids": [np.array(PROMPT), [np.int64(x) for x in OTHER_PROMPT]],
    }
    assert contents(collected(answer(**arrays))) == contents(collected(answer()))
    first, *others = [contents(collected(answer(**fields))) for fields in UNKNOWN]
    assert others == [first, first]
    (known, unknown) = (train(tmp_path, lambda *call, x=x: answer(**x))[1] for x in ({}, UNKNOWN[0]))
    torch.testing.assert_close(unknown, known, rtol=0, atol=0)


CUT = [ROWS[0], {**ROWS[1], "ids": [5, 9, 2, 6, 7]}]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [(ROWS, {}), (CUT, {"mask_truncated_completions": True, "max_completion_length": 5})],
    ids=["whole", "cut and left out of the loss"],
)
def test_lengths_and_tokens_are_of_what_the_policy_wrote(tmp_path, rows, changes):
    """TRL 1.16 gives the same numbers for the same completions and masks."""
    run, _ = train(tmp_path, lambda prompts, trainer: answer(rows), **changes)
    log = run.state.log_history[0]
    assert [log[f"completions/{name}_length"] for name in ("mean", "min", "max")] == [3.0, 3.0, 3.0]
    assert [log[f"completions/{name}_terminated_length"] for name in ("mean", "min", "max")] == [3.0, 3.0, 3.0]
    assert log["num_tokens"] == len(PROMPT) + len(OTHER_PROMPT) + 6
    assert [row["num_tokens"] for row in run.rollout.rows] == [3, 3]


def test_a_completion_of_full_length_ends_at_any_token_that_ends_one(tmp_path):
    """The model's generation config may name more of them than the tokenizer has."""
    model = tiny_model()
    model.generation_config.eos_token_id = [1, 6]
    rows = [{**ROWS[0], "ids": [4, 7, 8, 6]}, {**ROWS[1], "ids": [5, 9, 2, 7], "mask": [1] * 4}]
    run, _ = train(tmp_path, lambda prompts, trainer: answer(rows), model=model, max_completion_length=4)
    assert [row["finish_reason"] for row in run.rollout.rows] == ["stop", "length"]
    assert run.state.log_history[0]["completions/clipped_ratio"] == 0.5


def test_the_function_is_told_whether_it_is_an_evaluation_and_how_many_completions_it_asks_for(tmp_path):
    """The model's own flag tells a rollout from an evaluation, as in TRL."""
    chat_prompts, flags = [], []

    def counted(prompts, trainer):
        chat_prompts.append(
            (
                len(prompts),
                trainer.num_generations,
                trainer.num_generations_eval,
                trainer.rollout_func_sampling.temperature,
            )
        )
        flags.append(trainer.model.training)
        trainer.log({"turns": float(len(trainer.train_dataset))})
        return answer([ROWS[i % 2] for i in range(len(prompts))])

    run, _ = train(tmp_path, counted, num_generations_eval=3)
    metrics = run.evaluate(Dataset.from_list([{"prompt": "12="}] * 2))
    assert column(run, "turns") == [4.0] * 3
    assert chat_prompts == [(2, 2, 3, 1.0), (2, 1, 1, 0.0), (6, 3, 3, 1.0)]
    assert flags == [True, False, False]
    assert metrics["eval_reward"] == 0.5
    assert (run.num_generations, run.num_generations_eval, run.rollout_func_sampling) == (2, 3, None)


class LosesAWave:
    """An engine that is lost once, in the wave of prompt "2"; `submitted` has the prompts of each wave."""

    load = sleep = wake = close = None

    def __init__(self):
        self.submitted, self.lost = [], False

    def submit(self, prompts, sampling):
        self.submitted.append([prompt.source for prompt in prompts])
        return SimpleNamespace(result=partial(self.result, prompts[0].source), abort=lambda: None)

    def result(self, source):
        if source == "2" and not self.lost:
            self.lost = True
            raise LostEngineError("gone")
        return [source]


def test_a_function_that_runs_again_after_its_engine_was_lost_goes_on_with_the_wave_that_was_lost():
    def read(rows, first):
        return [Prompt(i, (i,), row["prompt"]) for i, row in enumerate(rows, first)]

    engine, trainer = LosesAWave(), SimpleNamespace(model=SimpleNamespace(training=True))
    function = FunctionEngine(None, trainer, engine, nullcontext, set, lambda: SimpleNamespace(read_batch=read))
    for _ in range(2):
        with suppress(LostEngineError), function._request_sampling(_FunctionCall(0, Sampling(1, 4)), True):
            answers = [function.complete([text], {}) for text in ("1", "2", "3")]
    assert answers == [["1"], ["2"], ["3"]]
    assert engine.submitted == [["1"], ["2"], ["1"], ["3"]]
