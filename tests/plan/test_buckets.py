"""The plan is pure: same input same plan, every element once, any caps, any order."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.errors import PlanError
from phalanx.plan import BucketCaps, BucketPlan, ParamSpec, build_plan, replan, specs_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@st.composite
def some_specs(draw: st.DrawFn) -> tuple[ParamSpec, ...]:
    count = draw(st.integers(0, 30))
    specs = []
    for index in range(count):
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        device = draw(st.sampled_from(["cpu", "cuda", "cuda#1"]))
        sparse = draw(st.booleans()) and draw(st.booleans())
        stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        specs.append(ParamSpec(f"p{index}", shape, stride, dtype, device, sparse))
    return tuple(specs)


some_caps = st.lists(st.integers(0, 100_000), min_size=1, max_size=4).map(lambda caps: BucketCaps(tuple(caps)))


@given(specs=some_specs(), caps=some_caps, data=st.data())
@settings(max_examples=200, deadline=None)
def test_every_element_lies_in_exactly_one_bucket_of_its_kind(
    specs: tuple[ParamSpec, ...], caps: BucketCaps, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(specs))))
    plan = build_plan(specs, caps, order)
    assert sorted(plan.order) == list(range(len(specs)))
    nth: dict[tuple[torch.dtype, str], int] = {}
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        offset = 0
        for slot in bucket.slots:
            spec = specs[slot.param]
            assert (slot.offset, slot.numel) == (offset, spec.numel)
            assert (spec.dtype, spec.device, spec.sparse) == (bucket.dtype, bucket.device, bucket.sparse)
            offset += slot.numel
        assert offset == bucket.numel
        if bucket.sparse:
            assert len(bucket.slots) == 1
        else:
            kind = (bucket.dtype, bucket.device)
            nth[kind] = nth.get(kind, -1) + 1
            assert bucket.num_bytes <= max(caps.caps_bytes) or sum(slot.numel > 0 for slot in bucket.slots) <= 1


@given(specs=some_specs(), caps=some_caps)
@settings(max_examples=100, deadline=None)
def test_same_input_gives_the_same_plan_and_json_goes_both_ways(
    specs: tuple[ParamSpec, ...], caps: BucketCaps
) -> None:
    plan = build_plan(specs, caps)
    assert build_plan(list(specs), caps) == plan
    again = BucketPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.hash == plan.hash
    assert str(len(plan.buckets)) in str(plan)


@given(specs=some_specs(), caps=some_caps, data=st.data())
@settings(max_examples=100, deadline=None)
def test_buckets_are_ordered_by_when_they_fill(
    specs: tuple[ParamSpec, ...], caps: BucketCaps, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(specs))))
    plan = build_plan(specs, caps, order)
    filled = [max(order.index(slot.param) for slot in bucket.slots) for bucket in plan.buckets]
    assert filled == sorted(filled)


def _vectors(*sizes: int) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(name, (size,), (1,), torch.float32, "cpu") for name, size in zip("abcdefgh", sizes))  # noqa: B905


def test_the_worked_example_of_the_docstring() -> None:
    plan = build_plan(_vectors(3, 5, 2, 9), BucketCaps((24, 36)))
    names = [[plan.specs[slot.param].name for slot in bucket.slots] for bucket in plan.buckets]
    assert names == [["d"], ["c", "b"], ["a"]]


def test_small_parameters_wait_for_company_instead_of_travelling_alone() -> None:
    plan = build_plan(_vectors(4, 4, 1, 8, 1, 8, 1), BucketCaps((32,)))
    names = ["".join(plan.specs[slot.param].name for slot in bucket.slots) for bucket in plan.buckets]
    assert names == ["f", "d", "gecb", "a"]


def test_defaults_are_a_first_bucket_of_1_mib_and_then_25() -> None:
    mib = 2**18
    plan = build_plan(_vectors(mib * 20, mib * 20, mib // 2, mib // 2))
    assert [bucket.num_bytes for bucket in plan.buckets] == [2**20, 20 * 2**20, 20 * 2**20]


def test_replanning_follows_the_observed_order_and_puts_the_unseen_last() -> None:
    plan = build_plan(_vectors(1, 1, 1, 1), BucketCaps((4,)))
    assert plan.order == (3, 2, 1, 0)
    assert replan(plan, [1, 3]).order == (1, 3, 2, 0)
    assert replan(plan, plan.order) == plan
    assert replan(plan, [1, 3]).hash != plan.hash


def test_a_model_gives_tied_parameters_once_and_keeps_dense_strides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    specs = specs_of(model.named_parameters())
    assert [spec.name for spec in specs] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"]
    assert specs[0].stride == model[0].weight.stride() != (27, 9, 3, 1)


def test_layouts_with_gaps_or_overlaps_become_contiguous() -> None:
    odd = [("gap", torch.empty(4, 8)[:, ::2]), ("same", torch.empty(4).expand(3, 4)), ("none", torch.empty(0, 3))]
    assert [spec.stride for spec in specs_of(odd)] == [(4, 1), (4, 1), (3, 1)]


def test_devices_are_numbered_within_the_model() -> None:
    tensors = [(name, torch.empty(1, device=f"meta:{index}")) for name, index in (("a", 3), ("b", 1), ("c", 3))]
    devices = [spec.device for spec in specs_of(tensors)]
    assert devices[0] == devices[2] and devices[0] == "meta"


def test_nothing_to_plan_is_a_plan_without_buckets() -> None:
    plan = build_plan([])
    assert plan.buckets == () and "0 parameters" in str(plan)


def test_a_huge_model_is_planned_quickly() -> None:
    specs = _vectors(1) * 0 + tuple(ParamSpec(f"w{i}", (2**20,), (1,), torch.float32, "cpu") for i in range(20_000))
    plan = build_plan(specs)
    assert sum(bucket.numel for bucket in plan.buckets) == 20_000 * 2**20


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.pop("specs"),
        lambda value: value.update(version=99),
        lambda value: value["buckets"].append([0]),
        lambda value: value["buckets"].append([7]),
        lambda value: value["buckets"].append([]),
        lambda value: value["specs"][0].update(dtype="float33"),
        lambda value: value.update(buckets=[[0], [1, 2]]),
    ],
)
def test_malformed_plans_are_refused(spoil: object) -> None:
    specs = (*_vectors(1, 2), ParamSpec("z", (1,), (1,), torch.float64, "cpu"))
    value = build_plan(specs).to_json()
    spoil(value)  # type: ignore[operator]
    with pytest.raises(PlanError):
        BucketPlan.from_json(value)


def test_bad_caps_and_orders_are_refused() -> None:
    with pytest.raises(PlanError, match="caps"):
        BucketCaps(())
    with pytest.raises(PlanError, match="caps"):
        BucketCaps((-1,))
    with pytest.raises(PlanError, match="once"):
        build_plan(_vectors(1, 2), order=[0, 0])
