"""Which of torch's tests exercise DistributedDataParallel, read from the text of the wheel's own test file.

A test is one of ours when its body, or a method it calls on itself, names the class. Torch is found, not
imported: collecting tests costs no more than parsing one file.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

_FILE = "testing/_internal/distributed/distributed_test.py"
_CLASS = "_DistTestBase"
_WRAPPER = "DistributedDataParallel"


@cache
def ddp_tests() -> tuple[str, ...]:
    """The names of torch's tests in which the wrapper takes part, in the order of the file."""
    mentions, calls = _methods()
    reached = {name: _reaches(name, mentions, calls) for name in calls}
    return tuple(name for name in calls if name.startswith("test_") and reached[name])


@cache
def all_tests() -> tuple[str, ...]:
    """The names of all of torch's tests of that file."""
    return tuple(name for name in _methods()[1] if name.startswith("test_"))


@cache
def _methods() -> tuple[set[str], dict[str, set[str]]]:
    """The methods that name the wrapper, and for each method those that it calls on itself."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations, "torch is installed"
    path = Path(spec.submodule_search_locations[0], _FILE)
    base = next(
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == _CLASS
    )
    mentions: set[str] = set()
    calls: dict[str, set[str]] = {}
    for method in base.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        calls[method.name] = set()
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute):
                if node.attr == _WRAPPER:
                    mentions.add(method.name)
                elif isinstance(node.value, ast.Name) and node.value.id == "self":
                    calls[method.name].add(node.attr)
            elif isinstance(node, ast.Name) and node.id == _WRAPPER:
                mentions.add(method.name)
    return mentions, calls


def _reaches(name: str, mentions: set[str], calls: dict[str, set[str]]) -> bool:
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        method = waiting.pop()
        if method in mentions:
            return True
        if method not in seen:
            seen.add(method)
            waiting += calls.get(method, ())
    return False
