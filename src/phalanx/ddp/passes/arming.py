"""Which backward is reduced, and when it ends.

The rule is torch's: a forward arms, and the first *parameter's* gradient begins. So `torch.autograd.grad`, which
accumulates into no parameter, reduces nothing; and a loss of which we never saw an output (kept as an attribute, inside an
object, a penalty with a backward of its own) is reduced all the same.

    a backward that brings gradient to a parameter          is reduced
    reached an output of a forward that we saw              if that forward was run outside no_sync(); as often as it comes
    reached none                                            if a forward has run whose backward has not come yet
    reached none, but one of another wrapper's              not, if they have parameters in common (`shared.py`)
    reached none, and every forward has had its backward    not: it went around the wrapper, of which listeners hear
    any, after `demand`                                     is: whoever demands it knows better (Lightning, Accelerate)

A `backward()` that reached an output to be reduced and brought gradient to no parameter at all is reduced as well, unless
all parameters are frozen: other ranks may have used some.

What a wrapper goes through, apart from the backward that runs now (`Arming.state`):

    state      the next backward that reaches no output of ours is           changed by
    RESTING    not one of ours, but for outputs into which we cannot look    forward -> ARMED; demand -> DEMANDED
    ARMED      that of the last forward that waits for one                   reduced -> RESTING; demand -> DEMANDED
    DEMANDED   reduced                                                       reduced -> RESTING; forward -> ARMED

Outputs are watched only to *note* the pass: a parameter may be met first inside a nested backward (reentrant
checkpointing), from where the outermost one cannot be reached any more. Must not know of buckets.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from ...optim.engine import (
    BackwardEnd,
    RunningGraph,
    accumulates,
    call_in_enclosing,
    current_backward,
    enclosing_function,
)
from ..structure import Watched

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer

# Forwards that wait for their backward. A loop that evaluates without torch.no_grad() must not make it grow.
_MOST_WAITING = 64
_numbers = count()  # of all forwards, of all wrappers, in the order in which they began


class Forward:
    """One forward of the wrapper. `waits`: a backward of it may still come that we cannot tell from its outputs.

    The rest is what was found out about it when it returned, once; only `waits` changes afterwards.
    """

    __slots__ = ("__weakref__", "elsewhere", "is_opaque", "may_nest", "nodes", "number", "reduces", "waits")

    def __init__(self, reduces: bool) -> None:
        self.number = next(_numbers)
        self.reduces = reduces
        self.waits = True
        self.may_nest = True  # whether its backward may run another backward inside; where nobody has looked, it may
        self.is_opaque = True  # whether its output holds something into which we cannot look
        self.nodes: tuple[int, ...] = ()  # of its outputs, by number: who holds a node keeps its graph
        # Where its backward leaves gradients elsewhere (distributed autograd): makes them `.grad` for a while.
        self.elsewhere: Callable[[Any], AbstractContextManager[None]] | None = None

    def returned(self, watched: Watched) -> None:
        """The forward has returned; a backward inside it may have come already, and another may follow."""
        self.is_opaque, self.nodes = not watched.sees_all, watched.nodes
        self.waits = self.waits or watched.num_tensors > 0 or self.is_opaque


class Ending(BackwardEnd):
    """The end of one pass, and what is known of the pass until then."""

    __slots__ = ("backward", "forward", "has_gradients", "number", "reducer")

    def __init__(self, reducer: Reducer, forward: Forward) -> None:
        # The engine holds it for the length of a pass only, so it may hold the reducer.
        super().__init__(reducer.backward_ended)
        self.reducer = reducer
        self.forward = forward
        self.number = forward.number  # of the first forward that was reached: later ones do not change the order
        self.backward = current_backward()
        self.has_gradients = False  # whether a parameter got gradient before any forward asked for a reduction

    def raised(self) -> None:
        self.reducer.backward_raised(self, accumulates())


class NestedEnding(Ending):
    """Of a nested pass: nothing ends with it, but what it raises ends the pass around it too."""

    __slots__ = ()

    def __call__(self) -> None:
        self._was_called = True


class Armed(enum.Enum):
    """What the next backward is taken for that reaches no output of ours: see the table above."""

    RESTING = enum.auto()
    ARMED = enum.auto()
    DEMANDED = enum.auto()


class Beginning(enum.Enum):
    """What a parameter's gradient is, while no pass is under way: the first of one, not to be reduced, or unexpected."""

    REDUCED = enum.auto()
    LOCAL = enum.auto()
    WENT_AROUND = enum.auto()


class Arming:
    """The forwards of one wrapper that wait for their backward, and the pass that is under way."""

    def __init__(self) -> None:
        self.state = Armed.RESTING
        self._waiting: deque[Forward] = deque(maxlen=_MOST_WAITING)
        # What the backward that runs now is to this wrapper. Weakly: the engine alone holds the end of a pass, and drops it
        # where the pass raises. One that was called may live on in a traceback that the user keeps: see `ended`.
        self._ending: Callable[[], Ending | None] = _none
        # Until that is noted: a parameter was met inside a nested backward, whose outermost one has still to go on.
        self._is_nested = False

    # -- transitions ---------------------------------------------------------------------------

    def forward_began(self, reduces: bool) -> Forward:
        """Armed before the module runs: a backward inside forward is one of ours too."""
        if self.state is Armed.RESTING:
            # Older ones had their chance; only forwards in a row wait for as many backwards.
            self._waiting.clear()
        self.state = Armed.ARMED  # a demand is for a backward that comes at once
        self._is_nested = False
        forward = Forward(reduces)
        self._waiting.append(forward)
        return forward

    def demand(self) -> None:
        """The next backward is reduced, whether or not forwards say so."""
        self.state = Armed.DEMANDED

    def reduced(self) -> None:
        """A backward that is reduced has begun. As torch, which disarms with the first."""
        self.state = Armed.RESTING

    def raised(self) -> None:
        """The backward that ran has raised, and will not be noted any more."""
        self._is_nested = False

    def ended(self) -> None:
        """The backward that ran is over, and what was to be done at its end."""
        self._ending = _none

    def note(self, reducer: Reducer, forward: Forward) -> Ending:
        """A pass has reached an output of `forward`, or one of our parameters."""
        ending = self._ending()
        self._is_nested = False
        if ending is None:
            ending = Ending(reducer, Forward(reduces=True) if self.state is Armed.DEMANDED else forward)
            self._ending = weakref.ref(ending)
            ending.queue()
        elif forward.reduces:
            ending.forward = forward  # one output to be reduced is enough
        return ending

    def _note_outermost(self, reducer: Reducer, forward: Forward) -> None:
        """Note a pass of which no output was seen, from one of its parameters."""
        node = enclosing_function()
        if node is None:
            self.note(reducer, forward)
            return
        # The pass that runs here is a nested one, and ends too early. The one around it goes on to another node.
        self._is_nested = True
        call_in_enclosing(node, partial(self.note, reducer, forward))
        NestedEnding(reducer, forward).queue()

    # -- what is known -------------------------------------------------------------------------

    @property
    def noted(self) -> Ending | None:
        """The outermost pass under way, if it has been noted."""
        return self._ending()

    def awaited(self, graph: RunningGraph | None, params: Collection[int]) -> int | None:
        """The number of the last forward that waits for a backward through `graph`, which is to be reduced.

        `params`: this wrapper's own, by identity. Where nobody knows the graph (None), any forward that waits may be meant.
        """
        if self.state is Armed.RESTING:
            return None
        waiting = [each for each in self._waiting if each.waits]
        if graph is None:
            reached = [each for each in waiting if each.reduces]
        else:
            reached = [each for each in waiting if not graph.numbers.isdisjoint(each.nodes)]
            if not reached:
                # Of a loss that was no output, it is not known which forward it was of: the last, as in `begin`.
                meets = not graph.leaves.isdisjoint(params)
                reached = [each for each in waiting if meets or (graph.nests and each.is_opaque)][-1:]
            reached = [each for each in reached if each.reduces]
        return reached[-1].number if reached else None

    @property
    def may_nest(self) -> bool:
        """Whether the pass under way may run another backward inside, as far as its forward tells."""
        ending = self._ending()
        return ending is None or ending.forward.may_nest

    @property
    def is_owed(self) -> bool:
        """Whether the pass that ends is to be reduced though no gradient has begun it.

        It came before an output that asks for a reduction was reached; or there was none, and other ranks may have some.
        """
        ending = self._ending()
        return ending is not None and ending.forward.reduces and (ending.has_gradients or accumulates())

    # -- the first gradient --------------------------------------------------------------------

    def begin(self, reducer: Reducer) -> Beginning:
        """A parameter has got gradient while no pass is under way: whether a reduction begins with it."""
        ending = self._ending()
        if ending is not None:
            ending.has_gradients = True
            reduces = ending.forward.reduces
        elif self._is_nested:
            # Of the same pass as the first gradient, which has found out that it is not reduced.
            return Beginning.LOCAL
        elif self.state is not Armed.DEMANDED and reducer.sharers.have_noted:
            return Beginning.LOCAL
        else:
            forward = self._meant()
            if forward is None:
                return Beginning.WENT_AROUND
            forward.waits = False
            self._note_outermost(reducer, forward)
            reduces = forward.reduces
        if not reduces:
            return Beginning.LOCAL
        self.reduced()
        return Beginning.REDUCED

    def _meant(self) -> Forward | None:
        """The forward that a backward is taken for which has reached no output."""
        if self.state is Armed.DEMANDED:
            return Forward(reduces=True)
        waiting = [each for each in self._waiting if each.waits and (each.is_opaque or self.state is Armed.ARMED)]
        return waiting[-1] if waiting else None


def _none() -> None:
    """No pass is under way."""
