"""The exceptions phalanx raises. Each is also the built-in type that torch users already catch.

    PhalanxError
    ├── ConfigError (ValueError)          an argument that cannot be honoured
    ├── ArgumentTypeError (TypeError)     an argument of the wrong kind
    ├── PlanError (ValueError)            a plan that is malformed or does not fit the model
    ├── MismatchError (RuntimeError)      ranks that disagree: models, plans, steps, shapes
    ├── ReductionError (RuntimeError)     a gradient that cannot be reduced correctly
    ├── CommunicationError (RuntimeError) a collective that failed
    │   ├── PeerFailure                   a rank died or raised; `ranks` names it
    │   └── CollectiveTimeout             a rank stayed silent; `ranks` names it
    ├── StateError (ValueError)           a saved state that is truncated, foreign or mismatched
    ├── CheckpointError (RuntimeError)    a checkpoint that could not be written; earlier ones are untouched
    └── RemoteError (RuntimeError)        a failure on one or several remote workers

A message says who (rank), what (parameter, bucket, step), expected, got, and what to do.
This module imports nothing of phalanx, so that every layer may raise from it.
"""

from __future__ import annotations

from collections.abc import Sequence


class PhalanxError(Exception):
    """The root of everything phalanx raises on purpose."""


class ConfigError(PhalanxError, ValueError):
    """An argument, alone or together with others, that cannot be honoured."""


class ArgumentTypeError(PhalanxError, TypeError):
    """An argument of the wrong kind."""


class PlanError(PhalanxError, ValueError):
    """A plan that is malformed, or that does not fit the parameters it is used with."""


class MismatchError(PhalanxError, RuntimeError):
    """Ranks that should agree and do not. Raised on every rank of the group."""


class ReductionError(PhalanxError, RuntimeError):
    """A gradient that cannot be reduced correctly."""


class CommunicationError(PhalanxError, RuntimeError):
    """A collective that failed. `ranks` holds the ranks held responsible, as far as known."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[CommunicationError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class PeerFailure(CommunicationError):
    """A rank died, or raised and left the group."""


class CollectiveTimeout(CommunicationError, TimeoutError):
    """A rank stayed silent until the group's time limit."""


class StateError(PhalanxError, ValueError):
    """A saved state that is truncated, foreign or does not match; nothing was changed."""


class CheckpointError(PhalanxError, RuntimeError):
    """A checkpoint that could not be written, raised on every rank; those written before are untouched."""


class RemoteError(PhalanxError, RuntimeError):
    """One or several remote workers failed; the message holds each worker's own words."""
