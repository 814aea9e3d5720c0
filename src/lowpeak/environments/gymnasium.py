"""Gymnasium's environments of text: the policy's turn is the action, the observation the user's next message."""

from __future__ import annotations

from typing import Any

from lowpeak.environments.append import after_prompt
from lowpeak.errors import ArgumentError, first_line


class GymnasiumEnvironment:
    """An environment of Gymnasium whose actions are text, as `environment_factory` makes it.

    `environment` is an id that `gymnasium.make` takes, or an environment, which serves one conversation at a time. A turn's reward
    is that of its step. A text outside of the space of actions ends the conversation, and its turn has the reward 0. Raises
    ArgumentError for other actions than text.
    """

    def __init__(self, environment: Any) -> None:
        if isinstance(environment, str):
            import gymnasium

            try:
                environment = gymnasium.make(environment)
            except (gymnasium.error.Error, ImportError) as error:
                raise ArgumentError(f"Gymnasium cannot make {environment!r}: {first_line(error)}") from error
        space = environment.action_space
        if not isinstance(space.sample(), str):
            raise ArgumentError(f"the actions of {environment} are {space}: wrap it so that action_space is a Text.")
        self._environment, self.action_space = environment, space
        self._reward = 0.0

    def reset(self, seed: int, **row: Any) -> str:
        """Return the first observation; Gymnasium's `reset` gets the row as its options, but for its prompt."""
        options = {name: value for name, value in row.items() if name != "prompt"}
        observation, _ = self._environment.reset(seed=seed, options=options)
        return after_prompt(row, str(observation))

    def respond(self, text: str) -> str | None:
        """Return the observation after an action, or None at the end of the episode."""
        self._reward = 0.0
        if not self.action_space.contains(text):
            return None
        observation, reward, is_terminated, is_truncated, _ = self._environment.step(text)
        self._reward = float(reward)
        return None if is_terminated or is_truncated else str(observation)

    def get_turn_reward(self) -> float:
        """Return the reward of the last step."""
        return self._reward

    def close(self) -> None:
        """Close Gymnasium's environment."""
        self._environment.close()
