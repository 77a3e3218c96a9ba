"""A rank that has ended is seen by those who wait for it in the store, where no connection tells of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch

import phalanx
from phalanx.comm.failure.processes import began, has_ended, identity
from phalanx.errors import PeerFailure
from tests.cluster import spawn_ranks

SOON_S = 12  # on a busy machine; a fifth of the time limit of the group
LIMIT_S = 60


def test_a_process_has_ended_when_it_is_gone_or_waits_to_be_reaped() -> None:
    here = identity()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        there = {**here, "pid": child.pid, "began": began(child.pid)}
        assert not has_ended(here, here["host"]) and not has_ended(there, here["host"])
        assert has_ended({**there, "began": "1"}, here["host"]), "another process has its number now"
        assert not has_ended({**there, "began": "1"}, "another host")
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(there, here["host"])
    assert has_ended(there, here["host"])


def left_alone(rank: int, world: int) -> tuple[str, tuple[int, ...], float]:
    wrapped = phalanx.DistributedDataParallel(torch.nn.Linear(4, 4))
    if rank == 2:
        os._exit(0)  # before the first backward, in which all agree on what is sent
    started = time.monotonic()
    try:
        wrapped(torch.ones(2, 4)).sum().backward()
    except PeerFailure as error:
        return str(error), tuple(error.ranks), time.monotonic() - started
    return "nothing", (), time.monotonic() - started


def test_a_rank_that_ends_before_an_agreement_is_named_soon() -> None:
    outcomes = spawn_ranks(3, left_alone, pg_timeout_s=LIMIT_S, timeout_s=2 * LIMIT_S)
    assert outcomes[2].value is None, "the fault fired"
    for outcome in outcomes[:2]:
        message, ranks, seconds = outcome.value
        assert ranks == (2,) and "rank 2 died" in message, message
        assert "agreeing on the reduction of gradients" in message and seconds < SOON_S, message


def left_with_values(rank: int, world: int) -> tuple[str, str, float]:
    worker = phalanx.init()
    worker.barrier()
    if rank == 0:
        raise ValueError("the words of rank 0")
    started = time.monotonic()
    try:
        with worker.first_only():
            pass
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def test_who_waits_for_a_value_is_told_whose_fault_it_is() -> None:
    outcomes = spawn_ranks(3, left_with_values, pg_timeout_s=LIMIT_S, timeout_s=2 * LIMIT_S)
    assert outcomes[0].exitcode == 1, "the fault fired"
    for outcome in outcomes[1:]:
        kind, message, seconds = outcome.value
        assert kind == "PeerFailure" and "rank 0" in message and "waiting for a value of rank 0" in message, message
        assert seconds < SOON_S
