"""What comes after a backward that raised, with more buckets under way on one rank than on another: it waits its turn."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import phalanx
from phalanx.comm.hooks import allreduce_hook
from phalanx.errors import ReductionError
from tests.cluster import run_ranks
from tests.ddp.by_hand import SMALL, BrokenLayer, Net, assert_mean, everywhere, inputs, mean_by_hand, unwrapped

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


class Trained:
    """A wrapped model, a bucket per layer, and the same model by hand."""

    group: dist.ProcessGroup  # another one, of the same ranks
    optimizer: phalanx.ZeroRedundancyOptimizer

    def __init__(self, **options: Any) -> None:
        self.model = Net(SMALL)
        self.plain = unwrapped(self.model)
        cap_mb = 4 * (SMALL + 1) * SMALL / 2**20
        self.wrapped: Any = phalanx.DistributedDataParallel(self.model, bucket_cap_mb=cap_mb, **options)

    def loss(self, module: nn.Module, step: int, rank: int) -> torch.Tensor:
        dtype = next(module.parameters()).dtype
        return module(inputs(step, rank, SMALL).to(dtype)).square().mean()

    @contextmanager
    def breaking(self, rank: int) -> Iterator[None]:
        """Inside, a backward raises: before the first bucket has left on rank 0, and after it on the others."""

        def refuse(_grad: torch.Tensor) -> None:
            raise BrokenLayer("on purpose")

        handle = (self.model.a if rank else self.model.b).weight.register_hook(refuse)
        with pytest.raises(BrokenLayer):
            yield
        handle.remove()

    def fail(self, rank: int) -> None:
        loss = self.loss(self.wrapped, 50, rank)
        with self.breaking(rank):
            loss.backward()

    def train(self, step: int, rank: int, world: int) -> None:
        self.wrapped.zero_grad()
        self.loss(self.wrapped, step, rank).backward()
        self.check(step, world)

    def check(self, step: int, world: int) -> None:
        assert_mean(self.model, mean_by_hand(self.plain, world, lambda module, rank: self.loss(module, step, rank)))


def change(trained: Trained, how: str) -> None:
    if how == "hook":
        trained.wrapped.register_comm_hook(None, allreduce_hook)
    elif how == "parameters":
        trained.wrapped.load_state_dict(trained.plain.state_dict(), assign=True)
    elif how == "dtype":
        trained.wrapped.double()
        trained.plain.double()
    elif how == "group":
        trained.wrapped.update_process_group(trained.group)
    elif how == "parameter group":
        trained.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    elif how == "rate":
        trained.optimizer.param_groups[0]["lr"] = 0.05
    elif how == "another wrapper":
        failed, trained.wrapped = trained.wrapped, phalanx.DistributedDataParallel(trained.model)
        assert not failed.reducer.has_failed
    else:
        trained.optimizer = phalanx.ZeroRedundancyOptimizer(trained.model.parameters(), optim.SGD, lr=0.1)


def changed_after(rank: int, world: int, how: str) -> None:
    trained = Trained()
    if how == "group":
        trained.group = dist.new_group([*range(world)])
    if how in ("parameter group", "rate"):
        trained.optimizer = phalanx.ZeroRedundancyOptimizer(trained.model.parameters(), optim.SGD, lr=0.1)
    for step in range(3):
        if step == 1:
            trained.fail(rank)
            change(trained, how)
        trained.train(step, rank, world)


CHANGES = ["hook", "parameters", "dtype", "group", "another wrapper", "an optimizer", "parameter group", "rate"]


@everywhere
@pytest.mark.parametrize("how", CHANGES)
def test_what_a_failed_pass_owes_comes_before_whatever_the_wrapper_is_changed_to(how: str, backend: str) -> None:
    run_ranks(2, changed_after, how, backend=backend, timeout_s=30, pg_timeout_s=12)


def another_goes_on(rank: int, world: int, forwards_first: bool, both_fail: bool) -> None:
    """One model's backward raises everywhere, and the script goes on with another model (a critic, then a generator)."""
    one, other = Trained(), Trained()
    for step in range(4):
        other.wrapped.zero_grad()
        if not forwards_first:
            one.fail(rank)
            loss = other.loss(other.wrapped, step, rank)
        else:
            broken, loss = one.loss(one.wrapped, step, rank), other.loss(other.wrapped, step, rank)
            with one.breaking(rank):
                broken.backward()
        if both_fail:
            with other.breaking(rank):
                loss.backward()
            other.train(step, rank, world)
        else:
            loss.backward()
            other.check(step, world)
        if step % 2:
            one.train(step, rank, world)


@everywhere
@pytest.mark.parametrize("forwards_first", [False, True], ids=["forward later", "forwards first"])
@pytest.mark.parametrize("both_fail", [False, True], ids=["one", "both"])
def test_what_one_wrapper_owes_comes_before_what_another_sends(forwards_first: bool, both_fail: bool, backend: str) -> None:
    run_ranks(2, another_goes_on, forwards_first, both_fail, backend=backend, timeout_s=30, pg_timeout_s=12)


def step_after_failure(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, set[int]]:
    """What has come before a rank raised is zeros then; elsewhere there was nothing."""
    trained = Trained()
    # The first that gets gradient, and most of all: each rank owns a part of it.
    trained.model.b = nn.Linear(SMALL, 64 * SMALL)
    before = trained.model.b.weight.detach().clone()
    trained.wrapped = phalanx.DistributedDataParallel(trained.model)
    optimizer = phalanx.ZeroRedundancyOptimizer(trained.model.parameters(), optim.RMSprop, lr=0.1, weight_decay=0.1)
    trained.fail(rank)
    trained.wrapped.zero_grad(set_to_none=False)
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    states = set(optimizer.state_dict()["state"]) if rank == 0 else set()
    return before, trained.model.b.weight.detach().clone(), states


@everywhere
def test_a_sharded_step_by_zeros_of_a_failed_backward_is_one_of_all_ranks(backend: str) -> None:
    (before, first, states), (_, second, _) = run_ranks(2, step_after_failure, backend=backend, timeout_s=30)
    assert torch.equal(first, second) and 2 in states
    assert bool((before != first).all())  # by decay alone, whoever owns an element


def dropped_after(rank: int, world: int) -> None:
    """A trial ends by an exception on every rank, and the next one begins; memory is freed whenever each rank gets to it."""
    gc.disable()
    try:
        for trial in range(3):
            failed = Trained()
            failed.train(0, rank, world)
            failed.fail(rank)
            del failed
            if rank == trial % world:
                gc.collect()
            Trained().train(1, rank, world)
    finally:
        gc.enable()


@everywhere
def test_what_a_dropped_wrapper_owes_does_not_depend_on_when_its_memory_is_freed(backend: str) -> None:
    run_ranks(2, dropped_after, backend=backend, timeout_s=30, pg_timeout_s=12)


def forgotten_with_its_group(rank: int, world: int) -> bool:
    group = dist.new_group([*range(world)])
    failed = Trained(process_group=group)
    failed.fail(rank)
    reducer = weakref.ref(failed.wrapped.reducer)
    del failed
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return reducer() is None


def test_what_is_owed_to_a_group_that_is_destroyed_keeps_nobody_alive() -> None:
    assert run_ranks(2, forgotten_with_its_group, backend="gloo", timeout_s=30, pg_timeout_s=12) == [True, True]


def raises_behind(rank: int, world: int, how: str) -> None:
    """The second of a chain of two takes no part in the reduction; on rank 0 the backward does not come to the first."""
    bodies = [Net(SMALL), Net(SMALL)]
    plain = [unwrapped(body) for body in bodies]
    first, second = (phalanx.DistributedDataParallel(body) for body in bodies)
    if how == "frozen":
        bodies[1].requires_grad_(False)

    def refuse(_grad: torch.Tensor) -> None:
        raise BrokenLayer("on purpose")

    for step in range(3):
        between = first(inputs(step, rank, SMALL)).expand(-1, SMALL)
        with second.no_sync() if how == "no_sync" else nullcontext():
            out = second(between)
        # Behind the second on rank 0, in the midst of the first on rank 1.
        handle = (bodies[0].a.weight if rank else between).register_hook(refuse)
        with pytest.raises(BrokenLayer):
            out.sum().backward()
        handle.remove()
        first.zero_grad()
        second.zero_grad()
        first(inputs(step, rank, SMALL)).square().mean().backward()
        wanted = mean_by_hand(plain[0], world, lambda m, r, step=step: m(inputs(step, r, SMALL)).square().mean())
        assert_mean(bodies[0], wanted)


@everywhere
@pytest.mark.parametrize("how", ["frozen", "no_sync"])
def test_a_backward_that_raises_behind_a_wrapper_without_part_in_it_is_one_of_the_others(how: str, backend: str) -> None:
    run_ranks(2, raises_behind, how, backend=backend, timeout_s=30, pg_timeout_s=10)


def keeps_exceptions(rank: int, world: int, num_wrappers: int) -> None:
    """As a list of errors does, or an interactive session: what the traceback holds lives on."""
    all_trained = [Trained(on_nonfinite="raise") for _ in range(num_wrappers)]
    kept = []
    for step in range(4):
        for each in all_trained:
            each.wrapped.zero_grad()
        factor = float("nan") if step in (1, 2) else 1.0
        try:
            sum(each.loss(each.wrapped, step, rank) * factor for each in all_trained).backward()
        except ReductionError as error:
            kept.append(error)
            continue
        for each in all_trained:
            wanted = mean_by_hand(each.plain, world, lambda m, r, each=each, step=step: each.loss(m, step, r))
            assert_mean(each.model, wanted)
    assert len(kept) == 2


@pytest.mark.parametrize("num_wrappers", [1, 2])
def test_backwards_are_reduced_while_the_exception_of_an_earlier_one_is_kept(num_wrappers: int) -> None:
    run_ranks(2, keeps_exceptions, num_wrappers, timeout_s=30, pg_timeout_s=10)
