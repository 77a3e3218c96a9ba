"""Do something with a module as soon as it is there: now, or right after its first import.

Imports nothing of phalanx and nothing of torch: a process that may never import torch runs it at its start
(`site/sitecustomize.py`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that somebody waits for, with the help of all other finders."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        # Nobody waits for it any more, so this asks the others.
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.waiting[fullname] = callbacks
            return None
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


class _Loader(importlib.abc.Loader):
    """A loader that tells when it is done. Everything else is asked of the real one."""

    def __init__(self, real: Any, callbacks: list[Callback]) -> None:
        self._real = real
        self._callbacks = callbacks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._real.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        for callback in self._callbacks:
            callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` now if the module has been imported, else right after it is."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(callback)


def forget(callback: Callback) -> None:
    """Do not call `callback` any more."""
    for name, callbacks in list(_finder.waiting.items()):
        callbacks[:] = [each for each in callbacks if each is not callback]
        if not callbacks:
            del _finder.waiting[name]
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
