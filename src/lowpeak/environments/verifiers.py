"""Environments of verifiers: the program of an episode asks the policy for its turns, and its task has the reward."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from datasets import Dataset

from lowpeak.environments.append import Message
from lowpeak.errors import ArgumentError, require_package


class Episodes(Protocol):
    """The tasks of an environment of verifiers, and their episodes; `prompts` has the messages that open each task."""

    @property
    def prompts(self) -> Sequence[list[Message]]: ...

    async def run(self, task: int, endpoint: Any) -> float:
        """Return the reward of an episode whose turns are the endpoint's; RuntimeError if it failed."""

    def close(self) -> None:
        """End what the episodes share; the next one starts it again."""


class VerifiersEnvironment:
    """A conversation of the policy with a task of verifiers, as `VerifiersFactory` makes it."""

    def __init__(self, episodes: Episodes, tasks: Mapping[str, int]) -> None:
        self._episodes, self._tasks = episodes, tasks
        self._task, self._reward = 0, 0.0

    def reset(self, prompt: Any, verifiers_task: int | None = None, **columns: Any) -> None:
        """Choose the row's task: its column `verifiers_task`, or the task with its prompt; LookupError if there is none."""
        found = self._tasks.get(_key(prompt)) if verifiers_task is None else verifiers_task
        if found is None:
            raise LookupError(f"no task of verifiers has the row's prompt {str(prompt)[-80:]!r}.")
        self._task = found

    async def run(self, endpoint: Any) -> None:
        """Run an episode of the task to its end."""
        self._reward = await self._episodes.run(self._task, endpoint)

    def get_reward(self) -> float:
        """Return the episode's reward."""
        return self._reward

    def close(self) -> None:
        """End the servers of tools that all conversations share."""
        self._episodes.close()


class VerifiersFactory:
    """The `environment_factory` of an environment of verifiers; the rows of `dataset` are its tasks.

    Raises ArgumentError if there is no task, or one without a prompt.
    """

    def __init__(self, name: str, episodes: Episodes) -> None:
        if not episodes.prompts or not all(episodes.prompts):
            what = "a task without a prompt" if episodes.prompts else "no tasks"
            raise ArgumentError(
                f"verifiers:{name} has {what}: use an environment whose tasks open their conversations."
            )
        self._episodes = episodes
        self._tasks = {_key(prompt): task for task, prompt in enumerate(episodes.prompts)}
        self.dataset = Dataset.from_list(
            [{"prompt": each, "verifiers_task": i} for i, each in enumerate(episodes.prompts)]
        )

    def __call__(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self._episodes, self._tasks)


def verifiers_factory(name: str, **config: Any) -> VerifiersFactory:
    """Return the factory of an environment of verifiers, by its name; `config` has more of its EnvConfig.

        environment_factory=verifiers_factory("gsm8k", taskset={"split": "train"}, agent={"max_turns": 8})

    Raises MissingPackageError, and ArgumentError if verifiers cannot load it.
    """
    require_package("verifiers", f"verifiers:{name}", "verifiers")
    from lowpeak.environments.verifiers_episodes import PackageEpisodes

    return VerifiersFactory(name, PackageEpisodes(name, config))


def _key(prompt: Any) -> str:
    """Return what equal prompts share, written as text or as messages."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return json.dumps([[message["role"], message["content"]] for message in messages])
