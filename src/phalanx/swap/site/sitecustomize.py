"""Run by Python at the start of every process below a swapped one: waits for torch, then swaps.

A process that never imports torch pays for a few small files. What another `sitecustomize` on the path would have done
is done as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _swap(_torch: ModuleType) -> None:
    import phalanx

    phalanx.install()


def _wait_for_torch() -> None:
    # By its path: importing it as a part of the package would import the package, and torch with it.
    spec = importlib.util.spec_from_file_location("_phalanx_after_import", _HERE.parent / "after_import.py")
    assert spec is not None and spec.loader is not None, "the file lies beside this folder"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.when_imported("torch", _swap)


def _run_the_other() -> None:
    """The `sitecustomize` that would have been found if this one were not in front of it."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("PHALANX_SWAP") == "1":
    _wait_for_torch()
_run_the_other()
