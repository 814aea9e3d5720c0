"""Environments of verifiers over episodes in this process; those of the package are in tests/with_agents."""

from __future__ import annotations

import asyncio

import pytest

from lowpeak.environments.tools import public_methods, reset_arguments
from lowpeak.environments.verifiers import VerifiersFactory
from lowpeak.errors import ArgumentError

PROMPTS = [[{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i % 2}+1"}] for i in range(3)]


class Episodes:
    """Episodes of these tasks, each with its number as the reward."""

    def __init__(self, prompts):
        self.prompts, self.calls = prompts, []

    async def run(self, task, endpoint):
        self.calls.append((task, endpoint))
        return float(task)

    def close(self):
        self.calls.append("closed")


def test_a_row_is_a_task_by_its_number_or_its_prompt():
    episodes = Episodes(PROMPTS)
    factory = VerifiersFactory("sums", episodes)
    assert factory.dataset["prompt"] == PROMPTS
    environment = factory()
    rewards = []
    by_prompt = {"prompt": [*PROMPTS[1]], "answer": "a column of the row"}
    for row in (*factory.dataset, by_prompt):
        environment.reset(**reset_arguments(environment, 7, row))
        asyncio.run(environment.run("the endpoint"))
        rewards.append(environment.get_reward())
    assert rewards == [0.0, 1.0, 2.0, 1.0]
    with pytest.raises(LookupError, match=r"7\+1"):
        environment.reset(prompt="7+1")
    environment.close()
    assert episodes.calls[3:] == [(1, "the endpoint"), "closed"]
    assert public_methods(environment) == {}


@pytest.mark.parametrize(("prompts", "message"), [([], "tasks"), ([PROMPTS[0], []], "prompt")])
def test_an_environment_whose_tasks_open_no_conversation_is_refused(prompts, message):
    with pytest.raises(ArgumentError, match=f"verifiers:sums.*{message}:"):
        VerifiersFactory("sums", Episodes(prompts))
