"""`phalanx.install()`: from here on torch's names mean ours, in this process and in those it starts.

Owns what was patched, and can take it back. A module that bound one of the names before keeps torch's, which is
said in a warning: to patch a user's module behind its back would leave objects of both kinds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ArgumentTypeError, ConfigError
from .after_import import Callback, forget, when_imported
from .groups import swapped_maker
from .table import GROUP_MAKERS, KEPT, SWAPPED

SWAP = "PHALANX_SWAP"
"""Environment variable: "1" makes processes swap as soon as they import torch. `install` sets it."""

_SITE = str(Path(__file__).resolve().parent / "site")

# What was there before, in the order of patching: (module, name, original).
_patched: list[tuple[ModuleType, str, Any]] = []
# What is done to modules of torch, now or when they are imported.
_callbacks: list[tuple[str, Callback]] = []
_installed = False


def install(*rebound: str) -> None:
    """Make torch's DDP, ZeroRedundancyOptimizer, DistributedOptimizer, hooks and gloo phalanx's, everywhere.

    Call it before whatever imports them by name. In both of torch's module paths, also in modules that are imported
    later and in processes that this one starts. What stays torch's: `torch.distributed._composable.replicate`, and
    modules that bound a name before, which a warning lists. Of libraries named in `rebound` (by their top module) such
    names become ours as well: for plug-ins that know the library. Calling it again does nothing.
    """
    global _installed
    _check_libraries(rebound)
    if _installed:
        return
    _installed = True
    _callbacks[:] = [(name, partial(_keep, replaced)) for name, replaced in KEPT.items()]
    _callbacks.extend((name, _swap_names) for name in SWAPPED)
    _callbacks.extend((name, _swap_makers) for name in GROUP_MAKERS)
    for name, callback in _callbacks:
        when_imported(name, callback)
    _tell_children()
    early = _bound_early()
    for module, name, replacement in early:
        if module.__name__.split(".")[0] in rebound:
            _replace(module, name, replacement)
    left = [f"{module.__name__} ({name})" for module, name, _ in early if module.__name__.split(".")[0] not in rebound]
    if left:
        warnings.warn(
            "phalanx.install() came after " + ", ".join(left) + ". These keep torch's own. Call phalanx.install() before "
            "importing them, or start the program with `phalanx run --swap`.",
            stacklevel=2,
        )


def _check_libraries(names: Sequence[object]) -> None:
    """Refuse what is no library here: nothing would be rebound, and nobody would know."""
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"install() is given the names of libraries, as text, got {name!r:.80}.")
        # What is imported already may have no spec (`find_spec` raises then), and is what names are rebound in.
        if not name.isidentifier() or (name not in sys.modules and importlib.util.find_spec(name) is None):
            raise ConfigError(
                f"install({name!r:.80}): there is no library of that name here. Name its top module, as in install('ray'), "
                "or leave it out: install() by itself swaps torch's names."
            )


def uninstall() -> None:
    """Give torch its own names back. What was bound meanwhile stays ours."""
    global _installed
    for _, callback in _callbacks:
        forget(callback)
    while _patched:
        module, name, original = _patched.pop()
        setattr(module, name, original)
    paths = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", _SITE)]
    os.environ.pop(SWAP, None)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not paths:
        del os.environ["PYTHONPATH"]
    _installed = False


def _replace(module: ModuleType, name: str, replacement: Any) -> None:
    original = getattr(module, name)
    if original is not replacement:
        _patched.append((module, name, original))
        setattr(module, name, replacement)


def _swap_names(module: ModuleType) -> None:
    for name, load in SWAPPED[module.__name__].items():
        _replace(module, name, load())


def _keep(name: str, module: ModuleType) -> None:
    """The module was imported with our class under torch's name: it gets torch's back."""
    for _, patched, original in _patched:
        if patched == name:
            setattr(module, name, original)
            return


def _swap_makers(module: ModuleType) -> None:
    makers = (("init_process_group", 0, True), ("new_group", 2, False))
    for name, position, default in makers:
        original = getattr(module, name, None)
        if original is None or hasattr(original, "_phalanx_swapped"):
            continue
        swapped = swapped_maker(original, position, default)
        swapped._phalanx_swapped = True  # type: ignore[attr-defined]
        _replace(module, name, swapped)


def _tell_children() -> None:
    os.environ[SWAP] = "1"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _SITE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, *filter(None, paths)])


def _bound_early() -> list[tuple[ModuleType, str, Any]]:
    """Who outside of torch and phalanx had bound an original: module, its name for it, and what it is swapped for."""
    replacements = {id(original): getattr(module, name) for module, name, original in _patched}
    found = []
    for name, module in sorted(sys.modules.items()):
        # Some put objects of their own into sys.modules, or None.
        if not isinstance(module, ModuleType) or name.split(".")[0] in ("torch", "phalanx"):
            continue
        bound = ((key, replacements.get(id(value))) for key, value in list(vars(module).items()))
        found += [(module, key, replacement) for key, replacement in bound if replacement is not None]
    return found
