"""Trainers with tools and environments: TRL's contract on written transcripts, for every online trainer."""

from __future__ import annotations

from functools import partial, wraps

import gymnasium
import pytest
import torch
from datasets import Dataset

from lowpeak import GymnasiumEnvironment
from lowpeak.environments import load_environment
from lowpeak.errors import ArgumentError, DataError
from scripted_turns import Score, ScriptedTurns, add, call, questions
from small_runs import journal, make, rows, weights
from tiny_models import char_tokenizer, tiny_model, tool_tokenizer

TOKENIZER = tool_tokenizer()
CALL = call("add", a=1, b=2) + "<eos>"
ENDS = {"max_completion_length": 200, "max_steps": 1}


def scripted(kind, folder, script, data=None, **changes):
    """A trainer whose engine has these turns for the completions of each prompt."""
    model = tiny_model(len(TOKENIZER), context=512)
    run = make(kind, folder, model, data or questions(), TOKENIZER, **{**ENDS, **changes})
    run.collector.engine.engine = ScriptedTurns(TOKENIZER, script)
    return run


def num_turns(completions, **columns):
    return [float(len(messages)) for messages in completions]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO", "OnlineDPO"])
def test_each_trainer_trains_on_conversations_with_tools(tmp_path, kind):
    script = [[CALL, "3<eos>"], [CALL, CALL, "6<eos>"], ["x<eos>"], [call("other", a=1) + "<eos>", "y<eos>"]]
    seen = []

    def reward(prompts, completions, completion_ids, answer, **columns):
        seen.extend(completions)
        return num_turns(completions)

    run = scripted(kind, tmp_path, script, reward_funcs=reward, tools=[add])
    before = weights(run)
    run.train()
    assert any(not torch.equal(before[name], after) for name, after in weights(run).items())
    logged = run.state.log_history[0]
    assert logged["tools/call_frequency"] == 1.0
    assert logged["tools/failure_frequency"] == 0.25
    assert [message["role"] for message in seen[0]] == ["assistant", "tool", "assistant"]
    # Lengths count what the policy wrote.
    assert logged["completions/min_length"] == 2
    assert logged["completions/max_length"] == 2 * len(TOKENIZER(CALL)["input_ids"]) + 2
    assert run.tools == [add]
    assert run.environments is None


def test_a_teacher_reads_the_privileged_context_of_conversations(tmp_path):
    data = questions()
    data = data.add_column("privileged_context", ["the sum is 3"] * len(data))
    own = {"teacher_model": None, "teacher_model_kind": "live", "lmbda": 1.0}
    run = make(
        "Distillation", tmp_path, tiny_model(len(TOKENIZER), context=512), data, TOKENIZER, tools=[add], **own, **ENDS
    )
    run.collector.engine.engine = ScriptedTurns(TOKENIZER, [[CALL, "3<eos>"]] * 8)
    run.train()
    for record in run.rollout.records:
        assert "the sum is 3" in TOKENIZER.decode(record.teacher_prompt_ids)
        assert "the sum is 3" not in TOKENIZER.decode(record.prompt_ids)
    assert run.state.log_history[0]["divergence"] > 0


def test_an_environment_rewards_its_conversations(tmp_path):
    script = [[call("increase", by=2) + "<eos>", "x<eos>"], ["x<eos>"], ["y<eos>"], ["z<eos>"]]
    got = []

    def reward(completions, environments, **columns):
        got.extend(environments)
        return [0.5] * len(completions)

    run = scripted("GRPO", tmp_path, script, reward_funcs=reward, environment_factory=Score)
    run.train()
    assert got == run.environments
    assert all(environment.is_closed for environment in got)
    logged = run.state.log_history[0]
    assert (logged["rewards/Score/mean"], logged["rewards/reward/mean"], logged["reward"]) == (0.5, 0.5, 1.0)
    assert [row["prompt"][-1]["content"][-3:] for row in journal(tmp_path, "rollouts")] == [" go"] * 8


class Steps(Score):
    """Score with a reward for each turn that has calls."""

    def get_turn_reward(self) -> float:
        return 10.0 * self.total


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_an_environment_alone_is_reward_enough_and_its_turns_have_rewards(tmp_path, kind):
    script = [[call("increase", by=2) + "<eos>", "x<eos>"], ["x<eos>"], ["y<eos>"], ["z<eos>"]]
    run = scripted(kind, tmp_path, script, reward_funcs=[], environment_factory=Steps, turn_credit="discounted")
    run.train()
    assert run.state.log_history[0]["reward"] == (20 + 2) / 4
    rows = journal(tmp_path, "rollouts")
    acts, other = (next(row["turns"] for row in rows if (row["reward"] > 0) == acts) for acts in (True, False))
    size = len(TOKENIZER(script[0][0])["input_ids"])
    assert [(turn["first_token"] > 0, turn["num_tokens"], turn.get("reward")) for turn in acts] == [
        (False, size, 20.0),
        (True, 2, None),
    ]
    assert acts[1]["first_token"] > size
    assert all(turn["seconds"] >= 0 for turn in [*acts, *other])
    assert len(other) == 1
    first = next(record for record in run.rollout.records if record.reward > 0)
    sampled = first.advantages[first.completion.loss_mask]
    assert sampled[0] > sampled[-1] > 0  # the last turn's return lacks the first turn's reward
    assert first.token_rewards.sum() == 22


def test_a_factory_may_return_objects_of_several_classes(tmp_path):
    made = iter(range(100))

    def factory() -> Score:
        return type(f"Score{next(made)}", (Score,), {})()

    run = scripted("GRPO", tmp_path, [["x<eos>"]] * 4, reward_funcs=[], environment_factory=factory)
    run.train()
    assert all(record.reward == 0 for record in run.rollout.records)


def test_ppo_gets_the_reward_of_a_turn_at_its_last_token(tmp_path):
    turns = [call("increase", by=2) + "<eos>", call("increase", by=1) + "<eos>", "x<eos>"]
    changes = {"reward_funcs": [], "environment_factory": Steps, "beta": 0.0, "lam": 1.0}
    run = scripted("PPO", tmp_path, [turns], **changes)
    run.train()
    first, second, last = (len(TOKENIZER(turn)["input_ids"]) for turn in turns)
    for record in run.rollout.records:
        returns = record.returns[record.completion.loss_mask]  # with lambda 1, the sum of the rewards from a token on
        assert returns.tolist() == pytest.approx([20 + 30 + 3] * first + [30 + 3] * second + [3] * last)


@pytest.mark.parametrize("differs", [True, False])
def test_online_dpo_compares_completions_of_one_prompt_only(tmp_path, differs):
    class Task(Score):
        count = 0

        def __init__(self) -> None:
            self.number = Task.count = Task.count + 1

        def reset(self, seed: int, **row: object) -> str:
            super().reset()
            if self.number % 4 == 3:
                raise OSError("a failed environment's completion is in no pair, whatever its prompt")
            return f" {self.number if differs else seed % 10}"

    script = [[call("increase", by=2) + "<eos>", "x<eos>"], ["x<eos>"], ["y<eos>"], ["z<eos>"]]
    run = scripted("OnlineDPO", tmp_path, script, reward_funcs=[], environment_factory=Task)
    if differs:
        with pytest.raises(DataError, match=r"3 completions .* 3 prompts.*seed"):
            run.train()
    else:
        run.train()
        assert run.state.log_history[0]["num_pairs"] == 2


def test_turn_credit_without_turns_is_named(tmp_path):
    for changes in ({"turn_credit": "turn"}, {"turn_discount": 0.5}):
        with pytest.raises(ArgumentError, match=f"{next(iter(changes))}=.*turn"):
            make("RLOO", tmp_path, strict_arguments=True, **changes)


class Guessing(gymnasium.Env):
    """A number to guess."""

    observation_space = gymnasium.spaces.Text(8)
    action_space = gymnasium.spaces.Text(1, charset="0123456789")
    num_closed = 0

    def reset(self, *, seed=None, options=None):
        self.number = int(options["answer"])
        return "0", {}

    def step(self, action):
        difference = int(action) - self.number
        return str(difference), 1.0 if difference == 0 else -0.5, difference == 0, False, {}

    def close(self):
        Guessing.num_closed += 1


def test_an_environment_of_gymnasium_answers_texts_until_its_episode_or_its_actions_end(tmp_path):
    gymnasium.register("Guessing-v0", Guessing)
    script = [["5<eos>", "3<eos>"], ["3<eos>"], ["x<eos>"], ["5<eos>", "a<eos>"]]
    parts = {"reward_funcs": [], "environment_factory": load_environment("gymnasium:Guessing-v0")}
    run = scripted("GRPO", tmp_path, script, questions().map(lambda row: {"answer": "3"}), **parts)
    run.train()
    rows = sorted(journal(tmp_path, "rollouts"), key=lambda row: row["reward"])
    assert [row["reward"] for row in rows] == [-0.5, -0.5, 0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    messages = [(message["role"], message["content"]) for message in rows[4]["completion"]]
    assert messages == [("assistant", "5"), ("user", "2"), ("assistant", "3")]
    assert [row["prompt"][-1]["content"][-2:] for row in rows] == ["\n0"] * 8
    assert Guessing.num_closed == 8
    with pytest.raises(ArgumentError, match=r"CartPole.*Text"):
        GymnasiumEnvironment("CartPole-v1")


@pytest.mark.parametrize("method", ["reset", "respond", "get_turn_reward", "get_reward"])
def test_a_failed_environment_gives_no_reward_and_is_counted_in_its_step(tmp_path, method):
    def fail(self, **row):
        raise StopIteration

    failing, script = type("Failing", (Steps,), {method: fail}), [[call("increase", by=2) + "<eos>", "x<eos>"]] * 4
    run = scripted("GRPO", tmp_path, script, reward_funcs=num_turns, environment_factory=failing)
    run.train()
    assert run.state.log_history[0]["environments/failures"] == 8
    assert all(record.reward != record.reward for record in run.rollout.records)


def untyped(a, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Two.
    """
    return a + b


def undocumented(a: int) -> int:
    return a


def half_documented(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
    """
    return a + b


def unnamed(*numbers: int) -> int:
    """Add.

    Args:
        numbers: Which.
    """
    return sum(numbers)


class NoText(Score):
    def respond(self, action: str) -> None:
        """Take a text by another name."""


class NoReset:
    def act(self) -> str:
        """Act."""
        return ""


class NarrowReset(Score):
    def reset(self, answer: str) -> None:
        """Take one column of two."""


class Undocumented(Score):
    def helper(self, a: int) -> int:
        return a


class Fails(Score):
    def __init__(self) -> None:
        raise OSError("no display")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"tools": [untyped]}, "tool 'untyped'.*Argument a.*annotate each argument"),
        ({"tools": [undocumented]}, "tool 'undocumented'.*docstring"),
        ({"tools": [half_documented]}, "tool 'half_documented'.*'b'.*describe"),
        ({"tools": [unnamed]}, r"tool 'unnamed'.*\*numbers.*name and annotate"),
        ({"tools": [add, add]}, "two tools are called 'add': rename one"),
        ({"tools": ["add"]}, "tools.*'add'.*list of functions"),
        ({"tools": {"add": add}}, "tools.*list of functions"),
        ({"tools": [lambda a: a]}, "tools.*<lambda>.*`def`.*may call lambdas"),
        ({"tools": [partial(add, b=1)]}, "tools.*partial.*`def`"),
        ({"tools": [Score]}, "tools has the class Score: pass it as environment_factory"),
        ({"environment_factory": NoReset}, "environment_factory returns a NoReset.*reset"),
        ({"environment_factory": NoText}, r"returns a NoText.*respond\(self, text\)"),
        ({"environment_factory": lambda: None}, "environment_factory returns None.*reset"),
        ({"environment_factory": Score()}, "environment_factory is .*Score.*pass a class"),
        ({"environment_factory": Fails}, "environment_factory raised OSError: no display.*without arguments"),
        ({"environment_factory": NarrowReset}, r"NarrowReset\.reset.*'prompt'.*reset\(self, \*\*row\)"),
        ({"environment_factory": Undocumented}, "method 'helper' of Undocumented.*begin its name with _"),
        ({"tools": [add], "reward_funcs": []}, "reward_funcs is empty.*get_reward"),
        ({"tools": [Score().increase], "environment_factory": Score}, "'increase'.*Score: rename one"),
        ({"tools": [Score().increase], "tool_isolation": "process"}, "tool_isolation='process'.*'increase'"),
        ({"tools": [add], "max_tool_calling_iterations": -1}, "max_tool_calling_iterations=-1"),
        *(({"tools": [add], "tool_timeout": value}, f"tool_timeout={value}") for value in (0, -1, float("nan"))),
        ({"tools": [add], "rollout_func": add}, "rollout_func.*environment_factory"),
    ],
)
def test_wrong_tools_are_one_sentence_from_the_constructor(tmp_path, parts, message):
    with pytest.raises(ArgumentError, match=message):
        make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), questions(), TOKENIZER, **parts)


@pytest.mark.parametrize("last", ["b", None])
def test_each_row_must_name_one_of_several_environments(tmp_path, last):
    factories = {"environment_factory": {"a": Score}}
    data = questions().add_column("environment", ["a"] * 7 + [last])
    with pytest.raises(DataError, match=f"train_dataset.*environment={last!r}.*environment_factory: 'a'"):
        make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), data, TOKENIZER, **factories)
    with pytest.raises(DataError, match=r"train_dataset.*environment=None"):
        make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), questions(), TOKENIZER, **factories)


@pytest.mark.parametrize("kind", ["SFT", "Reward"])
@pytest.mark.parametrize("name", ["tools", "environment_factory"])
def test_offline_trainers_call_no_tools(tmp_path, kind, name):
    with pytest.raises(ArgumentError, match=f"{name}.*GRPOTrainer"):
        make(kind, tmp_path, **{name: [add]})
    make(kind, tmp_path, **{name: None})


def test_decorated_functions_and_bound_methods_are_tools_and_an_empty_list_has_none(tmp_path):
    @wraps(add)
    def decorated(*args, **kwargs):
        return add(*args, **kwargs)

    tools = [decorated, Score().increase]
    run = make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), questions(), TOKENIZER, tools=tools)
    assert run.tools == tools
    assert make("GRPO", tmp_path, tools=[]).tools == make("GRPO", tmp_path, tools=None).tools == []


def test_a_template_without_tool_calls_and_prompts_of_text_are_refused(tmp_path):
    with pytest.raises(DataError, match="row 0"):
        make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), rows(), TOKENIZER, tools=[add])
    plain = char_tokenizer("0123456789+", chat=True)
    with pytest.raises(DataError, match="response_template"):
        make("GRPO", tmp_path, tiny_model(len(plain)), questions(), plain, tools=[add])


def test_a_dry_run_renders_a_conversation(tmp_path):
    run = make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), questions(), TOKENIZER, tools=[add])
    text = run.dry_run()["conversation"]
    call_text = '<tool_call>{"name": "add", "arguments": {"a": "integer", "b": "integer"}}</tool_call>'
    assert text == f"<user>0+1<eos><assistant>{call_text}<eos><tool>the result<eos><assistant>"


def test_an_environment_can_own_the_data(tmp_path):
    class Asking(Score):
        dataset = questions(2)

    for factory, texts in ((Score, {" go"}), (Asking, {"0+1 go", "1+1 go"})):
        model, folder = tiny_model(len(TOKENIZER), context=512), tmp_path / factory.__name__
        run = make("GRPO", folder, model, None, TOKENIZER, environment_factory=factory, **ENDS)
        run.collector.engine.engine = ScriptedTurns(TOKENIZER, [["x<eos>"]] * 4)
        run.train()
        prompts = [row["prompt"] for row in journal(folder, "rollouts")]
        assert [[message["role"] for message in prompt] for prompt in prompts] == [["user"]] * 8
        assert {prompt[0]["content"] for prompt in prompts} == texts
    with pytest.raises(DataError, match="train_dataset"):
        make("GRPO", tmp_path, tiny_model(len(TOKENIZER)), None, TOKENIZER, environment_factory={"a": Score})


def test_the_datasets_of_evaluations_are_completed_and_checked_too(tmp_path):
    model, answers = tiny_model(len(TOKENIZER), context=512), Dataset.from_list([{"answer": "1"}])
    factories = {"a": Score}
    named = questions().add_column("environment", ["a"] * 8)
    run = make("GRPO", tmp_path, model, questions(), TOKENIZER, environment_factory=Score, eval_dataset=answers, **ENDS)
    assert run.eval_dataset[0]["prompt"] == [{"role": "user", "content": ""}]
    with pytest.raises(DataError, match=r"eval_dataset\['x'\].*environment='b'"):
        make(
            "GRPO", tmp_path, model, named, TOKENIZER, environment_factory=factories,
            eval_dataset={"x": questions(1).add_column("environment", ["b"])}, **ENDS,
        )  # fmt: skip


def test_a_second_train_begins_with_a_rollout_of_its_own(tmp_path):
    script = [["x<eos>"]] * 4
    run = scripted("GRPO", tmp_path, script, reward_funcs=num_turns, environment_factory=Score, num_iterations=4)
    run.train()
    first = run.rollout.number
    run.train()
    assert run.rollout.number == first + 1
    assert len(journal(tmp_path, "rollouts")) == 8
