"""A graph of one's own: nodes are functions of a state, and each returns the name of the next node.

The policy answers, checks its answer, and answers once more where it says that the answer is wrong.

lowpeak grpo --model Qwen/Qwen3-0.6B --environment examples/agents/graph.py:CheckedAnswer --output_dir out
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
from datasets import Dataset

END = "end"


@dataclass
class State:
    """What the nodes share: the conversation, and the answers that were given."""

    client: httpx2.AsyncClient
    messages: list[dict[str, Any]]
    answers: list[str]

    async def ask(self, text: str) -> str:
        """Add a question to the conversation, and return the policy's answer."""
        self.messages.append({"role": "user", "content": text})
        response = await self.client.post("chat/completions", json={"model": "policy", "messages": self.messages})
        self.messages.append(response.raise_for_status().json()["choices"][0]["message"])
        return self.messages[-1]["content"] or ""


async def answer(state: State) -> str:
    """Answer the question, or once more."""
    question = state.messages.pop()["content"] if not state.answers else "Answer again."
    state.answers.append(await state.ask(question))
    return "check" if len(state.answers) == 1 else END


async def check(state: State) -> str:
    """Ask the policy whether its answer is right."""
    verdict = await state.ask("Is this right? Yes or no.")
    return "answer" if "no" in verdict.lower() else END


NODES: dict[str, Callable[[State], Awaitable[str]]] = {"answer": answer, "check": check}


class CheckedAnswer:
    """One conversation: `run` walks through the graph."""

    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{n} times 3?"}], "right": str(3 * n)} for n in range(100)]
    )

    def reset(self, prompt: list[dict[str, Any]], right: str, **row: Any) -> None:
        self.messages, self.right, self.answers = list(prompt), right, list[str]()

    async def run(self, endpoint: Any) -> None:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx2.AsyncClient(base_url=endpoint.base_url, headers=headers, timeout=None) as client:
            state, node = State(client, self.messages, self.answers), "answer"
            while node != END:
                node = await NODES[node](state)

    def get_reward(self) -> float:
        return float(self.answers[-1:] == [self.right])
