"""The division of a plan among ranks, against what it promises, for any sizes and numbers of ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan import BucketCaps, BucketPlan, ParamSpec, build_plan
from phalanx.plan.shards import (
    UNIT,
    Ownership,
    element_ownership,
    greedy_owners,
    loads_of,
    parameter_ownership,
    reslice,
    shard_bounds,
    shard_numel,
    slices_of,
)

SIZES = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 700)), min_size=1, max_size=12)
WORLDS = st.integers(1, 9)


def plan_for(sizes: list[int], cap_elements: int) -> BucketPlan:
    specs = [ParamSpec(f"p{i}", (size,), (1,), torch.float32, "cpu") for i, size in enumerate(sizes)]
    return build_plan(specs, BucketCaps((4 * cap_elements,)))


def owners_by_element(ownership: Ownership, param: int) -> list[int]:
    return [owned.rank for owned in ownership[param] for _ in range(owned.start, owned.stop)]


@given(SIZES, WORLDS, st.integers(1, 900))
def test_every_element_of_a_plan_has_one_owner(sizes: list[int], world: int, cap: int) -> None:
    ownership = element_ownership(plan_for(sizes, cap), world)
    for size, ranges in zip(sizes, ownership, strict=True):
        assert ranges[0].start == 0 and ranges[-1].stop == size
        assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
        assert all(0 <= owned.rank < world for owned in ranges)


@given(SIZES, WORLDS, st.integers(1, 900))
def test_ranks_own_equal_shares_of_every_bucket(sizes: list[int], world: int, cap: int) -> None:
    for bucket in plan_for(sizes, cap).buckets:
        bounds = [shard_bounds(bucket.numel, world, rank) for rank in range(world)]
        assert bounds[0][0] == 0 and bounds[-1][1] == bucket.numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
        assert all(end - begin <= shard_numel(bucket.numel, world) for begin, end in bounds)
        assert shard_numel(bucket.numel, world) * world - bucket.numel < world


@given(SIZES, WORLDS, st.integers(1, 900), st.sampled_from([None, UNIT, 3 * UNIT]))
def test_slices_are_what_a_rank_owns_cut_at_units(sizes: list[int], world: int, cap: int, max_numel: int | None) -> None:
    plan = plan_for(sizes, cap)
    ownership = element_ownership(plan, world)
    found: dict[int, list[int]] = {param: [-1] * size for param, size in enumerate(sizes)}
    for bucket in plan.buckets:
        for rank in range(world):
            for part in slices_of(bucket, world, rank, max_numel):
                size = sizes[part.param]
                assert part.begin <= part.start <= part.stop <= part.end <= size
                assert part.begin % UNIT == 0 or part.numel == 0
                assert part.end % UNIT == 0 or part.end == size or part.numel == 0
                assert max_numel is None or part.end - part.begin <= max_numel
                for element in range(part.start, part.stop):
                    assert found[part.param][element] == -1, "owned twice"
                    found[part.param][element] = rank
    assert all(found[param] == owners_by_element(ownership, param) for param in found)


@given(SIZES, WORLDS)
def test_whole_parameters_are_spread_by_size(sizes: list[int], world: int) -> None:
    owners = greedy_owners(sizes, world)
    loads = loads_of(parameter_ownership(sizes, owners), world)
    assert sum(loads) == sum(sizes)
    # The last parameter that the fullest rank got went to it when it had the least of all.
    assert max(loads) <= sum(sizes) / world + max(sizes)
    assert owners == greedy_owners(sizes, world)


@given(SIZES, WORLDS, WORLDS, st.integers(1, 900), st.integers(1, 900), st.booleans())
def test_moves_take_every_element_from_its_old_owner_to_its_new_one(
    sizes: list[int], world: int, other: int, cap: int, other_cap: int, whole: bool
) -> None:
    old = element_ownership(plan_for(sizes, cap), world)
    new = (
        parameter_ownership(sizes, greedy_owners(sizes, other))
        if whole
        else element_ownership(plan_for(sizes, other_cap), other)
    )
    for before, after in ((old, new), (new, old)):
        held = {param: owners_by_element(before, param) for param in range(len(sizes))}
        moved = {param: [False] * size for param, size in enumerate(sizes)}
        for move in reslice(before, after):
            for element in range(move.start, move.stop):
                assert not moved[move.param][element] and held[move.param][element] == move.source
                held[move.param][element] = move.target
                moved[move.param][element] = True
        assert all(all(flags) for flags in moved.values())
        assert all(held[param] == owners_by_element(after, param) for param in held)


def test_what_cannot_be_divided_is_refused() -> None:
    plan = plan_for([100, 200], 400)
    with pytest.raises(PlanError, match="largest slice must be a positive multiple"):
        slices_of(plan.buckets[0], 2, 0, UNIT + 1)
    with pytest.raises(PlanError, match="cannot re-slice 2 parameters into 1"):
        reslice(element_ownership(plan, 2), element_ownership(plan_for([100], 400), 2))
    with pytest.raises(PlanError, match="parameter 1 has 200 elements in one partition and 201"):
        reslice(element_ownership(plan, 2), element_ownership(plan_for([100, 201], 400), 2))
