"""The bucket plan: an immutable value that reducer, ZeRO, compiler and checkpoint all share.

Worked example. Parameters of 4-byte elements, in registration order a[3] b[5] c[2] d[9], caps
first=24 bytes, then 36 bytes. Gradients become ready roughly in reverse, so:

    bucket 0   d            36 bytes: larger than its cap of 24, therefore alone
    bucket 1   c b          28 bytes: a (12 more) would pass the cap of 36, so c b leaves
    bucket 2   a            12 bytes

Slots lie back to back in the order of the bucket. Must not know of process groups or tensors' data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from ..errors import PlanError
from .params import ParamSpec

MIB = 1024 * 1024
DEFAULT_CAP_BYTES = 25 * MIB
DEFAULT_FIRST_CAP_BYTES = 1 * MIB


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """Size limits: the i-th bucket of a dtype and device obeys `caps_bytes[i]`, later ones the last."""

    caps_bytes: tuple[int, ...] = (DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES)

    def __post_init__(self) -> None:
        # `nan` is no cap: it is neither below 0 nor above it, and all gradients would travel in one bucket.
        given: Any = self.caps_bytes
        if not given or not all(isinstance(cap, Real) and float(cap) >= 0 for cap in given):
            raise PlanError(
                f"bucket caps must be non-empty and non-negative, got {self.caps_bytes}. "
                "Give bucket_cap_mb >= 0 or a list of such numbers."
            )

    def at(self, index: int) -> int:
        return self.caps_bytes[min(index, len(self.caps_bytes) - 1)]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lies: `param` indexes the plan's specs, offsets in elements."""

    param: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that travel together: one dtype, one device; a sparse gradient travels alone."""

    index: int
    dtype: torch.dtype
    device: str
    slots: tuple[Slot, ...]
    sparse: bool = False

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """The ordered buckets over `specs` (registration order). Compare plans by `hash`."""

    specs: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    caps: BucketCaps = field(default=BucketCaps())

    def __post_init__(self) -> None:
        # Checked here, once for all who make plans (the rule, a file, an observed order): a parameter in no bucket would
        # never be averaged, and one in two would be averaged twice, neither with an error.
        seen = sorted(slot.param for bucket in self.buckets for slot in bucket.slots)
        if seen != list(range(len(self.specs))):
            raise PlanError(
                f"a plan must hold each of its {len(self.specs)} parameters in exactly one bucket, "
                f"got {len(seen)} slots over {len(set(seen))} parameters."
            )

    @cached_property
    def hash(self) -> str:
        """Content hash: equal on two ranks exactly when their plans are equal."""
        # Piece by piece: the text of a model with thousands of parameters is larger than the plan itself.
        digest = hashlib.sha256(_canonical(list(self.caps.caps_bytes)))
        for spec in self.specs:
            digest.update(_canonical(spec.to_json()))
        # Which parameters, in which order, is all: offsets, dtypes and sizes follow from the specs.
        for bucket in self.buckets:
            digest.update(_canonical([slot.param for slot in bucket.slots]))
        return digest.hexdigest()

    @property
    def order(self) -> tuple[int, ...]:
        """Parameter indices in the order in which their gradients travel."""
        return tuple(slot.param for bucket in self.buckets for slot in bucket.slots)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "caps_bytes": list(self.caps.caps_bytes),
            "specs": [spec.to_json() for spec in self.specs],
            "buckets": [[slot.param for slot in bucket.slots] for bucket in self.buckets],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BucketPlan:
        try:
            specs = tuple(ParamSpec.from_json(spec) for spec in value["specs"])
            caps = BucketCaps(tuple(value["caps_bytes"]))
            groups = [list(group) for group in value["buckets"]]
            version = value["version"]
            fits = all(0 <= param < len(specs) for group in groups for param in group)
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"not a plan: {error!r}. Give what BucketPlan.to_json returned.") from error
        if version != 1 or not fits or not all(groups):
            raise PlanError(
                f"not a plan this version can read: version {version}, {len(groups)} buckets over "
                f"{len(specs)} parameters. Give what BucketPlan.to_json returned."
            )
        return cls(specs, tuple(_bucket(i, group, specs) for i, group in enumerate(groups)), caps)

    def __str__(self) -> str:
        total = sum(spec.num_bytes for spec in self.specs)
        lines = [
            f"plan {self.hash[:12]}: {len(self.specs)} parameters, {len(self.buckets)} buckets, "
            f"{total / MIB:.2f} MiB",
            f"{'bucket':>6}  {'dtype':<10} {'device':<8} {'params':>6} {'elements':>12} {'MiB':>9}  first … last",
        ]
        for bucket in self.buckets:
            first, last = self.specs[bucket.slots[0].param].name, self.specs[bucket.slots[-1].param].name
            span = first if len(bucket.slots) == 1 else f"{first} … {last}"
            dtype = str(bucket.dtype).removeprefix("torch.") + ("*" if bucket.sparse else "")
            lines.append(
                f"{bucket.index:>6}  {dtype:<10} {bucket.device:<8} {len(bucket.slots):>6} "
                f"{bucket.numel:>12} {bucket.num_bytes / MIB:>9.3f}  {span}"
            )
        if any(bucket.sparse for bucket in self.buckets):
            lines.append("* sparse gradients")
        return "\n".join(lines)


def _canonical(value: Any) -> bytes:
    # One text per value on every rank, whatever the order in which its dicts were filled; the line's end keeps two values
    # from reading like one.
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _bucket(index: int, params: Sequence[int], specs: Sequence[ParamSpec]) -> Bucket:
    slots, offset = [], 0
    for param in params:
        slots.append(Slot(param, offset, specs[param].numel))
        offset += specs[param].numel
    first = specs[params[0]]
    # One collective has one dtype and one device, and nobody knows beforehand how long a sparse gradient is.
    kinds = {(specs[p].dtype, specs[p].device, specs[p].sparse) for p in params}
    if len(kinds) != 1 or (first.sparse and len(params) != 1):
        raise PlanError(
            f"bucket {index} mixes dtypes, devices or sparse gradients: "
            f"{', '.join(specs[p].name for p in params)}. Give each kind its own bucket."
        )
    return Bucket(index, first.dtype, first.device, tuple(slots), first.sparse)


class _Filling:
    """The open bucket of one dtype and device while a plan is being built."""

    def __init__(self) -> None:
        self.params: list[int] = []
        self.num_bytes = 0
        self.num_closed = 0

    def close(self) -> list[int]:
        params, self.params, self.num_bytes = self.params, [], 0
        self.num_closed += 1
        return params


def _check_order(order: Sequence[int], num_params: int) -> None:
    if sorted(order) != list(range(num_params)):
        raise PlanError(
            f"an order must name each of {num_params} parameters once, got {len(order)} entries, "
            f"{len(set(order))} distinct."
        )


def build_plan(
    specs: Sequence[ParamSpec], caps: BucketCaps | None = None, order: Sequence[int] | None = None
) -> BucketPlan:
    """The plan for `specs` under `caps`, filling buckets in `order` (default: reverse registration).

    Where the open bucket and the next parameter do not fit under the cap together, the open bucket
    leaves; if it is not even half full, a larger parameter leaves in its place and it stays open. So a
    parameter larger than the cap travels alone, and few small ones do. Buckets are ordered by when their last
    parameter comes in `order`: that is when they are full, and launching is strictly in plan order.
    """
    caps = BucketCaps() if caps is None else caps
    specs = tuple(specs)
    order = range(len(specs) - 1, -1, -1) if order is None else list(order)
    _check_order(order, len(specs))
    order = sorted(order, key=lambda param: specs[param].delayed)  # stable: each kind stays in its order
    position = {param: i for i, param in enumerate(order)}
    # Several are open at a time: layers of two dtypes may take turns, and closing one at every turn would make a bucket of
    # each parameter.
    open_buckets: dict[tuple[torch.dtype, str, bool], _Filling] = {}
    groups: list[list[int]] = []
    for param in order:
        spec = specs[param]
        if spec.sparse:
            groups.append([param])
            continue
        filling = open_buckets.setdefault((spec.dtype, spec.device, spec.delayed), _Filling())
        cap = caps.at(filling.num_closed)
        if filling.params and filling.num_bytes + spec.num_bytes > cap:
            if filling.num_bytes < min(spec.num_bytes, cap / 2):
                # It leaves at once and alone; the few small ones that wait are worth no collective of their own yet.
                groups.append([param])
                filling.num_closed += 1
                continue
            groups.append(filling.close())
        filling.params.append(param)
        filling.num_bytes += spec.num_bytes
    groups.extend(filling.close() for filling in open_buckets.values() if filling.params)
    # A bucket that is full while an earlier one is not has to wait for it, so the order is that of their last parameters.
    groups.sort(key=lambda group: position[group[-1]])
    return BucketPlan(specs, tuple(_bucket(i, group, specs) for i, group in enumerate(groups)), caps)


def plan_of(specs: Sequence[ParamSpec], groups: Sequence[Sequence[int]], caps: BucketCaps) -> BucketPlan:
    """The plan whose buckets are exactly `groups`, in that order; `caps` are what they were made for."""
    specs = tuple(specs)
    return BucketPlan(specs, tuple(_bucket(i, group, specs) for i, group in enumerate(groups)), caps)


def replan(plan: BucketPlan, ready: Sequence[int]) -> BucketPlan:
    """The plan for the observed order `ready`; parameters never seen ready keep their place at the end."""
    seen = set(ready)
    # Unused so far, on rank 0 at least: in front they would keep the first bucket waiting until backward ends.
    rest = [param for param in plan.order if param not in seen]
    return build_plan(plan.specs, plan.caps, [*ready, *rest])
