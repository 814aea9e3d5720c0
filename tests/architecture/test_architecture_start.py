"""The light parts are light, and the public names are the table in `lowpeak/__init__.py`."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

import lowpeak
from architecture.sources import PACKAGE

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "pandas", "peft", "vllm", "plotly")


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
        "import lowpeak.report.page, lowpeak.journal",
        "import lowpeak.arguments.grpo, lowpeak.arguments.ppo, lowpeak.arguments.offline",
    ],
)
def test_this_loads_no_heavy_package(statement):
    program = f"{statement}\nimport sys\nprint('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_the_public_names_are_the_sorted_table():
    assert lowpeak.__all__ == sorted(lowpeak.__all__)
    assert dir(lowpeak) == sorted([*lowpeak.__all__, "__version__"])


@pytest.mark.extended
def test_the_public_names_are_found_in_a_zip_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as file:
        for path in PACKAGE.rglob("*.py*"):
            if path.suffix in (".py", ".pyi"):
                file.write(path, path.relative_to(PACKAGE.parent))
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'code.zip')!r})\n"
        "import lowpeak; print(lowpeak.__file__, lowpeak.GRPOConfig.__name__, lowpeak.ArgumentError.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    found = done.stdout.splitlines()[-1]
    assert found == f"{tmp_path / 'code.zip' / 'lowpeak' / '__init__.py'} GRPOConfig ArgumentError"


@pytest.mark.parametrize("name", lowpeak.__all__)
def test_every_public_name_is_there(name):
    assert getattr(lowpeak, name) is not None


def test_an_unknown_name_is_an_attribute_error_as_everywhere():
    with pytest.raises(AttributeError, match="PPOTrainerr"):
        _ = lowpeak.PPOTrainerr
