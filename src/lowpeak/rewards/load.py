"""A reward from the words of a command line: a function of a file or a module, a shipped reward, a model's name; or a judge."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lowpeak.errors import ArgumentError

SHIPPED: dict[str, str] = {
    "exact_match": "lowpeak.rewards.answers.exact_match",
    "numeric_match": "lowpeak.rewards.answers.numeric_match",
    "think_answer_format": "lowpeak.rewards.format.think_answer_format",
    "hash_answer_format": "lowpeak.rewards.format.hash_answer_format",
    "length_penalty": "lowpeak.rewards.format.length_penalty",
}
FACTORIES: dict[str, str] = {
    "format_reward": "lowpeak.rewards.format.format_reward",
    "linear_length": "lowpeak.rewards.format.LinearLength",
    "soft_overlong": "lowpeak.rewards.format.SoftOverlong",
}


def load_reward(spec: str) -> Callable[..., Any] | str:
    """Return what `spec` names, for `reward_funcs`.

    `path/to/file.py:function`, `package.module.function`, `package.module:object.method`, a name of `SHIPPED`, or one
    of `FACTORIES` with its arguments, as in `soft_overlong(512, 128)`. A folder or an `owner/name` of the hub is a
    reward model's: it comes back as it is, since models are loaded with the trainer's settings.

    Raises:
        ArgumentError: the file or module is missing or does not import, or has no such callable.
    """
    spec = SHIPPED.get(spec, spec)
    if spec.partition("(")[0].strip() in FACTORIES:
        return _made(spec)
    if spec and ":" not in spec and not spec.endswith(".py") and ("/" in spec or Path(spec).is_dir()):
        return spec  # a model's
    names = ", ".join([*SHIPPED, *(f"{name}(...)" for name in FACTORIES)])
    found = _find(spec, "Reward", f", or one of {names}")
    if not callable(found) or inspect.isclass(found):
        kind = "a class, name an object or a function" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ArgumentError(f"Reward '{spec}' cannot be called as a reward: it is {kind}.")
    return found


def load_judge(spec: str) -> Any:
    """Return the object that `path/to/file.py:object` or `package.module.object` names; the trainer says whether it is a judge."""
    return _find(spec, "Judge")


def _made(spec: str) -> Callable[..., Any]:
    name = spec.partition("(")[0].strip()
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("it has no arguments")
        arguments = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        module, _, factory = FACTORIES[name].rpartition(".")
        return getattr(importlib.import_module(module), factory)(*arguments, **keywords)
    except ArgumentError:
        raise
    except (SyntaxError, ValueError, TypeError) as error:
        raise ArgumentError(
            f"Reward '{spec}' cannot be made: {error}; '{name}' takes literal arguments in parentheses."
        ) from error


def _find(spec: str, role: str, shipped: str = "") -> Any:
    where, colon, name = spec.rpartition(":")
    if not colon:
        where, _, name = spec.rpartition(".")
    if colon and where.endswith(".py"):
        module = _import_file(Path(where), role)
    elif spec.endswith(".py"):
        raise ArgumentError(f"{role} '{spec}' is a file: name what it defines, as in '{spec}:function'.")
    elif where:
        module = _import_module(where, spec, role)
    else:
        raise ArgumentError(
            f"{role} '{spec}' is not known: write path/to/file.py:name or package.module.name{shipped}."
        )
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{role} '{spec}' does not exist: there is no '{name}' in '{module.__file__}'.")
        found = getattr(found, part)
    return found


def _import_file(path: Path, role: str) -> ModuleType:
    """Return the file as a module, run once per process and content."""
    if not path.is_file():
        raise ArgumentError(f"{role} file '{path}' does not exist.")
    path = path.resolve()
    content = hashlib.sha256(bytes(path) + path.read_bytes()).hexdigest()[:12]
    name = f"lowpeak_reward_{path.stem}_{content}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up there
    sys.path.insert(0, str(path.parent))  # as for a script: it may import what lies beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ArgumentError(f"{role} file '{path}' does not import: {_said(error, str(path))}.") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _import_module(name: str, spec: str, role: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_ours = missing is not None and f"{name}.".startswith(f"{missing}.")
        said = f"there is no module '{missing}'" if is_ours else _said(error, None)
        raise ArgumentError(f"{role} '{spec}' does not import: {said}.") from error


def _said(error: BaseException, path: str | None) -> str:
    """Return the exception and its line: in the file at `path`, else the last one that it passed."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: SyntaxError: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == path] or frames
    where = f"line {own[-1].lineno}" if path else f"{own[-1].filename}, line {own[-1].lineno}"
    return f"{where}: {type(error).__name__}: {error}"
