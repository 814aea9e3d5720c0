"""What a completion says, in either of the data contract's formats."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """The completion's text: a string as it is, of a list of messages the last one's content.

    The last one, because with tools in between it is the message that has the final answer.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""
