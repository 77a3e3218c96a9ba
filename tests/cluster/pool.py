"""Pooled ranks: workers that live for the whole pytest run and are replaced when a call goes wrong."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tests.cluster.exchange import PATIENCE, CallRequest, Exchange
from tests.cluster.failure import ClusterFailure
from tests.cluster.leaks import Leak
from tests.cluster.process import RankProcess

MAX_RANKS = 8
# How long the others may take to notice that a rank has failed before they are killed.
GRACE_S = 3.0 * PATIENCE

_workers: list[RankProcess] = []


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = "gloo",
    timeout_s: float = 60,
    pg_timeout_s: float = 30,
    seed: int = 0,
    env: Mapping[str, str] | None = None,
    allow_leaks: Collection[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """`fn(rank, world, *args, **kwargs)` on `n` pooled ranks; the returned values, by rank.

    Each call has a new default process group of `backend` (None: no group, only the environment
    that torchrun would set) and the same seed on every rank. Raises ClusterFailure when a rank
    raises, dies, is not done after `timeout_s`, or leaves something behind (`allow_leaks` names the
    kinds, see `Leak`, not to look for). A call that failed, or was allowed to leak, costs its
    workers: the next one gets new ones.
    """
    if not 1 <= n <= MAX_RANKS:
        raise ValueError(f"run_ranks: n must be 1 to {MAX_RANKS}, got {n}")
    allowed = {Leak(kind) for kind in allow_leaks}
    request = CallRequest(fn, args, kwargs, backend, pg_timeout_s, seed, env or {}, allowed)
    keep = False
    try:
        exchange = Exchange(_workers_for(n), timeout_s, GRACE_S)
        exchange.conduct(request)
        _raise_for(exchange, fn, timeout_s)
        keep = not allowed
    finally:
        if not keep:
            stop_pool()
    return [progress.value for progress in exchange.ranks]


def stop_pool() -> None:
    """End all pooled workers; the next `run_ranks` starts new ones."""
    while _workers:
        _workers.pop().kill()


def _workers_for(n: int) -> list[RankProcess]:
    while len(_workers) < n:
        _workers.append(RankProcess())
    return _workers[:n]


def _raise_for(exchange: Exchange, fn: Callable[..., Any], timeout_s: float) -> None:
    errors = {p.rank: p.error_text or "" for p in exchange.failed}
    lines = [f"rank {p.rank} {p.state.value}: {p.error_text}" for p in exchange.failed]
    for progress in exchange.ranks:
        if progress.leaks:
            errors.setdefault(progress.rank, "\n".join(progress.leaks))
            lines.append(f"rank {progress.rank} left behind: " + "; ".join(progress.leaks))
    if errors:
        title = f"{fn.__qualname__} on {len(exchange.ranks)} ranks with {timeout_s:g} s to finish"
        raise ClusterFailure("\n".join([title, *lines]), errors)


# Before multiprocessing's own exit function, which would wait for the workers to end by themselves.
atexit.register(stop_pool)
