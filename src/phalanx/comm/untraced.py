"""What dynamo must not trace: our frames run beside the user's graph, never inside it.

Says so to dynamo without importing it, which takes longer than importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

# Private: `torch.compiler.disable` says the same, but imports dynamo at once and adds a wrapper to every call.
# tests/compile/test_torch_internals.py notices if these move.
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

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


def all_untraced(owner: Class) -> Class:
    """`untraced` for every method that a class defines: C++ calls them in the midst of compiled code."""
    for member in vars(owner).values():
        if isinstance(member, FunctionType):
            untraced(member)
    return owner
