"""Tools and environments: arguments and settings of conversations of several turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowpeak.arguments.declare import (
    SHARE,
    EffectCondition,
    above_zero,
    argument,
    at_least,
    generation_argument,
    one_of,
)

TurnCreditKind = Literal["outcome", "turn", "discounted"]

HAS_TOOLS = EffectCondition(
    lambda args, facts: facts.has_tools is not False,
    "the run has no tools; pass tools or environment_factory to the trainer, or remove it",
)
_HAS_PROGRAMS = EffectCondition(
    lambda args, facts: facts.has_tools is not False and facts.has_programs is not False,
    "no environment has a method `run`, so each conversation is one branch; pass one that has, or remove it",
)
_HAS_TURNS = EffectCondition(
    lambda args, facts: facts.has_turns is not False,
    "each completion has one turn; pass tools, environment_factory or rollout_func to the trainer, or remove it",
)
_DISCOUNTED = EffectCondition(
    lambda args, facts: args.turn_credit == "discounted",
    "turn_credit is not 'discounted'; set it or remove this",
    switch="turn_credit",
)


@dataclass(repr=False)
class ToolArguments:
    """Arguments of conversations with tools and environments."""

    max_tool_calling_iterations: int | None = generation_argument(
        None, "Most turns of a conversation whose tool calls are run (None: no limit).", at_least(0), HAS_TOOLS
    )
    tool_timeout: float | None = generation_argument(
        60.0,
        "Time limit of one call of a tool or of an environment's method, in seconds (None: no limit).",
        above_zero("a number of seconds"),
        HAS_TOOLS,
    )
    tool_isolation: str = generation_argument(
        "thread",
        "Where tools run: thread (a late call goes on), or process (a late call is killed); environments run in threads.",
        one_of(Literal["thread", "process"]),
        HAS_TOOLS,
    )
    max_branches: int = generation_argument(
        1,
        "Most branches of a conversation that a program edits; all have max_branches * max_completion_length tokens at most.",
        at_least(1, "branch"),
        _HAS_PROGRAMS,
    )


@dataclass(repr=False)
class TurnCreditArguments:
    """Arguments of advantages per turn."""

    turn_credit: str = argument(
        "outcome",
        "Advantages of a conversation's turns: outcome (one for the completion), turn, or discounted.",
        one_of(TurnCreditKind),
        _HAS_TURNS,
    )
    turn_discount: float = argument(1.0, "Discount per turn of later rewards.", SHARE, _DISCOUNTED)


@dataclass(frozen=True)
class ToolSettings:
    """Most turns whose calls are run, the seconds of one call (None: no limit), where functions run, and most branches."""

    max_tool_calling_iterations: int | None
    tool_timeout: float | None
    tool_isolation: Literal["thread", "process"] = "thread"
    max_branches: int = 1
