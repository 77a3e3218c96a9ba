"""Who hears of a pass: one protocol for everything around the reducer.

Called on every rank in this order: `pass_began`, then per bucket `bucket_full` (not for every bucket),
`bucket_sent`, `bucket_given`; `launches_begin` before the first is sent; `backward_ended` in between; then `pass_ended`,
and when all have heard of that, `pass_closed`; or `pass_failed` at any point.
`plan_adopted` and `plan_resumed` come between two passes. All methods are optional. Listeners are called in the order in
which they were added; what one raises ends the pass. Nobody but the reducer and the strategy changes a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

if TYPE_CHECKING:
    from ..buckets.bucket import Bucket


Arguments = ParamSpec("Arguments")


class Listener:
    """Hears of everything and does nothing. `uses_means`: acts on means before the pass has ended, or keeps them."""

    uses_means: bool = False

    def pass_began(self, joined: bool) -> None:
        """A backward that is reduced has begun; with `joined`, only on other ranks: this one has no input left.

        No place for a collective: of several wrappers in one backward, another may begin first on another rank.
        """

    def launches_begin(self, joined: bool) -> None:
        """The first bucket is about to leave, in its turn among those of all wrappers. May be a collective."""

    def bucket_full(self, bucket: Bucket) -> None:
        """The last gradient of the bucket has arrived."""

    def bucket_sent(self, bucket: Bucket) -> None:
        """The bucket has been packed and launched."""

    def backward_ended(self) -> None:
        """Autograd is done; buckets may still be under way."""

    def bucket_given(self, bucket: Bucket) -> None:
        """The parameters of the bucket have their mean as `.grad`."""

    def pass_ended(self) -> None:
        """Every parameter has its mean, and the plan for the next pass is in force."""

    def pass_closed(self) -> None:
        """Every listener has done what it does at the end of a pass; where backward steps, parameters are whole again."""

    def local_backward_ended(self) -> None:
        """A backward through the wrapper has ended that was not reduced."""

    def went_around(self) -> None:
        """A gradient came in a backward that no forward of the wrapper has armed; it is not reduced. Once per gradient."""

    def pass_failed(self) -> None:
        """The pass was given up. Its gradients are not reduced."""

    def plan_adopted(self) -> None:
        """The buckets have been made anew, by another plan or for another strategy."""

    def plan_resumed(self) -> None:
        """The settled plan of an earlier run is in force, before the first pass of this one. Every rank is here."""


class Listeners:
    """Those of one reducer, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: tuple[Listener, ...] = ()
        # By event, the methods of those who do something then. Most hear of little, and there are a dozen events a step.
        self._hearing: dict[Callable[..., None], list[Callable[..., None]]] = {}

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._all)

    def add(self, *listeners: Listener) -> None:
        """From now on these hear too, after the others."""
        self._set((*self._all, *listeners))

    def remove(self, listener: Listener) -> None:
        """This one hears of nothing more, but for the event that is being told."""
        self._set(tuple(known for known in self._all if known is not listener))

    def _set(self, listeners: tuple[Listener, ...]) -> None:
        self._all, self._hearing = listeners, {}

    def tell(self, event: Callable[Concatenate[Any, Arguments], None], *args: Arguments.args, **_: Arguments.kwargs) -> None:
        """`event` has come about, a method of `Listener`."""
        hearing = self._hearing.get(event)
        if hearing is None:
            name = event.__name__
            hearing = [getattr(known, name) for known in self._all if getattr(type(known), name) is not event]
            self._hearing[event] = hearing
        for hear in hearing:
            hear(*args)
