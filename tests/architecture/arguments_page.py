"""docs/arguments.md: every argument by group, with its default. `python tests/architecture/arguments_page.py` writes it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

import lowpeak
from architecture.sources import ROOT
from lowpeak.arguments import CLASS_PREFIXES, declaration
from lowpeak.cli import arguments as command_line
from lowpeak.cli.parser import HELP_GROUPS, _group_of

PAGE = ROOT / "docs" / "arguments.md"
OFFLINE = ("sft", "reward", "dpo", "kto")
SHARED = (command_line.ModelArguments, command_line.DataArguments, command_line.LaunchArguments)
ONLINE = (command_line.RewardArguments, command_line.ToolSourceArguments, command_line.ServingArguments)
INTRO = """# Arguments

Every argument that lowpeak declares, of all commands and configs. On a command line it is
`--name value`, in a YAML file `name: value`, in Python a field of the config; those of the groups
model, data and rewards, and those that start processes, are of the command line and the file alone.
`lowpeak grpo --help` prints those of one command, with the fields of transformers'
`TrainingArguments`, which are accepted too. "Online" are the commands that generate.
"""


def rows() -> dict[str, dict[tuple[str, str, str], list[str]]]:
    """Return the commands of each name, default and meaning, by group."""
    found: dict[str, dict[tuple[str, str, str], list[str]]] = {group: {} for group in HELP_GROUPS}
    for command, prefix in CLASS_PREFIXES.items():
        kinds = (*SHARED, *(() if command in OFFLINE else ONLINE), getattr(lowpeak, f"{prefix}Config"))
        for field in (field for kind in kinds for field in dataclasses.fields(kind)):
            if declaration(field).group:
                key = (field.name, _default(field), str(declaration(field)))
                found[_group_of(field)].setdefault(key, []).append(command)
    return found


def _default(field: dataclasses.Field) -> str:
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    return "" if default in (None, "") else f"`{default}`".replace("\n", "\\n")


def _commands(commands: list[str]) -> str:
    others = [command for command in CLASS_PREFIXES if command not in commands]
    if others == [*OFFLINE]:
        return "online"
    return ", ".join(commands) if len(others) > 2 else " but ".join(["all", *([", ".join(others)] if others else [])])


def _sentence(meaning: str) -> str:
    return f"{meaning[0].upper()}{meaning[1:].rstrip('.')}".replace("|", "&#124;")


def text() -> str:
    """Return the page."""
    parts = [INTRO]
    for group, found in rows().items():
        if found:
            lines = [
                f"| `{name}` | {default} | {_sentence(meaning)} | {_commands(commands)} |"
                for (name, default, meaning), commands in found.items()
            ]
            title = f"## {group[0].upper()}{group[1:]}"
            parts.append(
                "\n".join(
                    [title, "", "| argument | default | meaning | commands |", "| -- | -- | -- | -- |", *lines, ""]
                )
            )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
