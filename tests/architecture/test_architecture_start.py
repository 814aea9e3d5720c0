"""The light parts are light, and the public names are the table in `lowpeak/__init__.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lowpeak

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pandas", "peft", "vllm")


@pytest.mark.parametrize(
    "statement",
    [
        "import lowpeak",
        "dir(__import__('lowpeak'))",
        "import lowpeak.errors",
        "from lowpeak.cli.commands import main; main(['--help'])",
        "from lowpeak.cli.commands import main; main(['--version'])",
        "from lowpeak.cli.commands import main; main(['nonsense'])",
        "from lowpeak.cli.commands import main; main(['serve'])",
        "import lowpeak.arguments.grpo, lowpeak.arguments.ppo, lowpeak.arguments.offline",
    ],
)
def test_this_loads_no_heavy_package(statement):
    program = f"{statement}\nimport sys\nprint('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_the_public_names_are_the_sorted_table():
    assert lowpeak.__all__ == sorted(lowpeak.__all__)
    assert dir(lowpeak) == lowpeak.__all__


@pytest.mark.parametrize("name", lowpeak.__all__)
def test_every_public_name_is_there(name):
    assert getattr(lowpeak, name) is not None


def test_an_unknown_name_is_an_attribute_error_as_everywhere():
    with pytest.raises(AttributeError, match="PPOTrainerr"):
        _ = lowpeak.PPOTrainerr
