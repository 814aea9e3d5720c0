"""How arguments are declared: a default, a help sentence, a group for `--help`; and how unknown ones are refused."""

from __future__ import annotations

import functools
from dataclasses import field, fields
from typing import Any

from lowpeak.config.load import check_names
from lowpeak.config.rejected import REJECTED, drop_trl_defaults


def argument(default: Any, group: str, text: str) -> Any:
    """A dataclass field with its help text and the group it is listed under."""
    return field(default=default, metadata={"help": text, "group": group})


def refuses_unknown(config: Any) -> Any:
    """Class decorator: a name that the config does not have is an ArgumentError with the remedy, not a TypeError.

    A config's own `rejected` says it for names that other configs have.
    """
    made = config.__init__
    known = {f.name for f in fields(config) if f.init}
    rejected = REJECTED | getattr(config, "rejected", {})

    @functools.wraps(made)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs = drop_trl_defaults(kwargs, known)
        check_names(kwargs, known, rejected)
        self.given = frozenset(kwargs)  # transformers changes some of its own fields right after
        made(self, *args, **kwargs)

    config.__init__ = checked
    return config
