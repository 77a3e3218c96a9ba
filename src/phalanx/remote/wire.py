"""A step as a torch operator: the short way through RPC for the one call that is made all the time.

RPC carries a Python function as a pickle, and an operator as plain values; the second costs about
two thirds of the first. RPC accepts operators of the `aten` namespace only, so ours is put there under
a name that nobody else uses. Everything else goes as Python functions (owner.py); that is also how this
module gets imported on an owner before its first step.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from phalanx.remote.groups import Changes
from phalanx.remote.owner import Record, serve

_NO_CONTEXT = -1
_NAME = "phalanx_remote_step"

_LIBRARY = torch.library.Library("aten", "FRAGMENT")
_LIBRARY.define(f"{_NAME}(int handle, int number, int context, float deadline, str changes, bool tell_all) -> str")


def _step(handle: int, number: int, context: int, deadline: float, changes: str, tell_all: bool) -> str:
    context_id = None if context == _NO_CONTEXT else context
    record, stepped, told = serve(
        handle, "step", _decode(changes) if changes else None, tell_all, number, context_id, deadline
    )
    if record is None and told is None:
        return " ".join(map(repr, stepped))
    return _encode((record, stepped, told))


_LIBRARY.impl(_NAME, _step, "CompositeExplicitAutograd")
# The operator itself, by which RPC knows it, and not the packet of its overloads.
STEP: Any = getattr(torch.ops.aten, _NAME).op


def step_args(
    handle: int, number: int, context_id: int | None, deadline: float, changes: Changes | None, tell_all: bool
) -> tuple[Any, ...]:
    """The arguments of `STEP`."""
    context = _NO_CONTEXT if context_id is None else context_id
    return handle, number, context, deadline, _encode(changes) if changes else "", tell_all


def read_answer(text: str) -> tuple[Record | None, Any, Changes | None]:
    """What `owner.serve` would have answered."""
    if text[0] != _MARK:
        waited_s, update_s, num_updated, clock = text.split(" ")
        return None, (float(waited_s), float(update_s), int(num_updated), float(clock)), None
    answer: tuple[Record | None, Any, Changes | None] = _decode(text)
    return answer


_MARK = "!"


def _encode(value: Any) -> str:
    return _MARK + pickle.dumps(value).decode("latin-1")


def _decode(text: str) -> Any:
    return pickle.loads(text[1:].encode("latin-1"))
