"""How dynamo sees this package: our frames run beside the user's graph, never inside it.

Dynamo knows torch's own wrapper by name and leaves its file alone; ours it would trace like any user code.
Says so to dynamo without importing it, which takes longer than importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame

from ..comm.untraced import transparent, untraced

__all__ = ["call", "hides_from_dynamo", "on_uncompiled", "report_uncompiled", "transparent", "untraced"]

# Asked after a forward of a wrapper of which nothing has been compiled, with the wrapper and dynamo's callback.
# Set by the backend that wants to know; None while it is not loaded.
on_uncompiled: Callable[[Any, Any], None] | None = None


def call(module: torch.nn.Module, inputs: Any, kwargs: Any) -> Any:
    """`module(*inputs, **kwargs)`, in a frame that dynamo captures even for modules of torch itself.

    Dynamo starts no graph in torch's own files, so a bare `nn.Sequential` would silently stay uncompiled.
    """
    return module(*inputs, **kwargs)


def report_uncompiled(wrapper: Any, reducer: Any) -> None:
    """Called in a frame that dynamo looks through: in an untraced one its callback would be hidden."""
    if on_uncompiled is not None and reducer.choose_buckets is None:
        on_uncompiled(wrapper, eval_frame.get_eval_frame_callback())


transparent(report_uncompiled)


def hides_from_dynamo(module: torch.nn.Module) -> bool:
    """Whether the module's forward is one of torch's own."""
    return str(getattr(type(module).forward, "__module__", "")).startswith("torch.")
