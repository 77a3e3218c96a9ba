"""What a user's own hook is about to send, compared with the other ranks before a transport is given it.

gloo ends the process when a message is longer than what is expected, and hooks of users call torch's own collectives past
ours: one that casts to another dtype on one rank would abort there. So such a hook runs while c10d's operators are watched,
and each is announced as one of ours would be (`failure.agreement`): the first of its kind after the one before it is
agreed upon, later ones cost a look into a set.

Sees what the hook launches itself, in the thread that calls it. What its callbacks launch, on a transport's threads, is not
seen. Must not know of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Not documented, but what torch's own tools see collectives by: c10d calls them through the dispatcher. The test of a hook
# that sends another dtype on gloo notices if that changes.
from torch.utils._python_dispatch import TorchDispatchMode

from ..torch_backend import GlooCollectives

# As ours are called, for ranks of which one uses our hook and another does the same by itself.
_VERBS = {"allreduce_": "all_reduce", "broadcast_": "broadcast", "_allgather_base_": "all_gather"}
# Of these a rank may write another number of elements than the others, or nothing at all.
_UNEQUAL = {"gather_", "alltoall_", "alltoall_base_"}
_BETWEEN_TWO = {"send", "recv_", "recv_any_source_"}


class Announced(TorchDispatchMode):
    """While it is entered, collectives of torch's own on the group of `collectives` are announced to its other ranks."""

    def __init__(self, collectives: GlooCollectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._collectives = collectives
        self._launched = 0

    def __enter__(self) -> Announced:
        self._launched = self._collectives.board.launched
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._announce(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _announce(self, name: str, args: Sequence[Any]) -> None:
        board = self._collectives.board
        # Of one of ours, that the hook calls as well, the others have heard.
        if board.launched == self._launched and name not in _BETWEEN_TWO and self._is_ours(args):
            # The first argument is what is written, which has the size of the whole.
            tensors = [] if name in _UNEQUAL else list(_tensors(args[0]))
            root = args[2] if name == "broadcast_" else -1
            dtype = tensors[0].dtype if tensors else None
            self._collectives.announce(_VERBS.get(name, name.strip("_")), sum(map(torch.numel, tensors)), dtype, root)
        self._launched = board.launched

    def _is_ours(self, args: Sequence[Any]) -> bool:
        groups = [one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())]
        return any(dist.ProcessGroup.unbox(one) is self._collectives.group for one in groups)


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


def announcing(collectives: object, call: Callable[[], Any]) -> Any:
    """What `call` returns, a hook of a user's own; what it sends is announced where the transport compares nothing."""
    if not isinstance(collectives, GlooCollectives) or collectives.world == 1:
        return call()
    with Announced(collectives):
        return call()
