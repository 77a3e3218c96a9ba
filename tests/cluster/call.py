"""What travels between the pytest process and a worker. Plain data, no behaviour.

Everything is pickled by value with `pickle`, never with multiprocessing's own pickler, which would
hand tensors over as shared file descriptors: the very leaks that the cluster looks for.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

# Makes a worker write its stacks. A real-time signal: code under test may want the named ones.
STACKS_SIGNAL = signal.SIGRTMIN + 3


@dataclass(frozen=True)
class Call:
    """One function call on one rank. `payload` is the pickled (fn, args, kwargs)."""

    rank: int
    world: int
    payload: bytes
    backend: str | None
    pg_timeout_s: float
    seed: int
    master_port: int
    sys_path: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    allowed_leaks: frozenset[str] = frozenset()
    # The worker serves this one call and exits, as a user's training script would.
    fresh: bool = False


@dataclass(frozen=True)
class StorePort:
    """From rank 0, which hosts the store: where the others find it."""

    port: int


@dataclass(frozen=True)
class StoreAt:
    """To the other ranks, once rank 0 listens."""

    port: int


@dataclass(frozen=True)
class Returned:
    """From a rank whose function returned `payload`, pickled; it holds its group until released."""

    payload: bytes


@dataclass(frozen=True)
class Raised:
    """From a rank whose function, or the set-up before it, raised."""

    text: str


@dataclass(frozen=True)
class Release:
    """To a rank that returned: every rank is done, take the group down and report."""


@dataclass(frozen=True)
class Clean:
    """From a released rank: the group is gone, and this is what the call left behind."""

    leaks: list[str]
