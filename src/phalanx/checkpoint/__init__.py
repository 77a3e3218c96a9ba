"""Checkpoints of a whole training run: atomic, asynchronous, verified, loaded by any number of ranks.

Design: docs/design/checkpoint.md. `storage/` is the part that knows files and not torch,
which is imported with what needs it: the command that lists checkpoints does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .storage.library import Keep

if TYPE_CHECKING:
    from .apply import Restored
    from .checkpointer import Checkpointer

__all__ = ["Checkpointer", "Keep", "Restored"]

_PLACES = {"Checkpointer": ".checkpointer", "Restored": ".apply"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name], __name__), name)
