"""One contract for every hook: averages, equal to the last bit on all ranks, with many buckets under way."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm.bucket import GradBucket
from phalanx.comm.hooks import (
    Int8State,
    PowerSGDState,
    TopKState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    hook_future,
    hook_result,
    int8_hook,
    noop_hook,
    powerSGD_hook,
    topk_hook,
)
from tests.cluster import run_ranks
from tests.comm.hooks.buckets import (
    IMAGES,
    MATRICES,
    MIXED,
    WIDE,
    Layout,
    fill,
    gradient_of,
    make_bucket,
    make_buckets,
    mean_of,
    relative_error,
)

pytestmark = pytest.mark.timeout(60)

Results = list[list[torch.Tensor]]  # by step, then by bucket


@dataclass(frozen=True)
class Case:
    """A hook, its state, and how far from the true average its answer may be, relatively.

    With feedback, later steps also bring what earlier ones have lost, so `tolerance` is for the first
    step, and `sum_tolerance` for the sum over many.
    """

    hook: Callable[..., Any]
    make_state: Callable[[], Any]
    tolerance: float
    sum_tolerance: float | None = None


def _none() -> None:
    return None


def _power_sgd() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=0)


def _power_sgd_batched() -> PowerSGDState:
    return PowerSGDState(None, 4, 0, batch_tensors_with_same_shape=True, orthogonalization_epsilon=1e-8)


def _power_sgd_late() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)


def _top_k() -> TopKState:
    return TopKState(ratio=0.1)


CASES = {
    "allreduce": Case(allreduce_hook, _none, 1e-6),
    "fp16": Case(fp16_compress_hook, _none, 2e-3),
    "bf16": Case(bf16_compress_hook, _none, 2e-2),
    "fp16_wrapper": Case(fp16_compress_wrapper(allreduce_hook), _none, 2e-3),
    "bf16_wrapper": Case(bf16_compress_wrapper(allreduce_hook), _none, 2e-2),
    "power_sgd": Case(powerSGD_hook, _power_sgd, 0.99, 0.15),
    "power_sgd_batched": Case(powerSGD_hook, _power_sgd_batched, 0.99, 0.15),
    "power_sgd_late": Case(powerSGD_hook, _power_sgd_late, 0.99, 0.15),
    "power_sgd_fp16": Case(fp16_compress_wrapper(powerSGD_hook), _power_sgd, 0.99, 0.15),
    "int8": Case(int8_hook, Int8State, 2e-2, 1e-3),
    "top_k": Case(topk_hook, _top_k, 0.9, 0.15),
}
LOSSY = [name for name, case in CASES.items() if case.sum_tolerance is not None]
STATEFUL = LOSSY


def run_step(case: Case, state: Any, buckets: Sequence[GradBucket], rank: int, step: int, delay_s: float = 0) -> Any:
    """One backward pass: hooks called in order, futures waited for in the end, as the reducer does."""
    chance = random.Random(1000 * rank + step)
    for bucket in buckets:
        fill(bucket, rank, step)
    futures = []
    for bucket in buckets:
        time.sleep(chance.random() * delay_s)
        futures.append(hook_future(case.hook(state, bucket), bucket))
    time.sleep(chance.random() * delay_s)
    results = []
    for bucket, future in zip(buckets, futures, strict=True):
        result = hook_result(future.wait(), bucket)
        results.append(bucket.origin().copy_(result).clone())
    return results


def several_steps(
    rank: int, world: int, name: str, layouts: Sequence[Layout], steps: int, delay_s: float = 0
) -> Results:
    buckets, state = make_buckets(layouts), CASES[name].make_state()
    return [run_step(CASES[name], state, buckets, rank, step, delay_s) for step in range(steps)]


def assert_identical(by_rank: Sequence[Results]) -> None:
    for other in by_rank[1:]:
        for step, (mine, theirs) in enumerate(zip(by_rank[0], other, strict=True)):
            for index, (one, two) in enumerate(zip(mine, theirs, strict=True)):
                assert torch.equal(one, two), f"step {step}, bucket {index} differs between ranks"


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("world", "backend"), [(2, "gloo"), (3, "phalanx"), pytest.param(3, "gloo", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("name", CASES)
def test_every_hook_averages_mixed_buckets_alike_on_all_ranks(name: str, world: int, backend: str) -> None:
    by_rank = run_ranks(world, several_steps, name, MIXED, steps=3, delay_s=0.004, backend=backend)
    assert_identical(by_rank)
    buckets = make_buckets(MIXED)
    for step, results in enumerate(by_rank[0]):
        for bucket, result in zip(buckets, results, strict=True):
            assert result.dtype == bucket.buffer().dtype
            # bf16 gradients carry the rounding of their own dtype, whatever the hook does.
            own = 2e-2 if result.dtype is torch.bfloat16 else 0.0
            error = relative_error(result, mean_of(bucket, world, step))
            tolerance = CASES[name].tolerance if step == 0 or name not in LOSSY else 1.5
            assert error <= tolerance + own, f"step {step}, bucket {bucket.index()}: {error}"


@pytest.mark.parametrize("name", LOSSY)
def test_feedback_makes_the_sum_over_steps_approach_the_true_one(name: str) -> None:
    steps, layouts = 40, (MATRICES, IMAGES, WIDE)
    results = run_ranks(2, several_steps, name, layouts, steps)[0]
    bound = CASES[name].sum_tolerance
    assert bound is not None
    for bucket in make_buckets(layouts):
        errors = []
        for upto in (steps // 8, steps):
            total = torch.stack([results[step][bucket.index()] for step in range(upto)]).double().sum(0)
            truth = torch.stack([mean_of(bucket, 2, step) for step in range(upto)]).sum(0)
            errors.append(relative_error(total, truth))
        assert errors[1] < bound and errors[1] < errors[0] / 2, f"bucket {bucket.index()}: {errors}"


def saved_and_restored(rank: int, world: int, name: str, how: str) -> tuple[Results, Results]:
    layouts = (MATRICES, WIDE)
    buckets, state = make_buckets(layouts), CASES[name].make_state()
    for step in range(4):
        run_step(CASES[name], state, buckets, rank, step)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(state))
        assert other.process_group is dist.group.WORLD
    else:
        other = CASES[name].make_state()
        other.load_state_dict(pickle.loads(pickle.dumps(state.state_dict())))
    straight = [run_step(CASES[name], state, buckets, rank, step) for step in range(4, 7)]
    again = [run_step(CASES[name], other, make_buckets(layouts), rank, step) for step in range(4, 7)]
    assert state.iter == other.iter == 7
    return straight, again


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", ["state_dict", "pickle"])
@pytest.mark.parametrize("name", STATEFUL)
def test_a_restored_state_continues_bit_for_bit(name: str, how: str) -> None:
    for straight, again in run_ranks(2, saved_and_restored, name, how):
        assert_identical([straight, again])


def with_a_new_plan(rank: int, world: int, name: str) -> float:
    """The same six parameters in two plans; how much of the sum over steps the change has cost."""
    shapes = ((24, 40), (40,), (16, 30), (30,), (32, 16), (9,))
    names = [f"p{nth}" for nth in range(6)]
    sums = {name: torch.zeros(shape) for name, shape in zip(names, shapes, strict=True)}
    truth = {name: torch.zeros(shape) for name, shape in zip(names, shapes, strict=True)}

    def plan(*groups: tuple[int, ...]) -> list[GradBucket]:
        made = make_buckets([Layout(tuple(shapes[nth] for nth in group)) for group in groups])
        for bucket, group in zip(made, groups, strict=True):
            bucket._names = tuple(names[nth] for nth in group)
        return made

    case = CASES[name]
    state = case.make_state()
    first, second = plan((0, 1), (2, 3, 4, 5)), plan((5, 2, 0), (1,), (4, 3))
    for step in range(30):
        buckets = first if step < 3 else second
        for bucket in buckets:
            for own, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
                mean = torch.zeros(gradient.shape)
                for each in range(world):
                    # Constant over the steps: what is not lost arrives in the end.
                    generator = torch.Generator().manual_seed(each * 10 + names.index(own))
                    value = torch.randn(gradient.shape, generator=generator)
                    mean += value / world
                    if each == rank:
                        gradient.copy_(value)
                truth[own] += mean
        futures = [case.hook(state, bucket) for bucket in buckets]
        for bucket, future in zip(buckets, futures, strict=True):
            bucket.origin().copy_(hook_result(future.wait(), bucket))
            for own, gradient in zip(bucket.names(), bucket.gradients(), strict=True):
                sums[own] += gradient
            bucket.reset()
    return max(float((sums[name] - truth[name]).norm() / truth[name].norm()) for name in names)


@pytest.mark.parametrize("name", LOSSY)
def test_a_new_plan_loses_nothing_of_what_was_kept(name: str) -> None:
    bound = CASES[name].sum_tolerance
    assert bound is not None
    assert max(run_ranks(2, with_a_new_plan, name)) < 1.5 * bound


def without_any_communication(rank: int, world: int) -> bool:
    bucket = make_bucket(MATRICES)
    fill(bucket, rank, 0)
    future = noop_hook(None, bucket)
    assert future.done() and future.wait() is bucket.buffer()
    return torch.equal(bucket.buffer(), gradient_of(bucket, rank, 0))


def test_the_noop_hook_leaves_every_rank_its_own_gradients() -> None:
    assert run_ranks(2, without_any_communication) == [True, True]


def sparse_average(rank: int, world: int, name: str) -> torch.Tensor:
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), torch.ones(2, 3), (5, 3), check_invariants=True)
    bucket = GradBucket(index=0, buffer=sparse, gradients=[sparse], parameters=[sparse], is_last=True)
    before = sparse.to_dense()
    future = CASES[name].hook(CASES[name].make_state(), bucket)
    result = hook_result(future.wait(), bucket).to_dense()
    assert torch.equal(sparse.to_dense(), before), "it may be the parameter's own gradient, which a failed pass gives back"
    return result


@pytest.mark.parametrize("name", CASES)
def test_sparse_buckets_are_averaged_without_compression(name: str) -> None:
    expected = torch.zeros(5, 3)
    expected[:2], expected[2] = 0.5, 1.0
    for result in run_ranks(2, sparse_average, name):
        assert torch.equal(result, expected)


def sparse_average_of_one(rank: int, world: int, dtype: torch.dtype) -> torch.Tensor:
    """Of two rows that rank 0 has, and the other rank has none."""
    indices, rows = torch.tensor([[1, 3]]), torch.arange(6.0).view(2, 3).to(dtype)
    if rank == 1:
        indices, rows = indices[:, :0], rows[:0]
    sparse = torch.sparse_coo_tensor(indices, rows, (5, 3), check_invariants=True)
    bucket = GradBucket(index=0, buffer=sparse, gradients=[sparse], parameters=[sparse], is_last=True)
    return hook_result(fp16_compress_hook(None, bucket).wait(), bucket).to_dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_sparse_buckets_of_any_dtype_are_averaged_where_a_rank_has_no_rows(dtype: torch.dtype) -> None:
    expected = torch.zeros(5, 3, dtype=dtype)
    expected[[1, 3]] = torch.arange(6.0).view(2, 3).to(dtype) / 2
    for result in run_ranks(2, sparse_average_of_one, dtype):
        assert torch.equal(result, expected)


def overflow_then_fine(rank: int, world: int) -> bool:
    """Gradients that float16 holds, and whose right factor it does not; then small ones."""
    bucket = make_bucket(Layout(((64, 64),), dtype=torch.float16))
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=0)
    values = []
    for size in (4e4, 1.0):
        bucket.reset()
        # One column of these, so that the left factor is in range.
        bucket.buffer().zero_().view(64, 64)[:, 0] = size
        values.append(hook_result(powerSGD_hook(state, bucket).wait(), bucket).clone())
    assert not values[0].isfinite().all(), "the fault fired"
    return bool(values[1].isfinite().all()) and bool(state.residuals.named()["layer0.0"].isfinite().all())


def test_a_factor_that_overflows_on_its_way_leaves_no_trace() -> None:
    assert run_ranks(2, overflow_then_fine) == [True, True]


def not_finite_then_fine(rank: int, world: int, name: str) -> tuple[bool, list[float]]:
    buckets, state = make_buckets((MATRICES,)), CASES[name].make_state()
    case, bucket = CASES[name], buckets[0]
    fill(bucket, rank, 0)
    if rank == 1:
        bucket.gradients()[0][3, 5] = torch.nan
    result = hook_result(case.hook(state, bucket).wait(), bucket)
    told = not bool(result[: 24 * 40].isfinite().all())
    bucket.reset()
    errors = []
    for step in range(1, 4):
        (result,) = run_step(case, state, buckets, rank, step)
        errors.append(relative_error(result, mean_of(bucket, world, step)))
    return told, errors


@pytest.mark.parametrize("name", CASES)
def test_nan_on_one_rank_is_seen_by_all_and_is_gone_in_the_next_step(name: str) -> None:
    for told, errors in run_ranks(2, not_finite_then_fine, name):
        assert told
        assert max(errors) < (1.5 if name in LOSSY else CASES[name].tolerance)


def waits_at_once(rank: int, world: int, name: str) -> Results:
    """As a hook does that wraps another and waits inside: each bucket is done before the next one begins."""
    case, buckets = CASES[name], make_buckets((MATRICES, WIDE, IMAGES))
    state, steps = case.make_state(), []
    for step in range(3):
        results = []
        for bucket in buckets:
            fill(bucket, rank, step)
            future = case.hook(state, bucket).then(lambda done: done.value())
            results.append(hook_result(future.wait(), bucket).clone())
        steps.append(results)
    return steps


@pytest.mark.parametrize("name", LOSSY)
def test_waiting_for_each_bucket_at_once_gives_the_same_and_does_not_hang(name: str) -> None:
    layouts = (MATRICES, WIDE, IMAGES)
    together = run_ranks(2, several_steps, name, layouts, 3)
    one_by_one = run_ranks(2, waits_at_once, name)
    assert_identical([together[0], *one_by_one])
