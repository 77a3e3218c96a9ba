"""The ways in on a worker that owns parameters: functions that callers run here by RPC.

An owned optimizer is kept alive by an RRef that the caller holds: it goes when the caller drops or
closes its DistributedOptimizer, and when RPC shuts down. Messages name it by a number, since sending
an RRef costs messages of its own.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed.rpc as rpc
from torch.optim import Optimizer

from phalanx.errors import RemoteError
from phalanx.remote.groups import Changes, Options
from phalanx.remote.owned import UPDATES, GroupSpec, HalfDone, OwnedOptimizer

_OWNED: WeakValueDictionary[int, OwnedOptimizer] = WeakValueDictionary()
# Handles released before their `create` has ended: the caller gave up waiting for it.
_UNWANTED: deque[int] = deque(maxlen=1024)

# (kind, message, traceback, touched): plain values, so that any caller can read them.
Record = tuple[str, str, str, bool]


class Created(NamedTuple):
    """The answer to `create`. `clock` is the owner's monotonic clock just before answering."""

    keeper: Any
    defaults: Options
    options: list[Options]
    clock: float


def create(
    handle: int,
    make: Callable[..., Optimizer],
    specs: Sequence[GroupSpec],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Record | None, Created | None]:
    """Make an owned optimizer under `handle`; the answer's `keeper` keeps it alive."""
    try:
        owned = OwnedOptimizer(make, specs, args, kwargs)
        if handle in _UNWANTED:
            raise RemoteError("the caller has given up on this optimizer.")
        _OWNED[handle] = owned
        created = Created(rpc.RRef(owned), owned.optimizer.defaults, owned.options(), time.monotonic())
        return None, created
    except Exception as error:
        return _record(error), None


def serve(
    handle: int, verb: str, changes: Changes | None, tell_all: bool, *args: Any
) -> tuple[Record | None, Any, Changes | None]:
    """Run a method of an owned optimizer, after taking over changed options.

    Answers (failure record or None, result, options that the optimizer itself has changed, or all of
    them if asked). What raises is answered as a record: its text and traceback arrive unaltered.
    """
    try:
        owned = _OWNED.get(handle)
        if owned is None:
            raise RemoteError("this worker no longer holds that optimizer: it was closed, or RPC was restarted.")
        if changes:
            owned.take_options(changes)
        result = getattr(owned, verb)(*args)
        return None, result, owned.tell_options(tell_all)
    except Exception as error:
        return _record(error), None, None


def release(handle: int) -> None:
    """Forget an owned optimizer now. An RRef that never reached the caller may keep its empty shell."""
    _UNWANTED.append(handle)
    owned = _OWNED.pop(handle, None)
    if owned is not None:
        with UPDATES:
            vars(owned).clear()


def num_owned() -> int:
    """How many optimizers this worker holds for callers."""
    return len(_OWNED)


def _record(error: Exception) -> Record:
    touched = isinstance(error, HalfDone)
    cause = error.__cause__ if touched and error.__cause__ is not None else error
    text = "".join(traceback.format_exception(cause))
    return type(cause).__name__, str(cause), text, touched
