"""The process in which the simulated device lives: forked for the purpose, since a device can be named only once.

All scenarios, or all mistakes, share one such process: starting one costs more than training a scenario.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from phalanx.comm.failure.agreement import StoreAgreement
from phalanx.comm.failure.board import FailureBoard
from tests.cluster import spawn_ranks

from . import futures, group, kernels

_WORLD = 2
# Not rank 0, which has what it broadcasts already and never has to wait for it.
RECEIVER = 1
_SECONDS = 110.0


def install(rank: int = RECEIVER) -> None:
    """Make this process one with a simulated device and a group of it. Cannot be undone."""
    kernels.install()
    futures.put_into_torch()
    group.register()
    # Ranks compare their settings by the store, where nobody else is: the one process stands for all of them.
    StoreAgreement.agree = StoreAgreement.launches = lambda *_, **__: None  # type: ignore[method-assign]
    # And what each of them says of a step that went wrong, for which this one would wait in vain.
    FailureBoard.exchange = lambda board, _, text, wait_s: dict.fromkeys(board.members, text)  # type: ignore[method-assign]
    dist.init_process_group("simccl", rank=rank, world_size=_WORLD, store=dist.HashStore())


def on_device(function: Callable[..., Any], *args: Any, rank: int = RECEIVER) -> Any:
    """What `function(*args)` returns in a fresh process that has the device; both travel by pickle."""
    (outcome,) = spawn_ranks(1, _run, rank, function, args, backend=None, timeout_s=_SECONDS)
    assert outcome.exitcode == 0, outcome.error_text
    return outcome.value


def _run(_: int, world: int, rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    install(rank)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()
