"""The trainer's model classes beside a vLLM that runs transformers' code: vLLM changes the class itself, for all of its models.

`vllm_model_impl="transformers"` decorates the class of the decoder in place (vLLM 0.31 to 0.33,
`compilation/decorators.py`): from then on making or calling any model of that class needs a config of vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn

_THEIRS = "vllm_config"  # an attribute of the models that vLLM made
_APART = "_lowpeak_apart"


def keep_apart(models: Iterable[nn.Module], is_building: Callable[[], bool]) -> None:
    """Let vLLM's changes to the classes of its `models` hold for its own models alone.

    A model is vLLM's where `is_building()` was true when it was made. A class that is apart, or was not changed, is left alone.
    """
    for kind in {type(model) for model in models if _is_changed(type(model)) and _THEIRS in vars(model)}:
        _divide(kind, is_building)


def _is_changed(kind: type) -> bool:
    """Whether it is a class of transformers', or of a model's repository, whose methods were replaced by vLLM's."""
    init = vars(kind).get("__init__")
    return (
        not kind.__module__.startswith("vllm.")
        and "__call__" in vars(kind)
        and getattr(init, "__module__", kind.__module__) != kind.__module__
        and _APART not in vars(kind)
    )


def _divide(kind: Any, is_building: Callable[[], bool]) -> None:
    their_init, their_call = kind.__init__, kind.__call__
    our_init = _wrapped(their_init)

    @wraps(our_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        (their_init if is_building() else our_init)(self, *args, **kwargs)

    @wraps(nn.Module.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (their_call if _THEIRS in vars(self) else nn.Module.__call__)(self, *args, **kwargs)

    kind.__init__, kind.__call__ = init, call
    setattr(kind, _APART, True)


def _wrapped(init: Any) -> Callable[..., None]:
    """The `__init__` that the class had, which vLLM's holds as `old_init`."""
    held = dict(zip(init.__code__.co_freevars, init.__closure__ or (), strict=True))
    found: Callable[..., None] = held["old_init"].cell_contents
    return found
