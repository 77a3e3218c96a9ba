"""Hooks fired from several threads at once, as autograd does for a model on several devices: it has a thread for each.

On CPU tensors, with the hooks that parameters on a device get; threads of the test stand for autograd's.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any
from unittest import mock

import torch
from torch import nn

import phalanx
from phalanx.ddp.passes.backward import Pass
from phalanx.ddp.reducer.hooks import GradientHooks
from tests.cluster import run_ranks

_NUM_THREADS = 4
_NUM_PARAMS = 48
_STEPS = 4


class Parts(nn.Module):
    """One parameter of autograd's own; the others get their gradients from threads, in the midst of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(8))
        self.others = nn.ParameterList(nn.Parameter(torch.zeros(500 + index)) for index in range(_NUM_PARAMS))
        self.fire: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x * self.first
        inner.register_hook(lambda grad: self.fire())
        return inner * 2


def _deliver(params: list[nn.Parameter], value: float, errors: list[BaseException]) -> None:
    """What a thread of autograd does for the leaves of its device."""
    try:
        for param in params:
            param.grad = torch.full_like(param, value)
            for hook in list(param._post_accumulate_grad_hooks.values()):
                hook(param)
    except BaseException as error:
        errors.append(error)


def _train(rank: int, world: int, views: bool) -> tuple[list[bool], int, int]:
    """Whether each step's means are right, the most threads that ever launched at once, and how many buckets there were."""
    watch_all, send = GradientHooks.watch_all, Pass.send
    inside, most = [0], [0]

    def as_on_device(self: GradientHooks, params: Any, on_device: bool) -> None:
        watch_all(self, params, True)

    def counted(self: Pass, *args: Any, **kwargs: Any) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0005)  # others have time to come in, if they can
        send(self, *args, **kwargs)
        inside[0] -= 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with mock.patch.object(GradientHooks, "watch_all", as_on_device), mock.patch.object(Pass, "send", counted):
            ddp = phalanx.DistributedDataParallel(Parts(), bucket_cap_mb=0.01, gradient_as_bucket_view=views)
            right = [_step(ddp, rank, world, number) for number in range(_STEPS)]
            return right, most[0], len(ddp.reducer.buckets)
    finally:
        sys.setswitchinterval(interval)


def _step(ddp: phalanx.DistributedDataParallel, rank: int, world: int, number: int) -> bool:
    errors: list[BaseException] = []
    others = list(ddp.module.others)

    def fire() -> None:
        threads = [
            threading.Thread(target=_deliver, args=(others[nth::_NUM_THREADS], float(rank + number), errors))
            for nth in range(_NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ddp.zero_grad()
    ddp.module.fire = fire
    ddp(torch.full((8,), float(rank + 1))).sum().backward()
    ddp.module.fire = None
    if errors:
        raise errors[0]
    mean = number + sum(range(world)) / world
    first = 2.0 * sum(range(1, world + 1)) / world
    return all(bool((param.grad == mean).all()) for param in others) and bool((ddp.module.first.grad == first).all())


def test_hooks_of_several_threads_count_and_launch_one_at_a_time() -> None:
    for right, most, num_buckets in run_ranks(2, _train, False):
        assert right == [True] * _STEPS
        assert num_buckets > 5, "there was hardly anything to launch"
        assert most == 1, "two threads launched at once"


def test_hooks_of_several_threads_with_views() -> None:
    for right, most, _ in run_ranks(2, _train, True):
        assert right == [True] * _STEPS and most == 1
