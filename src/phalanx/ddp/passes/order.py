"""Several wrappers in one backward: whose buckets leave first.

Collectives of one group pair up by the order in which each rank launches them. One wrapper launches in plan order, whatever
order its buckets fill in. Wrappers that share a backward (encoder and decoder, generator and critic, twin critics) need
such a rule between them too: a bucket with a parameter that this rank did not use waits for the end of backward here, and
leaves early on the others. Of the wrappers in one backward, the one whose forward came last is the first:

    during backward   the first wrapper's buckets but its last, then the second's but its last, …
    at the end        what is left of those; then the last buckets; then what follows them (late parts, updates)

Autograd runs first what was computed last, so the second wrapper's gradients come when the first's are all there, and it
seldom waits. Ranks that run their forwards in different orders are told so by the tails, which name the wrapper.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch.distributed as dist

from ...errors import CommunicationError
from ...optim.engine import running_graph

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer
    from .arming import Ending


class LaunchOrder:
    """The wrappers of one process group, on this rank. Holds nobody alive but those who owe something to other ranks."""

    def __init__(self) -> None:
        # Held by whoever counts gradients or launches for one of them. Autograd has a thread per device, so that hooks of a
        # model on several run at once; and a hook of one wrapper may launch buckets of the next.
        self.lock = threading.RLock()
        self.num_named = 0  # how many wrappers have got a number, on every rank
        self._reducers: list[weakref.ref[Reducer]] = []
        self._owing: list[Reducer] = []  # see `keep`

    def enter(self, reducer: Reducer) -> None:
        """From now on `reducer` launches by this order."""
        self._reducers = [known for known in self._reducers if known() not in (None, reducer)]
        self._reducers.append(weakref.ref(reducer))

    def leave(self, reducer: Reducer) -> None:
        """`reducer` has gone to another group."""
        self._reducers = [known for known in self._reducers if known() not in (None, reducer)]
        self._owing = [known for known in self._owing if known is not reducer]

    def keep(self, reducer: Reducer) -> None:
        """A pass of `reducer` has failed: it lives until it has sent what it owes, even if its wrapper is dropped.

        Memory is freed at other moments on other ranks, and who sends must be the same on all.
        """
        if reducer not in self._owing:
            self._owing.append(reducer)
        if _forgive_of_destroyed not in gc.callbacks:
            gc.callbacks.append(_forgive_of_destroyed)

    @property
    def is_owing(self) -> bool:
        """Whether somebody is kept alive."""
        return bool(self._owing)

    def forgive(self) -> None:
        """The group has been destroyed, so that nobody is left to whom anything could be sent."""
        self._owing.clear()

    @property
    def has_several(self) -> bool:
        """Whether a backward may be one of several wrappers."""
        return len(self._reducers) > 1

    def sharing(self, ending: Ending) -> list[Reducer]:
        """The wrappers that take part in the backward of `ending`, the first one first."""
        if not self.has_several:
            return [ending.reducer]
        found: list[tuple[int, Reducer]] = []
        for reducer in self.alive:
            theirs = reducer.noted
            if theirs is not None and theirs.backward == ending.backward:
                found.append((theirs.number, reducer))
        return [reducer for _, reducer in sorted(found, key=lambda pair: -pair[0])]

    def recover(self, asking: Reducer) -> None:
        """Send what passes that failed owe the other ranks, of all wrappers, before any of them sends something new.

        Backward by backward, each in its own order: on all ranks they failed one after the other, wherever each of them
        was caught. One that is torn has nothing to send; whoever asks for that one is told so.
        """
        busy = [known for known in self.alive if not known.is_idle]
        if not busy and not self._owing:
            return
        for known in busy:
            known.fail_if_left()
        failed = [known for known in busy if known.has_failed and (known is asking or not known.is_torn)]
        if not failed and not self._owing:
            return
        try:
            for backward in sorted({known.backward for known in failed}):
                group = [known for known in failed if known.backward == backward]
                take_turns([known.give_up() for known in sorted(group, key=lambda known: -known.place)])
        finally:
            self._owing = [known for known in self._owing if known.has_failed and not known.is_torn]

    def fail_waiting(self, failed: Reducer, backward: int) -> None:
        """A backward of `failed` has raised, perhaps before it came to wrappers that it has come to on another rank.

        All ranks have run the backward of the same forwards, so all of them count the same wrappers in: those whose
        outputs or parameters are in its graph. Not all that wait for a backward: one rank alone may have run a forward
        of which no backward comes, as for a picture of gradients by `autograd.grad`.
        """
        if failed.has_failed:
            self.keep(failed)
        graph = running_graph()
        for known in self.alive:
            number = known.awaited(graph)
            if number is not None:
                known.fail_unreached(backward, number)
                self.keep(known)

    @property
    def alive(self) -> list[Reducer]:
        """All of them."""
        return [known for reference in self._reducers if (known := reference()) is not None]

    # Whoever may raise in the midst of a backward asks these, and holds no ending: it would live on in the traceback, and
    # with it the pass, while the user handles the exception (`engine.BackwardEnd`).

    def before(self, reducer: Reducer) -> list[Reducer]:
        """Those of them that take part in the backward that runs now, and launch before `reducer`."""
        ending = reducer.noted
        sharing = [] if ending is None else self.sharing(ending)
        return sharing[: sharing.index(reducer)] if sharing else []

    def after(self, reducer: Reducer) -> Reducer | None:
        """The one of them that launches next after `reducer`."""
        ending = reducer.noted
        sharing = [] if ending is None else self.sharing(ending)
        place = sharing.index(reducer) + 1 if sharing else 0
        return sharing[place] if place < len(sharing) else None


_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, LaunchOrder] = weakref.WeakKeyDictionary()


def order_of(group: dist.ProcessGroup) -> LaunchOrder:
    """The one order of all wrappers over `group`."""
    return _orders.setdefault(group, LaunchOrder())


def _forgive_of_destroyed(phase: str, _info: dict[str, int]) -> None:
    """Called by the garbage collector: let go of who owes something to ranks of a group that has been destroyed.

    Torch tells nobody of that, and who is kept alive keeps the group, with its threads and connections.
    """
    if phase != "start":
        return
    owing = [(group, order) for group, order in _orders.items() if order.is_owing]
    for group, order in owing:
        if _ranks_of(group) is None:
            order.forgive()
    if not owing:
        _stop_forgiving()


def _stop_forgiving() -> None:
    with suppress(ValueError):
        gc.callbacks.remove(_forgive_of_destroyed)


# A group that a forked child lets go of would wait there for threads that only its parent has.
os.register_at_fork(after_in_child=_stop_forgiving)


def _ranks_of(group: dist.ProcessGroup) -> set[int] | None:
    """None if torch has not made the group, or has destroyed it."""
    try:
        return set(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return None


def reducers_alive() -> list[Reducer]:
    """The reducers of all wrappers, of any group."""
    return [reducer for order in _orders.values() for reducer in order.alive]


def recover(group: dist.ProcessGroup | None) -> None:
    """Before collectives that belong to no backward: what passes that failed owe the other ranks comes first.

    Ranks may have raised at different places, with more buckets under way on some than on others.
    """
    order = None if group is None else _orders.get(group)
    for reducer in () if order is None else order.alive:
        reducer.recover()


def recover_before_leaving(old: dist.ProcessGroup, new: dist.ProcessGroup) -> None:
    """Before a wrapper goes on over `new`: as `recover`, where it has the ranks of `old`.

    Where it has not, others may be gone, or may have left `old` long before this rank: nobody would pay with it.
    """
    ranks = _ranks_of(old)
    if ranks is not None and ranks == _ranks_of(new):
        with suppress(CommunicationError):  # what ended the old group may be the reason to leave it
            recover(old)


def take_turns(parts: Sequence[Generator[None]]) -> None:
    """Each wrapper does what it has to do part by part, so that the parts come in the same order on every rank.

    What one of them raises ends those of the others that are not through.
    """
    try:
        while parts:
            parts = [part for part in parts if next(part, _OVER) is not _OVER]
    finally:
        for part in parts:
            part.close()


_OVER = object()
