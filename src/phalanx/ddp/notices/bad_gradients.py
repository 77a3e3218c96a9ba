"""NaN and infinity that have reached the parameters: one warning on rank 0, naming the rank where it began.

`on_nonfinite` looks at every element of every gradient, and is asked for. This is what is there without asking: a glance
at one element per parameter, when a bucket is packed, on the CPU.

    a glance finds something bad, the parameters are sound    this rank leaves a note of it in the group's store
    it does, and the parameters are bad as well               a step was made by it: rank 0 reads the notes and warns

    state      meaning                                               next
    GLANCING   the parameters are sound, as far as was seen          a bad one was seen -> SPREAD
    SPREAD     one is bad, which this pass was begun with            the pass has ended -> OVER, with a warning on rank 0
    OVER       it has been said, and nobody glances any more         for good

Whoever skips such steps (a GradScaler, which provokes infinity and lowers its scale; a script that looks by itself) keeps
the parameters sound, and hears nothing. Bad gradients of a few elements are seen a step later, when they are everywhere,
and then nobody can say whose they were. Must not change what is sent.
"""

from __future__ import annotations

import cmath
import contextlib
import enum
import json
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...comm.failure.folding import users_stacklevel
from ..buckets.dense import DenseBucket
from ..features.nonfinite import bad_names, is_bad
from ..passes.listener import Listener

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer

_MOST_PLACES = 64  # per bucket
_MOST_NAMES = 3


class Glancing(enum.Enum):
    """Whether there is anything left to look for: see the table above."""

    GLANCING = enum.auto()
    SPREAD = enum.auto()
    OVER = enum.auto()


class BadGradients(Listener):
    """Glances at the gradients of one reducer until there is something to say."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)
        self._since: int | None = None  # the first of the steps in a row whose gradients were bad here
        self._last = -1  # and the latest
        self._had_sound_step = False
        self.state = Glancing.GLANCING
        self._bad_param = ""  # from SPREAD on: a parameter that is bad itself
        self.plan_adopted()

    @property
    def _owner(self) -> Reducer:
        reducer = self._reducer()
        assert reducer is not None, "a listener lives with its reducer"
        return reducer

    def plan_adopted(self) -> None:
        for bucket in self._owner.buckets:
            # On a device a look would have to wait for it, and where 16 bits are sent, infinity is all in a day's work.
            if isinstance(bucket, DenseBucket) and bucket.device.type == "cpu" and bucket.dtype is not torch.float16:
                bucket.tail.watch = None if self.state is Glancing.OVER else Glance(self, bucket)

    def seen(self, bucket: DenseBucket) -> None:
        """Of what this rank is about to send, something is not finite."""
        step, names = self._owner.step, bad_names(bucket)
        if not names:
            return  # finite numbers whose sum is not
        bad_params = [
            spec.name for spec, param in zip(bucket.specs, bucket.params, strict=True) if bool(is_bad(param.detach()))
        ]
        if bad_params:
            self.state, self._bad_param = Glancing.SPREAD, bad_params[0]
            return
        if self._since is None or self._last < step - 1:
            self._since = step
            self._post({"since": step, "names": names})
        self._last = step

    def pass_ended(self) -> None:
        if self.state is Glancing.SPREAD:
            self.state = Glancing.OVER
            self.plan_adopted()
            if self._owner.collectives.rank == 0:
                self._warn(self._bad_param)
        self._had_sound_step |= self._last < self._owner.step - 1

    # -- notes -----------------------------------------------------------------------------------

    def _post(self, note: dict[str, Any]) -> None:
        reducer = self._owner
        store = reducer.collectives.board.store_for("bad gradients")
        # A store that is gone is for others to notice.
        with contextlib.suppress(RuntimeError, OSError):
            store.set(f"{reducer.number}/{reducer.collectives.rank}", json.dumps(note))

    def _notes(self) -> dict[int, dict[str, Any]]:
        reducer = self._owner
        store = reducer.collectives.board.store_for("bad gradients")
        found = {}
        with contextlib.suppress(RuntimeError, OSError):
            for rank in range(reducer.collectives.world):
                if store.check([f"{reducer.number}/{rank}"]):
                    found[rank] = json.loads(store.get(f"{reducer.number}/{rank}"))
        return found

    # -- in words --------------------------------------------------------------------------------

    def _warn(self, param: str) -> None:
        now = self._owner.step - 1
        # The steps in a row that were bad here began with the cause, if it was here, else one later.
        began = now if self._since is None or self._last < now - 1 else self._since
        numbers = self._owner.collectives.ranks.numbers
        notes = {numbers[rank]: note for rank, note in self._notes().items() if began - 1 <= note["since"] <= began}
        first = min((note["since"] for note in notes.values()), default=None)
        whose = "; ".join(
            f"rank {rank}: {_listed(note['names'])}" for rank, note in sorted(notes.items()) if note["since"] == first
        )
        if first is not None:
            cause = f"gradients of step {first} were ({whose})"
        elif self._had_sound_step:
            cause = "no rank's gradients were seen to be before: too large a step, or a few elements of some rank"
        else:
            cause = "they were before the first step: look at how they are initialised or loaded"
        text = (
            f"{self._owner.collectives.me}: step {now}: parameter '{param}' is NaN or infinite; {cause}. Look at the loss "
            'and the inputs there, or lower the learning rate. on_nonfinite="raise" stops at the first such gradient, '
            '"skip" leaves them out.'
        )
        warnings.warn(text, stacklevel=users_stacklevel())


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(f"'{name}'" for name in names[:_MOST_NAMES]) + more


class Glance:
    """What one bucket's tail asks about the bucket's gradients (`buckets.tail.Watch`). Never says anything in the tail."""

    def __init__(self, owner: BadGradients, bucket: DenseBucket) -> None:
        # Both weak: the tail holds this, and the bucket the tail.
        self._owner = weakref.ref(owner)
        self._bucket = weakref.ref(bucket)
        slots = bucket.slots[:: max(1, len(bucket.slots) // _MOST_PLACES)]
        places = [slot.offset + slot.numel // 2 for slot in slots if slot.numel]
        self._places = torch.tensor(places, device="cpu") if places else None

    def look(self) -> int:
        bucket, owner = self._bucket(), self._owner()
        if bucket is not None and owner is not None and self._places is not None:
            # As Python's numbers: of so few, two more operations would take longer.
            if not cmath.isfinite(sum(bucket.body.index_select(0, self._places).tolist())):
                owner.seen(bucket)
        return 0

    def found(self, step: int) -> None:
        """Never: nobody is told in the tail."""

    def of_late_part(self, part: Any) -> Glance:
        """The same for what came late for the bucket."""
        owner = self._owner()
        assert owner is not None, "a pass is under way"
        return Glance(owner, part)
