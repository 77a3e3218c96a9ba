"""The public names, pinned: adding or removing one is a decision, made here as well."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import phalanx

# Sorted. A name that goes in here needs a docstring and a line in CHANGELOG.md.
PUBLIC_NAMES: list[str] = [
    "Checkpointer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "GradBucket",
    "MixedPrecision",
    "PhalanxError",
    "Worker",
    "ZeroRedundancyOptimizer",
    "compile",
    "data",
    "elastic",
    "init",
    "install",
    "observe",
    "optim",
    "remote",
]


def _public_members(owner: type) -> list[str]:
    """Methods and properties that a class of phalanx defines itself, without the inherited ones."""
    members = {**vars(owner)}
    return [name for name, member in members.items() if not name.startswith("_") and _is_documentable(member)]


def _is_documentable(member: object) -> bool:
    return inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))


def _modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.walk_packages(phalanx.__path__, "phalanx.")]
    found = []
    for name in (name for name in names if not name.endswith("__main__")):
        try:
            found.append(importlib.import_module(name))
        except phalanx.PhalanxError as error:
            # A plug-in without its framework says what to install, and nothing else may fail.
            assert name.startswith("phalanx.integrations.") and "pip install" in str(error), name
    return found


def test_public_names_are_the_pinned_ones() -> None:
    assert sorted(getattr(phalanx, "__all__", [])) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_is_documented(name: str) -> None:
    public = getattr(phalanx, name)
    assert inspect.getdoc(public), f"phalanx.{name} has no docstring"
    if isinstance(public, type):
        bare = [member for member in _public_members(public) if not inspect.getdoc(getattr(public, member))]
        assert not bare, f"phalanx.{name}: members without a docstring: {bare}"


def test_version_is_the_one_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert phalanx.__version__ == project["version"]


def test_every_module_says_what_it_owns_and_lists_only_what_it_has() -> None:
    for module in _modules():
        is_empty = module.__file__ is None or not Path(module.__file__).read_text().strip()
        assert module.__doc__ or is_empty, f"{module.__name__} has no docstring"
        missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
        assert not missing, f"{module.__name__}.__all__ lists {missing}, which it does not have"
