"""Waiting for a device: by asking, so that a rank that died or stays silent is named and no communicator is aborted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.comm.failure.board import Failure, FailureBoard, Roll
from phalanx.comm.failure.waiter import Waiter
from phalanx.comm.torch_backend import StreamWork, started
from phalanx.errors import CollectiveTimeout, PeerFailure

WHERE = "step 7, bucket 2"


def board(timeout_s: float = 30.0, alarmed: bool = False, posted: list[Failure] | None = None, missing: Any = ()) -> Any:
    """A failure board as the waiter asks it."""
    made = mock.create_autospec(FailureBoard, instance=True)
    made.rank, made.me, made.members, made.timeout_s = 1, "rank 1", range(4), timeout_s
    made.is_alarmed.return_value = alarmed
    made.failures.return_value = posted or []
    made.roll_call.return_value = Roll(tuple(missing), {})
    made.waits.return_value = {}
    made.interruption.return_value = None
    return made


def test_wait_returns_when_the_event_is_over() -> None:
    answers = iter([False, False, True])
    asked = board()
    Waiter(asked).wait_until(lambda: next(answers), WHERE)
    assert next(answers, None) is None, "asked until it was over, and not again"
    asked.raise_alarm.assert_not_called()


def test_silent_rank_is_named_after_the_time_limit() -> None:
    with pytest.raises(CollectiveTimeout, match=f"rank 1: {WHERE}: no answer from rank 3 within"):
        Waiter(board(timeout_s=0.05, missing=(3,))).wait_until(lambda: False, WHERE)


def test_rank_that_failed_is_quoted_long_before_the_time_limit() -> None:
    posted = [Failure(2, 0.0, "ValueError: no such file")]
    with pytest.raises(PeerFailure, match="rank 2 failed first: ValueError: no such file"):
        Waiter(board(alarmed=True, posted=posted)).wait_until(lambda: False, WHERE)


class _Nccl:
    """A work as NCCL's: a limit would block the host, and abort the communicator when it is over."""

    def __init__(self) -> None:
        self.limits: list[Any] = []

    def wait(self, *limit: Any) -> bool:
        self.limits += limit
        return True


def test_collective_on_a_device_is_waited_for_without_a_limit() -> None:
    work = _Nccl()
    on_device = mock.Mock(spec=torch.Tensor, device=torch.device("cuda", 0))
    Waiter(board()).wait(started(work, on_device), WHERE)
    assert work.limits == []
    Waiter(board()).wait(started(work, torch.zeros(1)), WHERE)
    assert len(work.limits) == 1, "on the CPU a wait has a limit, at the end of which the board is looked at"
    assert isinstance(started(work, on_device), StreamWork)
