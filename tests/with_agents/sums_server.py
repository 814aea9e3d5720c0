"""An OpenEnv server of sums to add: `python sums_server.py PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Answer(Action):
    text: str


class Told(Observation):
    text: str = ""


class Sums(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="0", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Told:
        draw = random.Random(seed)
        self.numbers = draw.randint(10, 49), draw.randint(10, 49)
        self._state = State(episode_id=episode_id, step_count=0)
        return Told(text="{}+{}".format(*self.numbers))

    def step(self, action: Answer, timeout_s: float | None = None, **more: Any) -> Told:
        self._state.step_count += 1
        is_right = action.text == str(sum(self.numbers))
        return Told(text="" if is_right else "no", done=is_right or self._state.step_count == 3, reward=float(is_right))

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    application = create_fastapi_app(Sums, Answer, Told, max_concurrent_envs=32)
    uvicorn.run(application, port=int(sys.argv[1]), log_level="warning")
