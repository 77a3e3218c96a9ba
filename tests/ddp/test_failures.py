"""A rank that dies, raises or stalls: every other rank hears of it soon, by name."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import CollectiveTimeout, PeerFailure
from tests.cluster import run_ranks, spawn_ranks
from tests.ddp.zoo import batch, make

STALL_LIMIT_S = 2
SOON_S = 10  # on a busy machine; a third of the time limit of the group


def _step(wrapped: nn.Module, step: int, rank: int) -> None:
    x, y = batch(step, rank)
    nn.functional.mse_loss(wrapped(x), y).backward()


def survive(rank: int, world: int, how: str) -> tuple[str, str, tuple[int, ...], float]:
    wrapped = phalanx.DistributedDataParallel(make("gpt"), bucket_cap_mb=0.001)
    for step in range(3):
        _step(wrapped, step, rank)
    started = time.monotonic()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "killed in backward":
            hook = wrapped.module.embed.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            _step(wrapped, 3, rank)
            hook.remove()
        elif how == "raised in forward":
            wrapped.module.register_forward_pre_hook(_explode)
            _step(wrapped, 3, rank)
        elif how == "stalled":
            time.sleep(4 * STALL_LIMIT_S)
            os._exit(7)  # nobody is left to step with
    try:
        _step(wrapped, 3, rank)
        _step(wrapped, 4, rank)
    except phalanx.PhalanxError as error:
        ranks = getattr(error, "ranks", ())
        return type(error).__name__, str(error), ranks, time.monotonic() - started
    return "none", "", (), time.monotonic() - started


def _explode(module: nn.Module, inputs: object) -> None:
    raise ZeroDivisionError("the data of rank 1 is broken")


@pytest.mark.parametrize("how", ["killed", "killed in backward", "raised in forward"])
def test_survivors_name_a_lost_rank_soon(how: str) -> None:
    outcomes = spawn_ranks(3, survive, how, timeout_s=60)
    assert outcomes[1].exitcode != 0, "the fault fired"
    for outcome in (outcomes[0], outcomes[2]):
        kind, message, ranks, seconds = outcome.value
        assert kind == PeerFailure.__name__, message
        assert ranks == (1,) and "rank 1" in message and "step 3, bucket" in message
        assert seconds < SOON_S
        if how == "raised in forward":
            assert "the data of rank 1 is broken" in message


def test_a_silent_rank_is_named_at_the_time_limit() -> None:
    outcomes = spawn_ranks(2, survive, "stalled", timeout_s=30, pg_timeout_s=STALL_LIMIT_S)
    assert outcomes[1].exitcode == 7, "the fault fired"
    kind, message, ranks, seconds = outcomes[0].value
    assert kind == CollectiveTimeout.__name__, message
    limit = f"time limit of {STALL_LIMIT_S} s"
    assert ranks == (1,) and limit in message and STALL_LIMIT_S <= seconds < 4 * STALL_LIMIT_S


def first_rank_dies(rank: int, world: int) -> tuple[str, tuple[int, ...], float]:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    _step(wrapped, 0, rank)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)  # takes the store with it
    started = time.monotonic()
    with pytest.raises(phalanx.PhalanxError) as raised:
        _step(wrapped, 1, rank)
    return str(raised.value), raised.value.ranks, time.monotonic() - started  # type: ignore[attr-defined]


def test_the_death_of_rank_0_is_named_though_the_store_dies_with_it() -> None:
    outcomes = spawn_ranks(3, first_rank_dies, timeout_s=60)
    assert outcomes[0].exitcode == -signal.SIGKILL
    for outcome in outcomes[1:]:
        message, ranks, seconds = outcome.value
        assert ranks == (0,) and "rank 0" in message and seconds < SOON_S


def caught_and_gone_on(rank: int, world: int) -> list[torch.Tensor]:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    _step(wrapped, 0, rank)
    handle = wrapped.module.register_forward_pre_hook(_explode)
    with pytest.raises(ZeroDivisionError):
        _step(wrapped, 1, rank)
    handle.remove()
    wrapped.zero_grad()
    _step(wrapped, 1, rank)
    time.sleep(1.5 * rank)  # rank 0 waits long enough to look at the failure board
    _step(wrapped, 2, rank)
    return [param.grad.clone() for param in wrapped.parameters()]


def test_a_failure_that_was_caught_is_forgotten() -> None:
    outcomes = spawn_ranks(2, caught_and_gone_on, timeout_s=60)
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0].value, outcomes[1].value, strict=True))


def late_after_catching(rank: int, world: int) -> None:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    _step(wrapped, 0, rank)
    wrapped.module.register_forward_pre_hook(_explode)
    with pytest.raises(ZeroDivisionError):
        _step(wrapped, 1, rank)
    if rank == 0:
        time.sleep(2.5)  # it saves something, and the others look at the failure board
    phalanx.init().barrier()


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ranks_that_all_catch_an_error_may_be_late_after_it(backend: str) -> None:
    run_ranks(2, late_after_catching, backend=backend)


def never_back(rank: int, world: int) -> str:
    wrapped = phalanx.DistributedDataParallel(make("mlp"))
    _step(wrapped, 0, rank)
    started = time.monotonic()
    if rank == 1:
        wrapped.module.register_forward_pre_hook(_explode)
        with pytest.raises(ZeroDivisionError):
            _step(wrapped, 1, rank)
        time.sleep(4 * STALL_LIMIT_S)
        os._exit(7)
    with pytest.raises(CollectiveTimeout) as raised:
        _step(wrapped, 1, rank)
    assert raised.value.ranks == (1,) and time.monotonic() - started >= STALL_LIMIT_S
    return str(raised.value)


def test_what_a_rank_raised_that_is_not_back_at_the_time_limit_is_said() -> None:
    outcomes = spawn_ranks(2, never_back, timeout_s=30, pg_timeout_s=STALL_LIMIT_S)
    words = "Before, rank 1 had raised ZeroDivisionError in forward: the data of rank 1 is broken"
    assert outcomes[1].exitcode == 7 and outcomes[0].value.endswith(words), outcomes[0].value
