"""The vLLM of this environment is one that lowpeak supports."""

from __future__ import annotations

from pathlib import Path

from packaging.specifiers import SpecifierSet


def test_the_pinned_vllm_is_in_the_supported_range() -> None:
    import vllm

    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    wanted = project.split('"vllm', 1)[1].split('"', 1)[0]
    assert vllm.__version__.split("+")[0] in SpecifierSet(wanted)
