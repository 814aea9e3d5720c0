"""Packages that are not lowpeak's: each import is declared, and no folder of tests takes a package's name."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement

from architecture.sources import ROOT, all_imports


def declared() -> set[str]:
    """The distributions of pyproject.toml's dependencies and extras, by their normalised names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    return {normalised(re.split(r"[^\w.-]", name, maxsplit=1)[0]) for name in required}


def normalised(name: str) -> str:
    """A distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name.lower())


NOT_INSTALLED = {"openenv": ["openenv-core"]}  # in .venv; distributions by the name that is imported


def test_every_imported_package_is_declared():
    imported = {found.target.split(".")[0] for found in all_imports()} - {"lowpeak", *sys.stdlib_module_names}
    distributions = {**NOT_INSTALLED, **packages_distributions()}
    missing = {name for name in imported if not {*map(normalised, distributions.get(name, [name]))} & declared()}
    assert missing == set()


@pytest.mark.parametrize(("lock", "extra"), [("requirements.txt", ""), ("requirements-test.txt", "test")])
def test_every_package_that_is_installed_is_locked_by_its_hashes(lock, extra):
    """Transitive ones too. torch is pinned without: indexes have several builds. What it brings along for GPUs follows it."""
    text = (ROOT / lock).read_text(encoding="utf-8")
    locked = {normalised(name) for name in re.findall(r"^[\w.-]+(?===.*\n +--hash=sha256:)", text, re.MULTILINE)}
    assert "\ntorch==" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    brought = {"torch"} if extra else {"torch", "triton"}  # triton by builds for GPUs
    found: set[str] = set()
    wanted = [("lowpeak", {extra})]
    while wanted:
        name, extras = wanted.pop()
        for needed in map(Requirement, requires(name) or ()):
            key = normalised(needed.name)
            applies = needed.marker is None or any(needed.marker.evaluate({"extra": each}) for each in extras or {""})
            if applies and key not in found and not key.startswith(("nvidia-", "cuda-")):
                found.add(key)
                wanted.append((key, needed.extras))
    assert found - locked <= brought


def test_no_folder_of_tests_has_the_name_of_a_package():
    """Its tests' folder would be found in the place of an optional package that is not installed."""
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    imported = {found.target.split(".")[0] for found in all_imports()}
    assert {*map(normalised, folders)} & (declared() | {*map(normalised, imported)}) == set()
