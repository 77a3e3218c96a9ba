"""Clipping by the norm over all ranks, and unscaling: exact on slices, refused where the update has been made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx.errors import ConfigError, MismatchError
from phalanx.zero import ZeroRedundancyOptimizer
from phalanx.zero.clipping import clip_shards
from tests.cluster import run_ranks
from tests.zero.cases import Given, differing, mean_gradients, own_gradients, sample, set_gradients
from tests.zero.test_overlap import CAP_MB, everywhere, made

pytestmark = [pytest.mark.timeout(60), pytest.mark.covering(1)]


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


def clip_apart(rank: int, world: int) -> bool:
    model = Given(((70,), (13, 10)))
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.01)
    set_gradients(list(model.parameters()), mean_gradients(model, 0))
    before = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(MismatchError, match="limits of clip_grad_norm_"):
        zero.clip_grad_norm_(1e-3 if rank else 1e-4)
    return all(torch.equal(param.grad, old) for param, old in zip(model.parameters(), before, strict=True))  # type: ignore[arg-type]


def test_other_limits_are_refused_where_whole_gradients_are_clipped() -> None:
    """Not only in the step that follows: what each rank reads off its gradients in between would differ."""
    assert run_ranks(2, clip_apart, backend="gloo") == [True, True]


def test_the_norm_of_order_0_is_torchs_where_gradients_are_whole() -> None:
    run_ranks(2, clip, {}, 0.0, False, backend="phalanx")
    with pytest.raises(ConfigError, match="not known of gradients in shards"):
        clip_shards([torch.ones(3)], [torch.ones(3)], 1.0, 0, False, None)  # type: ignore[arg-type]


class ComplexGiven(Given):
    """The gradient of each complex parameter is the conjugate of what `forward` is given for it."""

    def forward(self, gradients: Any) -> torch.Tensor:
        return torch.stack([(w * g).sum().real for w, g in zip(self.weights, gradients, strict=True)]).sum()


def clip_complex(rank: int, world: int, norm_type: float, options: dict[str, Any]) -> Any:
    shapes = ((70,), (13, 10), (), (9000,))  # the last one has more than 64 KiB
    plain_model, model = (ComplexGiven(shapes, torch.complex64) for _ in range(2))
    plain = optim.SGD(plain_model.parameters(), lr=0.01, momentum=0.9)
    wrapped, zero = made(model, optim.SGD, momentum=0.9, step_in_backward=False, **options)
    turned = 1.0 + 0.5j  # so that both parts of every gradient are there
    for step in (0, 1, 3):
        means = [turned * mean for mean in mean_gradients(plain_model, step) if mean is not None]
        set_gradients(list(plain_model.parameters()), [mean.conj().resolve_conj() for mean in means])
        # In double, as torch's sum of 9,000 numbers in single precision is not exact enough to compare with.
        expected = nn.utils.get_total_norm([mean.to(torch.complex128) for mean in means], norm_type).float()
        nn.utils.clip_grad_norm_(plain_model.parameters(), 3.0, norm_type)
        plain.step()
        zero.zero_grad()
        own = [turned * one for one in own_gradients(model, step, rank, world) if one is not None]
        wrapped(own).backward()
        got = zero.clip_grad_norm_(3.0, norm_type)
        zero.step()
        torch.testing.assert_close(got, expected)
    for param, value in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(param, value)
    return got


@everywhere
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_of_complex_gradients(norm_type: float, backend: str) -> None:
    for options in ({}, {"stage": 2}):
        first, second = run_ranks(2, clip_complex, norm_type, options, backend=backend)
        assert torch.equal(first, second)


def clip_dtype(rank: int, world: int, dtype: torch.dtype) -> Any:
    model = Given(((70,), (9000,)), dtype)
    wrapped, zero = made(model, optim.SGD, step_in_backward=False)
    wrapped(own_gradients(model, 0, rank, world)).backward()
    got = zero.clip_grad_norm_(3.0)
    plain = [param.detach().clone() for param in model.parameters()]
    set_gradients(plain, mean_gradients(model, 0))
    torch.testing.assert_close(got, nn.utils.clip_grad_norm_(plain, 3.0))
    return got


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_norm_has_the_precision_of_the_gradients(dtype: torch.dtype, backend: str) -> None:
    assert len({float(got) for got in run_ranks(3, clip_dtype, dtype, backend=backend)}) == 1


class OnePeer:
    """Collectives of two ranks in which the other one has nothing, on any device."""

    world = 2

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        self.devices = {output.device, own.device}

    def wait(self, work: None, where: str) -> None:
        pass


def test_a_rank_that_owns_nothing_clips_on_the_device_of_the_parameters() -> None:
    # A group of an accelerator takes no CPU tensor; "meta" stands for any device that is not the CPU.
    peer: Any = OnePeer()
    grads = [torch.zeros(3, device="meta")]
    clip_shards([], grads, 1.0, 2.0, False, peer)
    assert peer.devices == {torch.device("meta")}


class EqualPeer(OnePeer):
    """The same, of which the other one has said what it clips by."""

    def all_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        output.view(2, -1).copy_(own)
        output[own.numel()] = 0  # its norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_factor_is_not_rounded_to_the_precision_of_the_gradients(dtype: torch.dtype) -> None:
    """In bfloat16 it would be 0.4 % off, for all gradients alike."""
    grad = torch.linspace(-1, 1, 1000).to(dtype)
    clipped = grad.clone()
    norm = clip_shards([clipped], [grad], 0.1, 2.0, False, EqualPeer())  # type: ignore[arg-type]
    expected = grad.clone()
    torch._foreach_mul_([expected], 0.1 / (torch.linalg.vector_norm(grad, dtype=torch.float64) + 1e-6))
    assert norm.dtype == dtype
    assert torch.equal(clipped, expected)


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
