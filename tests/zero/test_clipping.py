"""Clipping by the norm over all ranks, and unscaling: exact on slices, refused where the update has been made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx.zero import ZeroRedundancyOptimizer
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients
from tests.zero.test_overlap import CAP_MB, everywhere, made

pytestmark = pytest.mark.timeout(60)


def clip(rank: int, world: int, options: dict[str, Any], norm_type: float, overlapped: bool) -> Any:
    shapes = ((70,), (13, 10), (6,), (), (257,), (33, 9))  # torch has no infinity norm of an empty tensor
    plain_model, model = Given(shapes), Given(shapes)
    plain = optim.SGD(plain_model.parameters(), lr=0.01, momentum=0.9)
    if overlapped:
        wrapped, zero = made(model, optim.SGD, momentum=0.9, step_in_backward=False, **options)
    else:
        wrapped, zero = None, ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.01, momentum=0.9, **options)
    norms = []
    for step in range(4):
        set_gradients(list(plain_model.parameters()), mean_gradients(plain_model, step))
        expected = nn.utils.clip_grad_norm_(plain_model.parameters(), 3.0, norm_type)
        plain.step()
        zero.zero_grad()
        if wrapped is None:
            set_gradients(list(model.parameters()), mean_gradients(model, step))
        else:
            wrapped(own_gradients(model, step, rank, world)).backward()
        got = zero.clip_grad_norm_(3.0, norm_type)
        zero.step()
        torch.testing.assert_close(got, expected)
        norms.append(got.item())
    for param, value in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(param, value)
    return norms, sample(model)


@everywhere
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_norm_over_all_ranks(norm_type: float, backend: str) -> None:
    for options, overlapped in (({}, True), ({"stage": 2}, True), ({"partition": "parameter"}, True), ({}, False)):
        results = run_ranks(3, clip, options, norm_type, overlapped, backend=backend)
        for norms, values in results[1:]:
            assert norms == results[0][0]
            assert all(map(torch.equal, values, results[0][1]))


def misuse_scattered(rank: int, world: int) -> None:
    model = Given()
    wrapped, zero = made(model)
    wrapped(own_gradients(model, 0, rank, world)).backward()
    with pytest.raises(RuntimeError, match="comes too late"):
        zero.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="scattered"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    grad = next(model.parameters()).grad
    assert grad is not None and grad.shape == (70,) and "each rank has its own slice" in repr(grad)
    with pytest.raises(RuntimeError, match="scattered"):
        grad.mul_(0.5)
    later, again = made(Given(), step_in_backward=False)
    later(own_gradients(model, 0, rank, world)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        for param in again._all_params:
            assert param.grad is None or param.grad.shape == param.shape
        again._overlap.gradient_shards.owned()[0].fill_(float("inf"))
        again.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_gradient_of_which_ranks_have_slices_cannot_be_mistaken_for_a_whole_one() -> None:
    run_ranks(2, misuse_scattered)


def scale(rank: int, world: int, overlapped: bool, options: dict[str, Any]) -> Any:
    plain_model, model = Given(), Given()
    plain = optim.SGD(plain_model.parameters(), lr=0.01, momentum=0.9)
    if overlapped:
        wrapped, zero = made(model, optim.SGD, momentum=0.9, step_in_backward=False, **options)
    else:
        wrapped = phalanx.DistributedDataParallel(model, bucket_cap_mb=CAP_MB, on_unused="ignore")
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.01, momentum=0.9, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    found = []
    for step in range(5):
        means, own = mean_gradients(plain_model, step), own_gradients(model, step, rank, world)
        if step == 3:
            # Only one element, so that with slices only one rank sees it.
            for gradients in (means, own):
                assert gradients[1] is not None
                gradients[1][-1, -1] = float("inf")
        for one, wrapper, given, scaler in (
            (plain, plain_model, means, scalers[0]),
            (zero, wrapped, own, scalers[1]),
        ):
            one.zero_grad()
            scaler.scale(wrapper(given)).backward()
            if step % 2 == 0:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
        found.append((differing(model, sample(plain_model)), scalers[0].get_scale() == scalers[1].get_scale()))
    return found


@everywhere
@pytest.mark.parametrize(
    ("overlapped", "options"), [(False, {}), (True, {}), (True, {"stage": 2}), (True, {"partition": "parameter"})], ids=str
)
def test_gradients_unscaled_by_a_grad_scaler(overlapped: bool, options: dict[str, Any], backend: str) -> None:
    assert run_ranks(2, scale, overlapped, options, backend=backend) == [[([], True)] * 5] * 2


def scale_too_late(rank: int, world: int) -> None:
    model = Given()
    wrapped, zero = made(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(wrapped(own_gradients(model, 0, rank, world))).backward()
    with pytest.raises(RuntimeError, match="step_in_backward=False to use a GradScaler"):
        scaler.step(zero)


def test_unscaling_after_the_update_is_refused() -> None:
    run_ranks(2, scale_too_late)
