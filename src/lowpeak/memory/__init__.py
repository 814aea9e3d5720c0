"""Memory: the measured peak of each phase; device memory; offloading to the host."""

from typing import Any

from lowpeak.exports import lazy_exports

_load, __dir__, __all__ = lazy_exports(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "rehearse":
        raise ImportError("lowpeak.memory.rehearse is now lowpeak.plan.rehearse(RehearsalInputs(...)).")
    return _load(name)
