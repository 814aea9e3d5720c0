"""Packages are used by their public names: other packages and examples import none of its modules. Tests and benchmarks do."""

from __future__ import annotations

import ast

import pytest

import lowpeak
from architecture.sources import PACKAGE, ROOT, exports, files, is_under, module_of, modules, tree_of

PACKAGES = {module_of(path) for path in PACKAGE.rglob("__init__.py")} - {"lowpeak"}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
CHECKED = [*files(), *EXAMPLES]
# Users name rewards in their own programs.
FOR_USERS = {"lowpeak.rewards.builtin"}


def imported(tree):
    """Each module or name of lowpeak that a tree imports, by its full path, and the module it is imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and is_under(node.module, "lowpeak"):
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names if is_under(alias.name, "lowpeak"))


def inside(path, package):
    return path.is_relative_to(PACKAGE) and is_under(module_of(path), package)


def modules_used_from_outside(path, tree):
    """The modules of packages that a file outside of them imports, or imports from."""
    for pair in imported(tree):
        for name in pair:
            package = name.rpartition(".")[0]
            if name in modules() - PACKAGES and package in PACKAGES and not inside(path, package):
                yield name


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_outside_a_package_imports_its_public_names(path):
    tree = tree_of(path)
    assert sorted(set(modules_used_from_outside(path, tree))) == []
    names = {name for name, _ in imported(tree) if name.rpartition(".")[0] in PACKAGES and name not in modules()}
    assert {name for name in names if not inside(path, name.rpartition(".")[0])} <= exports().keys()


def test_an_import_of_a_module_from_outside_is_found():
    ways = (
        "from lowpeak.batching.packing import pack",
        "from lowpeak.batching import packing",
        "import lowpeak.batching.packing",
    )
    tree = ast.parse("\n".join(ways))
    assert {*modules_used_from_outside(ROOT / "examples/new.py", tree)} == {"lowpeak.batching.packing"}
    assert {*modules_used_from_outside(PACKAGE / "batching/new.py", tree)} == set()


def test_every_public_name_is_defined_in_the_module_that_the_stub_names():
    paths = {module_of(path): path for path in files()}
    missing = [
        name for name, module in exports().items() if name.rpartition(".")[2] not in _names_made(tree_of(paths[module]))
    ]
    assert missing == []


def _names_made(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


def test_no_public_name_is_a_modules_name():
    """Once the module is loaded, the package's attribute of that name would be the module."""
    assert exports().keys() & modules() == set()


def test_a_package_exports_what_other_packages_use():
    used = {
        name for path in CHECKED for name, _ in imported(tree_of(path)) if not inside(path, name.rpartition(".")[0])
    }
    used |= {name for name, module in exports().items() if module in FOR_USERS}
    assert {name for name in exports() if name.rpartition(".")[0] != "lowpeak"} - used == set()


@pytest.mark.parametrize("package", sorted({"lowpeak", *PACKAGES}))
def test_a_package_lists_its_names_without_loading_them(package):
    import importlib

    loaded = importlib.import_module(package)
    version = ["__version__"] if package == "lowpeak" else []
    assert list(loaded.__all__) == sorted(loaded.__all__)
    assert dir(loaded) == sorted([*loaded.__all__, *version])
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = loaded.no_such_name


def test_lowpeak_itself_has_what_users_need():
    assert {"GRPOTrainer", "GRPOConfig", "Algorithm", "Reward"} <= {*lowpeak.__all__}
