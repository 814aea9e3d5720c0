"""Environments by name: those of a file or module, and those of other packages by a prefix."""

from __future__ import annotations

from functools import partial
from typing import Any

from lowpeak.environments.gymnasium import GymnasiumEnvironment
from lowpeak.environments.openenv import openenv_factory
from lowpeak.environments.verifiers import verifiers_factory
from lowpeak.errors import require_package
from lowpeak.rewards import load_object


def load_environment(spec: str, role: str = "Environment") -> Any:
    """Return the factory at `file.py:Class`, `package.module.Class`, `gymnasium:ID`, `openenv:URL` or `verifiers:NAME`.

    Raises ArgumentError as `load_object` does, and MissingPackageError.
    """
    prefix, _, name = spec.partition(":")
    if prefix == "gymnasium":
        require_package("gymnasium", spec, "gymnasium")
        return partial(GymnasiumEnvironment, name)
    if prefix == "openenv":
        require_package("openenv", spec, "openenv", named="openenv-core")
        from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

        return openenv_factory(name, GenericEnvClient)
    if prefix == "verifiers":
        return verifiers_factory(name)
    return load_object(spec, role)
