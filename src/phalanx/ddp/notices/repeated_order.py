"""A DistributedSampler whose `set_epoch` is never called: every epoch goes through the samples in the order of the first.

Told by two things together, so that nobody is told without reason: a loader with such a sampler, which shuffles, is in
sight of whoever calls the model, and the inputs an epoch later are those of the first forwards, to the bit. A sampler
that cannot be seen (hidden in an object, or in a library), or samples that are made different at random, are not noticed.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...comm.failure.folding import is_users, users_stacklevel
from .first_inputs import FIRST, FirstInputs

if TYPE_CHECKING:
    from ..module import DistributedDataParallel

_MOST_FRAMES = 64
_MOST_NAMES = 1000  # per frame
_UNSHARED = 3  # the frame, our variable, and the argument by which it is counted


class RepeatedOrder:
    """Looks for a loader at the third forward, and at the inputs one epoch of it later."""

    def __init__(self, ddp: DistributedDataParallel, inputs: FirstInputs) -> None:
        # Weakly: the wrapper holds the inputs, and they hold this.
        self._ddp, self._inputs = weakref.ref(ddp), weakref.ref(inputs)
        self._sampler: weakref.ref[Any] | None = None
        self._epoch = self._period = 0

    def forward_began(self, number: int) -> None:
        """A forward runs whose inputs were looked at; called under the frames of its caller."""
        inputs, ddp = self._inputs(), self._ddp()
        if inputs is None or ddp is None or ddp.collectives.rank:
            return
        if number == FIRST[-1]:
            found = visible_loaders()
            if len(found) == 1:  # of several nobody knows which one feeds the model
                sampler, self._period = found[0].sampler, len(found[0])
                self._sampler, self._epoch = weakref.ref(sampler), sampler.epoch
                # And one more, by which the numbers of a device have arrived.
                inputs.want(range(self._period, self._period + len(FIRST) + 1))
        elif self._sampler is not None and number == self._period + len(FIRST):
            sampler = self._sampler()
            first, later = inputs.numbers(FIRST), inputs.numbers([self._period + each for each in FIRST])
            if sampler is not None and sampler.epoch == self._epoch and first is not None and first == later:
                self._warn(ddp)

    def _warn(self, ddp: DistributedDataParallel) -> None:
        text = (
            f"{ddp.collectives.me}: step {ddp.reducer.step}: the second epoch of {self._period} batches goes through "
            f"the samples in the order of the first: the DistributedSampler has been in epoch {self._epoch} ever since. "
            "Call sampler.set_epoch(epoch) before each loop over the loader, or leave the sampler out and use "
            "worker.loader(DataLoader(…, shuffle=True), model), which counts epochs by itself."
        )
        warnings.warn(text, stacklevel=users_stacklevel())


def visible_loaders() -> list[Any]:
    """The loaders that shuffle by a DistributedSampler, among the callers' variables and what their `self` holds."""
    # Nobody has one who has not imported it, and importing it here would cost everybody.
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return []
    found = {}
    for value in _visible():
        if isinstance(value, data.DataLoader) and isinstance(value.sampler, data.DistributedSampler):
            if value.sampler.shuffle:
                found[id(value.sampler)] = value
    return list(found.values())


def _visible() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        if is_users(frame.f_code.co_filename):
            yield from _variables(frame)
        frame = frame.f_back


def _variables(frame: FrameType) -> list[Any]:
    names = frame.f_locals
    found = [*islice(names.values(), _MOST_NAMES)]
    found += islice(list(getattr(names.get("self"), "__dict__", {}).values()), _MOST_NAMES)
    # Of a function, Python 3.11 keeps this dict with the frame once somebody has asked for it: what the user deletes or
    # replaces later (a model, the logits of this step) would live for as long as the function runs. If anybody else holds
    # the dict, it was there before; of a module it is the module's own.
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(names, dict) and sys.getrefcount(names) == _UNSHARED:
        names.clear()
    return found
