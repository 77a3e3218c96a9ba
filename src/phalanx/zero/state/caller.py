"""Whether torch.distributed.checkpoint asks: its `get_state_dict` and `set_state_dict` call an optimizer's usual methods.

They expect a state that lies whole in `optimizer.state`. Ours does not, so its methods answer these callers otherwise.
Imports nothing of it: the package takes long to import, and whoever asks has done so.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

# Private in so far as its functions call each other; tests/zero/test_dcp.py notices if it moves.
_ASKING = "torch.distributed.checkpoint.state_dict"
# Torch wraps an optimizer's methods in a few functions of its own.
_MOST_FRAMES = 8


def asked_by_checkpoint() -> dict[str, Any] | None:
    """The local variables of the function that asks, if the caller's caller is one of them; else None."""
    if _ASKING not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_globals.get("__name__") == _ASKING:
            return frame.f_locals
        frame = frame.f_back
    return None
