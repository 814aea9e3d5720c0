"""A loop with OpenAI's client: the policy adds numbers by calling a calculator, as any service's model would.

lowpeak grpo --model Qwen/Qwen3-0.6B --environment examples/agents/openai_loop.py:Calculator --output_dir out
"""

from __future__ import annotations

import json
from typing import Any

from datasets import Dataset
from openai import AsyncOpenAI

SUMS = [(n, 7 * n % 90 + 10) for n in range(10, 100)]
NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "description": "Add two integers.",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}


def run_call(call: Any) -> str:
    """Return the text of a call's result, or of its error."""
    try:
        arguments = json.loads(call.function.arguments)
        return str(arguments["a"] + arguments["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


class Calculator:
    """One conversation: `run` is the program, and nothing in it belongs to lowpeak."""

    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"{a} + {b}?"}], "answer": str(a + b)} for a, b in SUMS]
    )

    def reset(self, prompt: list[dict[str, Any]], answer: str, **row: Any) -> None:
        self.messages, self.answer = list(prompt), answer

    async def run(self, endpoint: Any) -> None:
        tools: Any = [{"type": "function", "function": ADD}]
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, timeout=None) as client:
            while True:
                completion = await client.chat.completions.create(
                    model=endpoint.model, messages=self.messages, tools=tools
                )
                message = completion.choices[0].message
                self.messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return
                for call in message.tool_calls:
                    self.messages.append({"role": "tool", "tool_call_id": call.id, "content": run_call(call)})

    def get_reward(self) -> float:
        return float(self.messages[-1].get("content") == self.answer)
