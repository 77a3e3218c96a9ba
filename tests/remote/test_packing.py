"""Packing changes how an update is computed and nothing else: every bit must be that of the plain optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, optim

from phalanx.remote.packing import ELEMENTWISE, Packer
from tests.remote.optimizers import CASES, label

SHAPES = [(1,), (3,), (7, 5), (2, 3, 4), (33,), (), (64, 70), (0,), (1003,)]


def params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in SHAPES]


def gradients(for_params: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(param.shape, generator=generator).to(param.dtype) for param in for_params]


def step_plainly(optimizer: optim.Optimizer, pairs: dict[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = pairs.get(param)
    optimizer.step()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def step_both(packer: Packer, ours: list[Any], plain: optim.Optimizer, theirs: list[Any], number: int) -> None:
    """One step of each on the same gradients; parameters must be equal to the bit afterwards."""
    grads = gradients(ours, number)
    packer.step(dict(zip(ours, grads, strict=True)))
    step_plainly(plain, dict(zip(theirs, map(Tensor.clone, grads), strict=True)))
    assert all(map(torch.equal, ours, theirs)), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=label)
def test_parameters_and_state_are_bit_equal_to_the_plain_optimizers(case: Any, dtype: torch.dtype) -> None:
    kind, settings = case
    # Torch's Adafactor divides by the number of elements.
    ours, theirs = ([p for p in params(dtype) if p.numel() or kind is not optim.Adafactor] for _ in "ab")
    plain = kind(theirs, **settings)
    packer = Packer(kind(ours, **settings))
    for number in range(12):
        step_both(packer, ours, plain, theirs, number)
    packer.unpack()
    assert same(packer.optimizer.state_dict(), plain.state_dict())


def test_every_elementwise_class_is_among_the_cases() -> None:
    assert {kind for kind, _ in CASES} >= ELEMENTWISE


def test_small_parameters_really_are_packed_and_narrow_ones_are_not() -> None:
    for dtype, expected in ((torch.float32, True), (torch.bfloat16, False)):
        ours = params(dtype)
        packer = Packer(optim.Adam(ours))
        packer.step(dict(zip(ours, gradients(ours, 0), strict=True)))
        assert bool(packer._packs) is expected


class Subclass(optim.Adam):
    """Might do anything."""


def test_a_subclass_is_never_packed() -> None:
    ours = params()
    packer = Packer(Subclass(ours))
    packer.step(dict(zip(ours, gradients(ours, 0), strict=True)))
    assert not packer._packs


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.Adagrad])
@given(st.lists(st.sets(st.integers(0, len(SHAPES) - 1)), min_size=1, max_size=8), st.booleans())
def test_gradients_that_come_and_go_leave_the_others_untouched(
    kind: type[optim.Optimizer], present: list[set[int]], save: bool
) -> None:
    settings = {"lr": 0.1} | ({"momentum": 0.9} if kind is optim.SGD else {})
    ours, theirs = params(), params()
    plain = kind(theirs, **settings)
    packer = Packer(kind(ours, **settings))
    for number, chosen in enumerate(present):
        grads = gradients(ours, number)
        num_updated = packer.step({ours[index]: grads[index] for index in chosen})
        step_plainly(plain, {theirs[index]: grads[index].clone() for index in chosen})
        assert num_updated == len(chosen)
        assert all(map(torch.equal, ours, theirs))
        if save:
            packer.unpack()
    packer.unpack()
    assert same(packer.optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_go_through(momentum: float) -> None:
    ours, theirs = ([torch.ones(6, 3, requires_grad=True), torch.ones(4, requires_grad=True)] for _ in "ab")
    packer = Packer(optim.SGD(ours, lr=0.5, momentum=momentum))
    plain = optim.SGD(theirs, lr=0.5, momentum=momentum)
    for rows in ([0, 2], [2, 5]):
        sparse = torch.sparse_coo_tensor(torch.tensor([rows]), torch.ones(2, 3), (6, 3), check_invariants=True)
        packer.step({ours[0]: sparse, ours[1]: torch.ones(4)})
        step_plainly(plain, {theirs[0]: sparse.clone(), theirs[1]: torch.ones(4)})
        assert all(map(torch.equal, ours, theirs))


def test_options_changed_between_steps_take_effect() -> None:
    ours, theirs = params(), params()
    plain, packer = optim.Adam(theirs), Packer(optim.Adam(ours))
    for number, lr in enumerate((0.1, 0.01, 1.0)):
        for optimizer in (plain, packer.optimizer):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.param_groups[0]["betas"] = (0.5 + lr / 10, 0.9)
        grads = gradients(ours, number)
        packer.step(dict(zip(ours, grads, strict=True)))
        step_plainly(plain, dict(zip(theirs, grads, strict=True)))
        assert all(map(torch.equal, ours, theirs))


def test_a_parameter_written_by_somebody_else_is_read_anew() -> None:
    ours, theirs = params(), params()
    plain, packer = optim.Adam(theirs), Packer(optim.Adam(ours))
    for number in range(3):
        grads = gradients(ours, number)
        packer.step(dict(zip(ours, grads, strict=True)))
        step_plainly(plain, dict(zip(theirs, grads, strict=True)))
        # Through `.data`: no version counter tells of it.
        for mine, their in zip(ours, theirs, strict=True):
            mine.data.mul_(0.5)
            their.data.mul_(0.5)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.Adafactor])
def test_grad_attributes_are_neither_used_nor_left_dirty(kind: type[optim.Optimizer]) -> None:
    ours = params()
    packer = Packer(kind(ours, lr=0.1))
    marks = [torch.full_like(param, 7.0) for param in ours]
    for param, mark in zip(ours, marks, strict=True):
        param.grad = mark
    before = [param.detach().clone() for param in ours]
    packer.step({ours[0]: torch.ones_like(ours[0])})
    assert all(param.grad is mark for param, mark in zip(ours, marks, strict=True))
    assert not torch.equal(ours[0], before[0])
    assert all(map(torch.equal, ours[1:], before[1:]))


def test_grad_attributes_are_restored_when_the_optimizer_raises() -> None:
    class Raising(optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no")

    ours = params()
    ours[1].grad = torch.ones_like(ours[1])
    held = copy.copy(ours[1].grad)
    packer = Packer(Raising(ours, lr=0.1, momentum=0.5))
    with pytest.raises(ValueError, match="no"):
        packer.step(dict(zip(ours, gradients(ours, 0), strict=True)))
    assert ours[0].grad is None
    assert torch.equal(ours[1].grad, held)


@pytest.mark.parametrize("dampening", [0.0, 0.25])
def test_momentum_that_is_set_to_0_in_one_group_leaves_its_buffer_alone(dampening: float) -> None:
    ours, theirs = params(), params()
    half = len(ours) // 2
    made = [
        optim.SGD([{"params": p[:half]}, {"params": p[half:]}], lr=0.1, momentum=0.9, dampening=dampening)
        for p in (ours, theirs)
    ]
    packer, plain = Packer(made[0]), made[1]
    for number in range(8):
        momentum = 0.0 if 3 <= number < 6 else 0.9
        for optimizer in made:
            optimizer.param_groups[0]["momentum"] = momentum
        step_both(packer, ours, plain, theirs, number)
    packer.unpack()
    assert same(packer.optimizer.state_dict(), plain.state_dict())


def test_momentum_steps_without_a_copy_of_parameters_or_gradients() -> None:
    ours = params()
    packer = Packer(optim.SGD(ours, lr=0.1, momentum=0.9))
    packer.step(dict(zip(ours, gradients(ours, 0), strict=True)))
    packed = [pack.flat.clone() for pack in packer._packs]
    packer.step(dict(zip(ours, gradients(ours, 1), strict=True)))
    assert packed and all(torch.equal(pack.flat, was) for pack, was in zip(packer._packs, packed, strict=True))


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_hooks_of_the_optimizer_itself_run_once_per_step(kind: Any) -> None:
    """An owner's optimizer may come from a function that registers them; packed, nobody would call them."""
    ours = params()
    optimizer, calls = kind(ours, lr=0.1), []
    packer = Packer(optimizer)
    packer.step(dict(zip(ours, gradients(ours, 0), strict=True)))
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    assert packer.step(dict(zip(ours, gradients(ours, 1), strict=True))) == len(ours)
    assert calls == ["before", "after"]
