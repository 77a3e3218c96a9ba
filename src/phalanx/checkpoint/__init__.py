"""Checkpoints of a whole training run: atomic, asynchronous, verified, loaded by any number of ranks.

Design: docs/design/checkpoint.md. `storage/` is the part that knows files and not torch.
"""

from .apply import Restored
from .checkpointer import Checkpointer
from .storage.library import Keep

__all__ = ["Checkpointer", "Keep", "Restored"]
