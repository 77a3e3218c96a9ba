"""NaN and infinity named by rank and parameter before they spread (`on_nonfinite`).

Once gradients are averaged, every rank has every rank's NaN, and nobody can say whose it was. So each rank looks at its own
gradients when a bucket is packed, and one element of the tail tells all ranks how many found something:

    raise   every rank raises in this backward, before any gradient is given out
    warn    every rank warns, and goes on
    skip    every rank warns, and drops all gradients of the pass: `.grad` is None, so the optimizer's step changes nothing

It costs one pass over the gradients, and nothing where it is not asked for. An overflow in the sum itself, of gradients that
were finite on each rank, is not looked for. Must not know of optimizers; one that has used a bucket before the pass has
ended could not be stopped, and is refused.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch

from ...comm.failure.folding import users_stacklevel
from ...comm.memory.copies import as_memory
from ...errors import ConfigError, ReductionError
from ..buckets.bucket import Bucket
from ..buckets.dense import DenseBucket
from ..buckets.sparse import SparseBucket
from ..reducer import Listener, Reducer

_EXCHANGE_S = 5.0


class NonFinite(Listener):
    """Watches the gradients of one reducer. `action`: "raise", "warn" or "skip"; the same on every rank."""

    def __init__(self, reducer: Reducer, action: str) -> None:
        self._reducer = weakref.ref(reducer)
        self._action = action
        # Of the pass under way, one or the other by `action`, so that the two are no life cycle: what has been found; or
        # whether it has raised here, on every rank, and the buckets after that one are only waited for, not judged.
        self._found: list[str] = []
        self._has_raised = False
        self.plan_adopted()

    def plan_adopted(self) -> None:
        for bucket in self._owner.buckets:
            bucket.tail.watch = BucketWatch(self, bucket)

    @property
    def _owner(self) -> Reducer:
        reducer = self._reducer()
        assert reducer is not None, "a listener lives with its reducer"
        return reducer

    def pass_began(self, joined: bool) -> None:
        self._has_raised = False
        self._found.clear()
        reducer = self._owner
        if self._action == "skip" and any(listener.uses_means for listener in reducer.listeners):
            raise ConfigError(
                f'{reducer.collectives.me}: on_nonfinite="skip" cannot take back what an optimizer has done during '
                'backward, or keeps in shards. Use on_nonfinite="raise", or step after backward '
                "(overlap_with_ddp=False, no apply_in_backward)."
            )

    def found(self, bucket: Bucket, names: Sequence[str], step: int) -> None:
        """Some rank has sent what is not finite; `names`: the parameters of which this rank has. Every rank is here."""
        if self._has_raised:
            return
        reducer = self._owner
        board = reducer.collectives.board
        said = board.exchange("nonfinite", ", ".join(f"'{name}'" for name in names), _EXCHANGE_S)
        if reducer.current is None:
            # A pass that is given up, as when another wrapper has raised in this backward: it has answered the others, and
            # nobody gets anything of it. Raised here, it would come out of the next forward.
            return
        whose = "; ".join(f"rank {rank}: {listed}" for rank, listed in sorted(said.items()) if listed)
        text = f"step {step}, bucket {bucket.index}: gradients that are NaN or infinite ({whose or 'of a silent rank'})"
        if self._action == "raise":
            self._has_raised = True
            # Where an optimizer steps bucket by bucket it has used those before this one.
            used = any(listener.uses_means for listener in reducer.listeners) and bucket.index > 0
            given = "Buckets before it may have been stepped" if used else "No gradient was given out"
            raise ReductionError(
                f"{board.me}: {text}. {given}. Look at the loss and the inputs of that rank, lower "
                'the learning rate, or pass on_nonfinite="skip" to leave such steps out.'
            )
        self._found.append(text)

    def pass_ended(self) -> None:
        if not self._found:
            return
        reducer, found = self._owner, list(self._found)
        self._found.clear()
        end = "The gradients of this step are dropped on every rank" if self._action == "skip" else "They have spread to all"
        warnings.warn(f"{reducer.collectives.me}: {'; '.join(found)}. {end}.", stacklevel=users_stacklevel())
        if self._action == "skip":
            reducer.strategy.pass_lost()
            for param in reducer.params:
                param.grad = None

    def pass_failed(self) -> None:
        self._found.clear()


class BucketWatch:
    """What one bucket's tail asks about the bucket's gradients (`reducer.tail.Watch`)."""

    def __init__(self, owner: NonFinite, bucket: Bucket) -> None:
        # Both weak: the tail holds this, and the bucket the tail.
        self._owner = weakref.ref(owner)
        self._bucket = weakref.ref(bucket)
        self._names: list[str] = []
        self._flag: torch.Tensor | None = None

    def look(self) -> torch.Tensor | int:
        """1 if what this rank is about to send is not finite. On a device the answer stays there."""
        bucket = self._bucket()
        self._names, self._flag = [], None
        if isinstance(bucket, DenseBucket):
            body = bucket.body
        elif isinstance(bucket, SparseBucket) and bucket.gradient is not None:
            body = bucket.gradient._values()
        else:
            return 0
        self._flag = is_bad(body)
        if body.device.type == "cpu":
            bad = bool(self._flag)
            self._names = bad_names(bucket) if bad else []
            return int(bad)
        return self._flag

    def of_late_part(self, part: Bucket) -> BucketWatch:
        """The same for the bucket of what came late for this one."""
        owner = self._owner()
        assert owner is not None, "a pass is under way"
        return BucketWatch(owner, part)

    def found(self, step: int) -> None:
        """The tail is back, and some rank's bucket was not finite."""
        bucket, owner = self._bucket(), self._owner()
        if bucket is None or owner is None:
            return
        if self._flag is not None and self._flag.device.type != "cpu" and bool(self._flag):
            # What this rank sent has been overwritten; the mean is not finite where any rank's gradient was not.
            self._names = bad_names(bucket)
        owner.found(bucket, self._names, step)


def is_bad(values: torch.Tensor) -> torch.Tensor:
    # A sum is finite only if everything is; wide enough not to overflow by itself. No memory, one pass.
    real = as_memory(values)
    wide = torch.float64 if real.dtype in (torch.float32, torch.float64) else torch.float32
    return ~torch.isfinite(real.sum(dtype=wide))


def bad_names(bucket: Bucket) -> list[str]:
    if isinstance(bucket, DenseBucket):
        return [spec.name for spec, view in zip(bucket.specs, bucket.views, strict=True) if bool(is_bad(view))]
    return bucket.names
