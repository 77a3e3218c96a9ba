"""How dynamo sees this package: our frames run beside the user's graph, never inside it.

Dynamo knows torch's own wrapper by name and leaves its file alone; ours it would trace like any user code.
Says so to dynamo without importing it, which takes longer than importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Private: `torch.compiler.disable` says the same, but imports dynamo at once and adds a wrapper to every call.
# tests/compile/test_torch_internals.py notices if these move.
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

# Asked after a forward of a wrapper of which nothing has been compiled, with the wrapper and dynamo's callback.
# Set by the backend that wants to know; None while it is not loaded.
on_uncompiled: Callable[[Any, Any], None] | None = None

_SKIP, _DEFAULT = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT


def _mark(function: Function, callees: Any) -> Function:
    code = function.__code__
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(_SKIP, callees))
    # Seen where dynamo would inline the function into a caller's graph.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def untraced(function: Function) -> Function:
    """Never compile `function`, nor anything that it calls."""
    return _mark(function, _SKIP)


def transparent(function: Function) -> Function:
    """Never compile `function` itself; what it calls is compiled as if it were called directly."""
    return _mark(function, _DEFAULT)


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
