"""Deliberate mistakes of order, each put into a scenario that is in order without it: the ledger must notice every one.

A mistake is a context in which some line is missing, too early, too late, or on another stream. Its own counter says that
it was made: a mistake that no longer happens, because the code around it moved, fails its test as one that goes unnoticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from phalanx import GradBucket
from phalanx.comm import hooks
from phalanx.comm.torch_backend import TorchCollectives
from phalanx.ddp.buckets.dense import DenseBucket
from phalanx.ddp.passes.streams import GradientStreams
from phalanx.ddp.reducer.strategy import AllReduce, Strategy

from . import futures
from .clocks import place
from .group import SimWork
from .mixtures import MIXTURES
from .scenarios import SCENARIOS, Finding, hooked, observe
from .streams import Stream, current_stream

Fired = list[str]
Seed = Callable[[Fired], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mistake:
    """What to do wrong, in which scenario; `make` in place of a scenario's own training."""

    scenario: str
    seed: Seed
    make: Callable[[Fired], Any] | None = None


@contextlib.contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    with mock.patch.object(owner, name, make(original)):
        yield


def _no_wait(*called_from: str) -> Seed:
    """The collectives waited for from these lines of the package are not waited for."""

    def seed(fired: Fired) -> Any:
        def make(wait: Any) -> Any:
            def skipped(work: SimWork, timeout: Any = None) -> bool:
                if any(part in place(deepest=12) for part in called_from):
                    fired.append("wait")
                    return True
                return bool(wait(work, timeout))

            return skipped

        return _replaced(SimWork, "wait", make)

    return seed


def _on_other_stream(owner: Any, name: str) -> Seed:
    """The call launches its work on a stream that nobody joined to the caller's."""

    def seed(fired: Fired) -> Any:
        def make(function: Any) -> Any:
            def moved(*args: Any, **kwargs: Any) -> Any:
                fired.append(name)
                with Stream(name="a stream of its own"):
                    return function(*args, **kwargs)

            return moved

        return _replaced(owner, name, make)

    return seed


def _touched_after(owner: Any, name: str, pick: Callable[..., torch.Tensor]) -> Seed:
    """What the call has just launched is written to once more, before anybody waited."""

    def seed(fired: Fired) -> Any:
        def make(function: Any) -> Any:
            def late(*args: Any, **kwargs: Any) -> Any:
                returned = function(*args, **kwargs)
                fired.append(name)
                with torch.no_grad():
                    pick(*args).mul_(1)
                return returned

            return late

        return _replaced(owner, name, make)

    return seed


def _read_before_wait(fired: Fired) -> Any:
    def make(wait: Any) -> Any:
        def early(work: SimWork, timeout: Any = None) -> bool:
            if work.result():
                fired.append("read")
                work.result()[0].sum()
            return bool(wait(work, timeout))

        return early

    return _replaced(SimWork, "wait", make)


def _waited_on_other_stream(fired: Fired) -> Any:
    def make(wait: Any) -> Any:
        def elsewhere(work: SimWork, timeout: Any = None) -> bool:
            fired.append("wait")
            with Stream(name="a stream of its own"):
                return bool(wait(work))

        return elsewhere

    return _replaced(SimWork, "wait", make)


def _future_not_joined(fired: Fired) -> Any:
    """A hook's future is looked at by `value`, which orders nothing."""

    def make(order: Any) -> Any:
        def skipped(future: Any, stream: Stream) -> None:
            if stream.lane.name.startswith("a callback"):
                order(future, stream)
            else:
                fired.append("future")

        return skipped

    return _replaced(futures, "order_after", make)


def _callback_not_joined(fired: Fired) -> Any:
    """A callback's stream begins before what its future stands for."""

    def make(order: Any) -> Any:
        def skipped(future: Any, stream: Stream) -> None:
            if stream.lane.name.startswith("a callback"):
                fired.append("callback")
            else:
                order(future, stream)

        return skipped

    return _replaced(futures, "order_after", make)


# ---- hooks that are wrong themselves


def _completed_early(state: Fired, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Launches, and calls itself complete without the collective."""
    state.append("hook")
    buffer = bucket.buffer()
    torch.distributed.all_reduce(buffer, async_op=True)
    future: Any = torch.futures.Future(devices=[buffer.device])
    future.set_result(buffer)
    return future


def _on_own_stream(state: Fired, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Scales on a stream of its own, which never heard of the one that packed the bucket."""
    state.append("hook")
    with Stream(name="the hook's stream"):
        bucket.buffer().mul_(0.5)
    return hooks.noop_hook(None, bucket)


def _lends_scratch(state: Fired, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A side stream, in order, reads memory of the current one that is gone when the hook returns."""
    state.append("hook")
    scratch = bucket.buffer() * 0.5
    side = Stream(name="the hook's stream")
    side.wait_stream(current_stream())
    with side:
        scratch.sum()
    return hooks.noop_hook(None, bucket)


def _forgets_to_come_back(state: Fired, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The side stream waits for the caller's, the caller's never for the side stream."""
    state.append("hook")
    side = Stream(name="the hook's stream")
    side.wait_stream(current_stream())
    with side:
        bucket.buffer().mul_(0.5)
    return hooks.noop_hook(None, bucket)


def _nothing(fired: Fired) -> Any:
    return contextlib.nullcontext()


def _bad_hook(hook: Any) -> Callable[[Fired], Any]:
    return lambda fired: hooked(hook, lambda: fired)


def _left_out(owner: Any, name: str, instead: Callable[..., Any]) -> Seed:
    """The call does nothing."""

    def seed(fired: Fired) -> Any:
        def make(_: Any) -> Any:
            def nothing(*args: Any, **kwargs: Any) -> Any:
                fired.append(name)
                return instead()

            return nothing

        return _replaced(owner, name, make)

    return seed


_SEVERAL = "gradients on several streams"

MISTAKES: dict[str, Mistake] = {
    "bucket launched before its gradients on other streams": Mistake(
        _SEVERAL, _left_out(GradientStreams, "launching", contextlib.nullcontext)
    ),
    "static bucket launched before its gradients on other streams": Mistake(
        f"{_SEVERAL}, static", _left_out(GradientStreams, "launching", contextlib.nullcontext)
    ),
    "given out without naming memory to the allocator": Mistake(
        _SEVERAL, _left_out(GradientStreams, "hold", lambda: None)
    ),
    "no wait for a bucket": Mistake("ddp plain", _no_wait("ddp/reducer/")),
    "no wait for a bucket, views": Mistake("ddp views", _no_wait("ddp/reducer/")),
    "no wait for a bucket, weights": Mistake("ddp weights", _no_wait("ddp/reducer/")),
    "no wait for a bucket, mixed precision": Mistake("ddp mixed precision", _no_wait("ddp/reducer/")),
    "no wait for a bucket, no_sync": Mistake("ddp no_sync", _no_wait("ddp/reducer/")),
    "no wait for buffers": Mistake("ddp plain", _no_wait("comm/replicate.py")),
    "no wait for the tail beside a hook": Mistake("hook allreduce", _no_wait("ddp/reducer/")),
    "no wait for scattered gradients": Mistake("zero overlapped", _no_wait("ddp/reducer/")),
    "no wait for gathered parameters": Mistake("zero alone", _no_wait("zero/partition/shard.py")),
    "no wait for gathered parameters, overlapped": Mistake(
        "zero overlapped, without buffers", _no_wait("zero/partition/shard.py")
    ),
    "no wait for whole parameters": Mistake(
        "zero alone, by parameter, without buffers", _no_wait("zero/partition/parameter.py")
    ),
    "no wait for the norm": Mistake("zero overlapped, later, clipped", _no_wait("zero/clipping.py")),
    "no wait for left factors": Mistake("hook powersgd", _no_wait("comm/hooks/compress/round.py")),
    "all-reduce launched elsewhere": Mistake("ddp plain", _on_other_stream(TorchCollectives, "all_reduce")),
    "reduce-scatter launched elsewhere": Mistake("zero overlapped", _on_other_stream(TorchCollectives, "reduce_scatter")),
    "all-gather launched elsewhere": Mistake("zero alone", _on_other_stream(TorchCollectives, "all_gather")),
    "broadcast launched elsewhere": Mistake(
        "zero alone, by parameter, without buffers", _on_other_stream(TorchCollectives, "broadcast")
    ),
    "packed elsewhere": Mistake("ddp plain", _on_other_stream(DenseBucket, "take")),
    "given out elsewhere": Mistake("ddp plain", _on_other_stream(Strategy, "give")),
    "gradients touched after launch": Mistake(
        "ddp plain", _touched_after(AllReduce, "launch", lambda _, bucket: bucket.body)
    ),
    "tail touched after launch": Mistake(
        "ddp plain", _touched_after(AllReduce, "launch", lambda _, bucket: bucket.tail_data)
    ),
    "gathered parameters touched after launch": Mistake(
        "zero alone", _touched_after(TorchCollectives, "all_gather", lambda _, output, *rest: output)
    ),
    "scattered gradients touched after launch": Mistake(
        "zero overlapped", _touched_after(TorchCollectives, "reduce_scatter", lambda _, output, *rest: output)
    ),
    "result read before the wait": Mistake("ddp plain", _read_before_wait),
    "waited for on another stream": Mistake("ddp plain", _waited_on_other_stream),
    "waited for on another stream, ZeRO": Mistake("zero alone", _waited_on_other_stream),
    "callback not ordered after its collective": Mistake("hook int8", _callback_not_joined),
    "hook complete before its collective": Mistake("hook noop", _nothing, _bad_hook(_completed_early)),
    "hook on a stream of its own": Mistake("hook noop", _nothing, _bad_hook(_on_own_stream)),
    "hook that lends freed memory": Mistake("hook noop", _nothing, _bad_hook(_lends_scratch)),
    "hook that does not come back": Mistake("hook noop", _nothing, _bad_hook(_forgets_to_come_back)),
}
# Once hooks' futures are waited for: without that wait there must be races again.
FUTURE_MISTAKE = Mistake("hook fp16", _future_not_joined)


@dataclass(frozen=True)
class Verdict:
    """How often a mistake happened, and the races that are there because of it."""

    num_fired: int
    new_races: list[str]
    error: str | None


_ALL = {**SCENARIOS, **MIXTURES}


def judge(names: list[str]) -> dict[str, Verdict]:
    """Each mistake beside the same scenario without it."""
    clean: dict[str, Finding] = {}
    found = {}
    for name in names:
        mistake = MISTAKES.get(name, FUTURE_MISTAKE)
        if mistake.scenario not in clean:
            clean[mistake.scenario] = observe(mistake.scenario, _ALL[mistake.scenario])
        fired: Fired = []
        with mistake.seed(fired):
            make = _ALL[mistake.scenario] if mistake.make is None else (lambda made=mistake.make, f=fired: made(f))
            wrong = observe(mistake.scenario, make)
        new = sorted(set(wrong.races) - set(clean[mistake.scenario].races))
        found[name] = Verdict(len(fired), new[:5], wrong.error)
    return found
