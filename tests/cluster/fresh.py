"""Fresh ranks: processes that serve one call, for tests in which a rank is killed or exits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.exchange import PATIENCE, CallRequest, Exchange, RankProgress, RankState
from tests.cluster.failure import ClusterFailure
from tests.cluster.leaks import shm_leaks, shm_names
from tests.cluster.process import RankProcess


@dataclass(frozen=True)
class RankOutcome:
    """How one fresh rank ended.

    `exitcode` is 0 for a return, 1 for an exception, else the process's own, negative for a signal.
    `seconds` runs from the call to the rank's return, exception or death. `timed_out` marks a rank
    that the cluster had to kill; its `error_text` holds its stacks.
    """

    rank: int
    exitcode: int
    value: Any
    error_text: str | None
    seconds: float
    timed_out: bool = False


def spawn_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = "gloo",
    timeout_s: float = 60,
    pg_timeout_s: float = 30,
    seed: int = 0,
    env: Mapping[str, str] | None = None,
    check_shm: bool = True,
    **kwargs: Any,
) -> list[RankOutcome]:
    """`fn(rank, world, *args, **kwargs)` on `n` fresh processes; how each ended, by rank.

    Nothing that a rank does raises here, and no process is left. Raises ClusterFailure only for
    files that remain in /dev/shm when all are gone (`check_shm=False` allows them).
    """
    request = CallRequest(fn, args, kwargs, backend, pg_timeout_s, seed, env or {}, fresh=True)
    shm_before = shm_names()
    processes: list[RankProcess] = []
    try:
        while len(processes) < n:
            processes.append(RankProcess())
        exchange = Exchange(processes, timeout_s, grace_s=None)
        exchange.conduct(request)
        outcomes = [_outcome(progress) for progress in exchange.ranks]
    finally:
        for process in processes:
            process.kill()
    if check_shm:
        _raise_for_shm(shm_before, fn)
    return outcomes


def _outcome(progress: RankProgress, exit_s: float = 10.0 * PATIENCE) -> RankOutcome:
    error_text = progress.error_text
    timed_out = progress.state is RankState.OVERRAN
    if progress.process.wait(exit_s) is None:
        timed_out, error_text = True, f"did not exit; its stacks:\n{progress.process.stacks()}"
        progress.process.kill()
    exitcode = progress.process.exitcode
    assert exitcode is not None, "a process that was waited for or killed has ended"
    return RankOutcome(progress.rank, exitcode, progress.value, error_text, progress.seconds, timed_out)


def _raise_for_shm(before: Collection[str], fn: Callable[..., Any], grace_s: float = 1.0) -> None:
    deadline = time.monotonic() + grace_s
    while leaks := shm_leaks(before):
        if time.monotonic() > deadline:
            raise ClusterFailure("\n".join([f"{fn.__qualname__}: all ranks ended and left", *leaks]), {})
        time.sleep(0.05)
