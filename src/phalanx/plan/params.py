"""What a plan needs to know of a parameter, and nothing that only a live tensor could tell.

Must not know of buckets, ranks or process groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the plan sees it. `stride` is the layout its gradient has in the bucket.

    `device` is relative: the device's type, with `#1`, `#2` … for further devices of one model. Ranks
    on cuda:0 and cuda:1 thus hold equal plans. `delayed`: travels after everything that is not.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    sparse: bool = False
    delayed: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device,
            "sparse": self.sparse,
            "delayed": self.delayed,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ParamSpec:
        return cls(
            name=value["name"],
            shape=tuple(value["shape"]),
            stride=tuple(value["stride"]),
            dtype=getattr(torch, value["dtype"]),
            device=value["device"],
            sparse=value["sparse"],
            delayed=value.get("delayed", False),
        )


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides cover exactly numel elements without gaps or overlaps, in any order."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue  # whose stride means nothing, and may be any number
        if step != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of the gradients that autograd makes: the parameter's, unless the user has chosen another for them."""
    return param.grad_dtype or param.dtype


def lies_as(param: torch.Tensor, spec: ParamSpec) -> bool:
    """Whether a gradient that is laid out by `spec` lies in memory as its parameter does now.

    Users move models to another memory format after wrapping, and torch's fused optimizers step by memory, not by strides. A
    parameter with gaps or overlaps has no gradient that lies as it does.
    """
    stride = param.stride()
    return stride == spec.stride or not _is_dense(tuple(param.shape), stride)


def specs_of(
    named_parameters: Iterable[tuple[str, torch.Tensor]], sparse: Iterable[str] = (), delayed: Iterable[str] = ()
) -> tuple[ParamSpec, ...]:
    """The specs of parameters in the order given; `sparse` and `delayed` name those that are.

    A dense layout such as channels_last is kept; one with gaps or overlaps becomes contiguous.
    """
    sparse_names, delayed_names = frozenset(sparse), frozenset(delayed)
    devices: dict[torch.device, str] = {}
    specs = []
    for name, param in named_parameters:
        shape, stride = tuple(param.shape), tuple(param.stride())
        # In the bucket a gradient has as many elements as its parameter and no gaps, whatever the parameter's memory is.
        if prod(shape) == 0 or not _is_dense(shape, stride):
            stride = _contiguous(shape)
        if param.device not in devices:
            nth = sum(known.type == param.device.type for known in devices)
            devices[param.device] = param.device.type + (f"#{nth}" if nth else "")
        kind = (param.dtype, devices[param.device], name in sparse_names, name in delayed_names)
        specs.append(ParamSpec(name, shape, stride, *kind))
    return tuple(specs)
