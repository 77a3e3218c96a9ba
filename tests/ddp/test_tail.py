"""What a bucket carries beside its gradients: facts of every rank that survive being added up, in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.ddp.buckets.tail import Reading, Tail, check_weight, exact_ranks
from phalanx.errors import ConfigError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
Write = Callable[[Tail, torch.Tensor], None]


def summed(
    tail: Tail, writes: Sequence[Write | None], dtype: torch.dtype = torch.float32, step: int = 0, scale: float = 1.0
) -> torch.Tensor:
    """What an all-reduce makes of the tails of `len(writes)` ranks, each added in the dtype of the bucket."""
    total = torch.zeros(tail.numel, dtype=dtype)
    for write in writes:
        own = torch.empty(tail.numel, dtype=dtype)
        tail.write(own, step)
        if write is not None:
            write(tail, own)
        total += own
    return total * scale


def made(world: int, num_params: int = 3, num_late: int = 2, scale: float = 1.0, signature: str = "plan/1") -> Tail:
    return Tail(signature, num_params, num_late, world, scale)


def read(world: int, *writes: Write | None, dtype: torch.dtype = torch.float32) -> Reading:
    tail = made(world)
    return tail.read(summed(tail, [*writes, *[None] * (world - len(writes))], dtype), 0)


# -- health ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_a_healthy_tail_is_seen_by_one_comparison(dtype: torch.dtype, scale: float) -> None:
    tail = made(4, scale=scale)
    for step in range(20):
        total = summed(tail, [None] * 4, dtype, step, scale)
        assert tail.is_healthy(total, step)
        reading = tail.read(total, step)
        assert reading == Reading(True, 4.0, 0, False, (), (4, 4, 4))


@pytest.mark.parametrize(
    "write",
    [
        lambda tail, out: tail.write_usage(out, [1, 0, 1]),
        lambda tail, out: tail.write_weight(out, 2.0),
        lambda tail, out: tail.write_weight(out, 1e-12),
        lambda tail, out: tail.write_weight(out, 0.0),
        lambda tail, out: tail.write_nested(out),
        lambda tail, out: tail.write_given_up(out),
        lambda tail, out: tail.write_late(out, [1]),
    ],
    ids=["unused", "weight", "tiny weight", "no weight", "nested", "given up", "late"],
)
def test_whatever_one_rank_says_makes_it_another_tail(write: Write) -> None:
    tail = made(3)
    assert not tail.is_healthy(summed(tail, [None, write, None]), 0)


def test_ranks_at_another_step_bucket_or_plan_are_out_of_step() -> None:
    for other in (made(2, signature="plan/2"), made(2, signature="nalp/1")):
        mine = made(2)
        total = summed(mine, [None], step=5) + summed(other, [None], step=5)
        assert not mine.is_healthy(total, 5) and not mine.read(total, 5).in_step
    tail = made(2)
    for gap in range(1, 8):
        total = summed(tail, [None], step=5) + summed(tail, [None], step=5 + gap)
        assert not tail.is_healthy(total, 5) and not tail.read(total, 5).in_step, f"{gap} steps apart"


def test_the_tail_of_late_parts_is_not_taken_for_that_of_its_bucket() -> None:
    tail = made(2)
    late = tail.of_late_parts()
    assert late.numel == tail.numel
    total = summed(tail, [None]) + summed(late, [None])
    assert not tail.read(total, 0).in_step and not late.read(total, 0).in_step
    assert late.is_healthy(summed(late, [None, None]), 0)


# -- what ranks say --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_fact_is_read_as_it_was_written_beside_all_others(dtype: torch.dtype) -> None:
    def first(tail: Tail, out: torch.Tensor) -> None:
        tail.write_usage(out, [0, 1, 0])
        tail.write_weight(out, 2.5)
        tail.write_late(out, [1])

    def second(tail: Tail, out: torch.Tensor) -> None:
        tail.write_usage(out, [0, 0, 1])
        tail.write_nested(out)
        tail.write_given_up(out)

    # The third rank has nothing to say: weight 1, all used.
    assert read(3, first, second, dtype=dtype) == Reading(True, 4.5, 1, True, (1,), (1, 2, 2))


def test_late_buckets_of_several_ranks_are_put_together() -> None:
    tail = made(3, num_late=5)
    writes: list[Write | None] = [lambda t, out: t.write_late(out, [0, 3]), None, lambda t, out: t.write_late(out, [3, 4])]
    assert tail.read(summed(tail, writes), 0).late_buckets == (0, 3, 4)


def test_given_up_counts_the_ranks() -> None:
    for count in range(4):
        reading = read(3, *[lambda tail, out: tail.write_given_up(out)] * count)
        assert reading.num_given_up == count


# -- weights ---------------------------------------------------------------------------------------


def total_weight(weights: Sequence[float], dtype: torch.dtype = torch.float32) -> float:
    writes: list[Write | None] = [lambda tail, out, w=weight: tail.write_weight(out, w) for weight in weights]
    return read(len(weights), *writes, dtype=dtype).total_weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "weights",
    [[0.0, 0.0], [3, 5], [1e-7, 1e-7], [1e-5, 3e-5], [3e5, 2e5], [7e16, 1], [2**53, 2**55], [1 / 3, 2 / 3], [1, 0.0]],
    ids=str,
)
def test_the_sum_of_weights_does_not_depend_on_the_dtype(weights: list[float], dtype: torch.dtype) -> None:
    exact = float(sum(Fraction(weight) for weight in weights))
    assert total_weight(weights, dtype) == pytest.approx(exact, rel=1e-9)


@given(st.lists(st.floats(1e-12, 7e16), min_size=1, max_size=6))
def test_the_sum_of_weights_is_exact_over_the_whole_range(weights: list[float]) -> None:
    # Fixed point of 72 fraction bits keeps eight digits of the least weight, and all of every other one that counts.
    exact = sum((Fraction(weight) for weight in weights), Fraction(0))
    assert total_weight(weights, torch.bfloat16) == pytest.approx(float(exact), rel=1e-8)


def test_whole_weights_are_added_up_to_the_last_unit() -> None:
    assert total_weight([2**53 + 2, 2**52, 4]) == float(2**53 + 2**52 + 6)
    assert total_weight([7 * 10**16, 8]) == float(7 * 10**16 + 8)


def test_ranks_without_a_weight_count_one() -> None:
    assert read(4, lambda tail, out: tail.write_weight(out, 5)).total_weight == 8.0


@pytest.mark.parametrize("weight", [0, 1e-12, 0.5, 1, 10**9, 7e16, True, -1, 1e-13, 2.0**56, float("nan"), "3", None])
def test_weights_are_refused_outside_of_what_the_tail_can_carry(weight: object) -> None:
    fits = type(weight) in (int, float) and (weight == 0 or 1e-12 <= weight < 2**56)  # type: ignore[operator]
    if fits:
        check_weight(weight)  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigError, match="weight"):
            check_weight(weight)  # type: ignore[arg-type]


# -- how many ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "ranks"), [(torch.bfloat16, 256), (torch.float16, 2048), (torch.float32, 2**24)])
def test_the_promised_number_of_ranks_is_the_last_that_a_dtype_adds_up_exactly(dtype: torch.dtype, ranks: int) -> None:
    assert exact_ranks(dtype) == ranks
    count = torch.tensor(float(ranks - 1), dtype=dtype)
    assert (count + 1).item() == ranks
    assert (count + 1 + 1).item() != ranks + 1, "one more is lost"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_facts_of_as_many_ranks_as_promised_are_exact(dtype: torch.dtype) -> None:
    world = min(exact_ranks(dtype), 300)
    tail = made(world, num_params=2)

    def odd(tail: Tail, out: torch.Tensor) -> None:
        tail.write_weight(out, 3)
        tail.write_usage(out, [1, 0])

    writes: list[Write | None] = [odd if rank % 2 else None for rank in range(world)]
    reading = tail.read(summed(tail, writes, dtype), 0)
    assert reading == Reading(True, 2.0 * world, 0, False, (), (world, world // 2))
    assert tail.is_healthy(summed(tail, [None] * world, dtype), 0)
