"""How a packed bucket becomes a mean: by all-reduce, or by what a registered hook does.

The reducer decides when; a `Strategy` decides how. `start` launches, `finish` waits; between the two the bucket's
body belongs to the transport. To reduce in another way (quantise, say), write another `Strategy` and give it to the reducer.
One that leaves something else than whole means in `.grad` has a `Listener` beside it, which takes them: see `zero/overlap/`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...comm.bucket import GradBucket
from ...comm.collectives import Collectives
from ...comm.hooks import HookState, hook_future, hook_result, launch_pending
from ...comm.hooks.announced import announcing
from ...comm.sparse import SparseSum
from ..buckets.bucket import Bucket, Scale
from ..buckets.dense import DenseBucket
from ..buckets.sparse import SparseBucket

_ALIGNED_ELEMENTS = 64
_KNOWN = ("phalanx.", "torch.")
_SIMPLE = (bool, int, float, str, torch.dtype)

Hook = Callable[[Any, GradBucket], torch.futures.Future[Any]]


@dataclass(frozen=True, slots=True)
class Question:
    """What ranks have to agree on, and why this rank asks. `more`: what `words` hold beside the strategy's own."""

    words: Mapping[str, str]
    why: str
    more: Mapping[str, str]


class Strategy(abc.ABC):
    """A way to reduce buckets. `tail_rides`: the tail may lie behind the body in the same collective."""

    tail_rides: bool = True
    # How many buckets may be under way before the oldest is given out in the midst of backward; None: none is.
    lag: int | None = None
    # Whether a large gradient may go into the body as soon as it arrives: not where buckets share memory.
    packs_on_arrival: bool = True
    # Whether what is given out early is used at once, so that a late part could not be added to it any more.
    gives_for_good: bool = False
    may_narrow: bool = False  # whether it may send gradients in 16 bits, which large weights do not fit
    name: str | None = None  # of a registered hook

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._agreed: tuple[Collectives, Mapping[str, str]] | None = None

    def in_words(self) -> dict[str, str]:
        """What must be the same on all ranks, or their collectives would not fit together."""
        return {"reduction": type(self).__name__}

    def question(self, more: Mapping[str, str]) -> Question | None:
        """What a pass that begins has to compare before it launches anything: how it is reduced, if that has changed.

        Each rank registers hooks by itself. `more` is compared as well: what acts on the means. Another object means that it
        has changed.
        """
        # By identity: this is asked in every pass, and there may be an entry per parameter.
        if self._agreed is not None and self._agreed[0] is self.collectives and self._agreed[1] is more:
            return None
        words = {**self.in_words(), **more}
        return Question(words, self._why(words), more)

    def agree(self, question: Question) -> None:
        """Compare what `question` asked for. Every rank calls it."""
        self.collectives.agree("the reduction of gradients", question.words, question.why)
        self._agreed = self.collectives, question.more

    def _why(self, words: Mapping[str, str]) -> str:
        """Why this rank asks for an agreement, for the case that it asks alone."""
        return f"now: {', '.join([*words.values()][:3])}"

    def pass_begins(self) -> None:  # noqa: B027 (most keep nothing from one pass to the next)
        """A pass begins: `pass_over` or `pass_lost` follows."""

    def pass_over(self) -> None:  # noqa: B027 (most have nothing that could be changed from outside)
        """A pass has ended, and all its collectives; what is changed until the next one, a user has changed."""

    def pass_lost(self) -> None:
        """A pass has ended, and nobody uses its means: it failed, or was skipped."""
        self.pass_over()

    @property
    @abc.abstractmethod
    def pack_scale(self) -> float:
        """What every gradient is multiplied with on its way into the body."""

    @property
    def transport_scale(self) -> float:
        """What the transport multiplies the sum of a riding tail with."""
        return 1.0

    def allocate(self, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for bucket `index`: zeroed, flat, of at least `numel` elements."""
        return self.collectives.allocate(numel, dtype, device)

    def allocate_late(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As `allocate`, for what came late for a bucket that is back."""
        return self.collectives.allocate(numel, dtype, device)

    # -- the way of a bucket -------------------------------------------------------------------

    def start(self, bucket: Bucket) -> None:
        """Launch a packed bucket; a tail that cannot ride along follows it."""
        if isinstance(bucket, SparseBucket):
            self._launch_sparse(bucket)
        else:
            assert isinstance(bucket, DenseBucket), "there are two kinds of buckets"
            self.launch(bucket)
        if not bucket.tail_rides:
            bucket.tail_work = self.collectives.all_reduce(bucket.tail_data)

    @abc.abstractmethod
    def launch(self, bucket: DenseBucket) -> None:
        """Start the reduction of a dense bucket."""

    def settle(self, bucket: Bucket, where: str) -> None:
        """Once everything is launched: what a sparse sum could not say in one collective goes in a second."""
        if isinstance(bucket, SparseBucket) and bucket.rows is not None and bucket.work is not None:
            bucket.work = bucket.rows.settle(bucket.work, lambda work: self.collectives.wait(work, where))

    def finish(self, bucket: Bucket, where: str) -> None:
        """Return when the mean, still to be divided by uneven weights, and the tail are there."""
        if isinstance(bucket, SparseBucket):
            self._wait_sparse(bucket, where)
        else:
            assert isinstance(bucket, DenseBucket), "there are two kinds of buckets"
            self.wait(bucket, where)
        if bucket.tail_work is not None:
            self.collectives.wait(bucket.tail_work, where)

    @abc.abstractmethod
    def wait(self, bucket: DenseBucket, where: str) -> None:
        """Return when the body holds the mean."""

    def scale_mean(self, bucket: Bucket, factor: Scale) -> None:
        """Multiply the mean that has come back."""
        bucket.scale_mean(factor)

    def keep(self, bucket: DenseBucket) -> None:  # noqa: B027 (most buckets keep their memory)
        """The bucket is back and will be given out later than usual, when gradient can come late no more."""

    def give(self, bucket: Bucket, wanted: Sequence[int] | None) -> None:
        """Make the mean the gradients of the parameters in `wanted` (None for all)."""
        bucket.give(wanted)

    def join_late(self, bucket: Bucket, late: Bucket) -> None:
        """Add the mean of what came late, a bucket of the same slots, to the mean of what came first."""
        bucket.add(late)

    # -- sparse gradients ----------------------------------------------------------------------

    @property
    def sparse_scale(self) -> float:
        """What a sparse gradient is multiplied with before it is launched."""
        return 1.0 / self.collectives.world

    def _launch_sparse(self, bucket: SparseBucket) -> None:
        grad = bucket.gradient
        assert grad is not None, "a bucket is packed before it is launched"
        facts = _riding_tail(bucket)
        if bucket.rows is None:
            bucket.rows = SparseSum(self.collectives, grad.shape, grad.dtype, grad.device, facts.numel())
        bucket.work = bucket.rows.start(grad, facts, bucket.scale, bucket.is_last)

    def _wait_sparse(self, bucket: SparseBucket, where: str) -> None:
        assert bucket.work is not None and bucket.rows is not None, "a bucket is launched before it is waited for"
        wait = lambda work: self.collectives.wait(work, where)  # noqa: E731
        bucket.gradient = bucket.rows.finish(bucket.work, wait, _riding_tail(bucket))


class Mean(Strategy):
    """The mean by a collective that adds, with the division where it costs least: in the transport, or while packing."""

    @property
    def pack_scale(self) -> float:
        return 1.0 if self.collectives.fuses_scale else 1.0 / self.collectives.world

    @property
    def transport_scale(self) -> float:
        return 1.0 / self.collectives.world if self.collectives.fuses_scale else 1.0

    def wait(self, bucket: DenseBucket, where: str) -> None:
        assert bucket.work is not None, "a bucket is launched before it is waited for"
        self.collectives.wait(bucket.work, where)


class AllReduce(Mean):
    """The mean by one all-reduce per bucket, tail included."""

    def allocate(self, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Rounded up so that each rank's share starts on a cache line: transports move aligned memory faster."""
        unit = _ALIGNED_ELEMENTS * self.collectives.world
        return self.collectives.allocate(-(-numel // unit) * unit, dtype, device)

    def launch(self, bucket: DenseBucket) -> None:
        bucket.work = self.collectives.all_reduce(bucket.flat, self.transport_scale, bucket.is_last)


class HookStrategy(Strategy):
    """The mean as a user's communication hook makes it; the hook sees gradients only, unscaled.

    A hook that is not linear sees a late part as a bucket of its own, of the same index and names.
    """

    tail_rides = False
    may_narrow = True

    def __init__(self, collectives: Collectives, state: object, hook: Hook) -> None:
        super().__init__(collectives)
        self.state = state
        self.hook = hook
        self.name = getattr(hook, "__qualname__", type(hook).__name__)
        self._is_known = str(getattr(hook, "__module__", "")).startswith(_KNOWN)
        # What the state was set to when the last pass was over, or when it began if it was lost.
        self._left: dict[str, Any] | None = None

    def in_words(self) -> dict[str, str]:
        # Of hooks and states that users wrote nothing is known: a rank may log, or keep numbers of its own.
        words = {"reduction": "by a hook", "hook": str(self.name) if self._is_known else "a user's own"}
        return words | {f"{name} of the hook's state": str(value) for name, value in self._settings().items()}

    def _settings(self) -> dict[str, Any]:
        """What the hook's state is set to now, as far as it is known to mean the same on all ranks."""
        if self.state is None or not type(self.state).__module__.startswith(_KNOWN):
            return {}
        if isinstance(self.state, HookState):
            # Not what it counts for its own process: one who comes to others has counted nothing yet.
            held = {**self.state.config(), "iter": self.state.iter}
        else:
            # Torch's states have slots; a process group has no attributes to look at.
            slots = getattr(type(self.state), "__slots__", ())
            held = {**getattr(self.state, "__dict__", {}), **{name: getattr(self.state, name, None) for name in slots}}
        return {name: value for name, value in held.items() if isinstance(value, _SIMPLE)}

    def question(self, more: Mapping[str, str]) -> Question | None:
        # Set or loaded since the last pass, perhaps on this rank alone: it decides which collectives the hook makes.
        if self._left is not None and self._left != self._settings():
            self._agreed = None
        return super().question(more)

    def _why(self, words: Mapping[str, str]) -> str:
        before, now = self._left or {}, self._settings()
        changed = [
            f"{name} of the hook's state from {before[name]} to {value}"
            for name, value in now.items()
            if before.get(name, value) != value
        ]
        return f"changed here: {'; '.join(changed[:3])}" if changed else super()._why(words)

    def pass_begins(self) -> None:
        self.collectives.take_failure()  # of what was started before it
        if isinstance(self.state, HookState):
            self.state.begin_step()
            self._left = self._settings()

    def pass_over(self) -> None:
        if isinstance(self.state, HookState):
            self.state.keep_step()
        self._left = self._settings()

    def pass_lost(self) -> None:
        if isinstance(self.state, HookState):
            # Gradients that nobody wanted are no loss to make good, and what was owed before them still is. With that it
            # is what it was when the pass began, but for what a user has changed since: `_left` stays.
            self.state.give_up_step()
        else:
            self.pass_over()

    @property
    def pack_scale(self) -> float:
        return 1.0

    @property
    def sparse_scale(self) -> float:
        return 1.0

    def launch(self, bucket: DenseBucket) -> None:
        if bucket.grad_bucket is None:
            bucket.grad_bucket = _shown(bucket, bucket.body, bucket.views)
        else:
            bucket.grad_bucket.reset()
        self._call(bucket, bucket.grad_bucket)

    def _launch_sparse(self, bucket: SparseBucket) -> None:
        gradient = bucket.multiply()
        bucket.grad_bucket = _shown(bucket, gradient, [gradient])
        self._call(bucket, bucket.grad_bucket)

    def _call(self, bucket: Bucket, seen: GradBucket) -> None:
        run = partial(self.hook, self.state, seen)
        bucket.future = hook_future(run() if self._is_known else announcing(self.collectives, run), seen)

    def wait(self, bucket: DenseBucket, where: str) -> None:
        result = self._result(bucket, where)
        if result.data_ptr() != bucket.body.data_ptr():
            bucket.body.copy_(result)

    def _wait_sparse(self, bucket: SparseBucket, where: str) -> None:
        bucket.gradient = self._result(bucket, where)

    def _result(self, bucket: Bucket, where: str) -> torch.Tensor:
        assert bucket.future is not None and bucket.grad_bucket is not None, "launched before waited for"
        launch_pending(bucket.future)
        value = self.collectives.wait_future(bucket.future, f"{where}, hook {self.name}")
        # A callback that does not ask for its future's value never sees that the collective has failed, and returns a tensor
        # that is no mean.
        failed = self.collectives.take_failure()
        if failed is not None:
            raise failed
        return hook_result(value, bucket.grad_bucket)


def _riding_tail(bucket: Bucket) -> torch.Tensor:
    return bucket.tail_data if bucket.tail_rides else bucket.tail_data[:0]


def _shown(bucket: Bucket, buffer: torch.Tensor, gradients: Sequence[torch.Tensor]) -> GradBucket:
    """The bucket as a hook sees it."""
    return GradBucket(
        index=bucket.index,
        buffer=buffer,
        gradients=gradients,
        parameters=bucket.params,
        is_last=bucket.is_last_dense,
        names=bucket.names,
    )
