"""What a caller learns when remote workers fail: who, in whose words, and how far each one got.

    RemoteError                 (phalanx.errors)
    └── WorkersFailed           `failures`: one record for every worker that failed
        └── StepFailed          also `step`, `applied`, `failed`, `unknown`: worker names

This module knows nothing of RPC; it turns records into messages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from phalanx.errors import ArgumentTypeError, ConfigError, PhalanxError, RemoteError, StateError


class WorkerFailure(NamedTuple):
    """One worker's failure. Made of plain values, so that it crosses RPC without importing anything.

    `answered` is false when the worker said nothing in time (dead, stalled or unreachable).
    `touched` is true when the worker's parameters may have been partly changed by what raised.
    """

    worker: str
    kind: str
    message: str
    traceback: str = ""
    answered: bool = True
    touched: bool = False

    def __str__(self) -> str:
        kind = f"{self.kind}: " if self.answered else ""
        head = f"{self.worker}: {kind}{self.message}"
        return f"{head}\n{textwrap.indent(self.traceback.rstrip(), '    ')}" if self.traceback else head


class WorkersFailed(RemoteError):
    """One or several workers failed at the same call; `failures` holds a record of each."""

    def __init__(self, message: str, failures: Sequence[WorkerFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of the workers that failed."""
        return tuple(failure.worker for failure in self.failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failures)


class StepFailed(WorkersFailed):
    """A step that did not end well on every owner. Every owner is in exactly one of three places.

    `applied`: answered that the update is done. `failed`: answered that it raised; unless its record
    says `touched`, nothing changed there. `unknown`: no answer; it never begins this step after the
    time limit, and `DistributedOptimizer.applied_on(step)` asks it again once it is back.
    """

    def __init__(
        self,
        message: str,
        failures: Sequence[WorkerFailure] = (),
        step: int = 0,
        applied: Sequence[str] = (),
    ) -> None:
        super().__init__(message, failures)
        self.step = step
        self.applied = tuple(applied)

    @property
    def failed(self) -> tuple[str, ...]:
        """Owners that answered with an error of their own."""
        return tuple(failure.worker for failure in self.failures if failure.answered)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Owners that did not answer."""
        return tuple(failure.worker for failure in self.failures if not failure.answered)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failures, self.step, self.applied)


# What an owner finds wrong with the caller's arguments is raised on the caller as the same type.
_CALLERS_MISTAKES: dict[str, type[PhalanxError]] = {
    kind.__name__: kind for kind in (ConfigError, ArgumentTypeError, StateError)
}


def describe(doing: str, asked: int, failures: Sequence[WorkerFailure]) -> str:
    """One message naming every failing worker, each with its own text and traceback."""
    workers = "worker" if asked == 1 else "workers"
    lines = [f"{doing}: {len(failures)} of {asked} {workers} failed."]
    lines += [textwrap.indent(str(failure), "  ") for failure in failures]
    return "\n".join(lines)


def failure_of(doing: str, asked: int, failures: Sequence[WorkerFailure], remedy: str = "") -> PhalanxError:
    """The error to raise for `failures`, which must not be empty.

    A mistake in the caller's own arguments keeps its type when that is all that went wrong.
    """
    kinds = {failure.kind for failure in failures}
    mistake = _CALLERS_MISTAKES.get(kinds.pop()) if len(kinds) == 1 else None
    if mistake is not None:
        told = "\n".join(f"{failure.worker}: {failure.message}" for failure in failures)
        return mistake(f"{doing}: {told}")
    message = describe(doing, asked, failures)
    return WorkersFailed(f"{message}\n{remedy}" if remedy else message, failures)


def step_failure(step: int, asked: int, failures: Sequence[WorkerFailure], applied: Sequence[str]) -> StepFailed:
    """The error for a step that failed on `failures` and is done on `applied`."""
    error = StepFailed("", failures, step, applied)
    torn = [failure.worker for failure in failures if failure.touched]
    lines = [
        describe(f"step {step}", asked, failures),
        f"applied on: {_names(applied)}; failed on: {_names(error.failed)}; not known on: {_names(error.unknown)}.",
    ]
    if torn:
        lines.append(f"The optimizer raised while updating on {_names(torn)}, perhaps half way through.")
    lines.append("Restore the state from a checkpoint, or go on without the missing update.")
    return StepFailed("\n".join(lines), failures, step, applied)


def _names(workers: Sequence[str]) -> str:
    return ", ".join(workers) if workers else "none"
