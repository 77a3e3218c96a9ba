"""Buckets made by hand, filled with gradients that every rank can compute for every other rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.bucket import GradBucket


@dataclass(frozen=True)
class Layout:
    """The parameters of one bucket: shapes, one dtype, and which of them lie as channels_last."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    channels_last: frozenset[int] = frozenset()

    @property
    def numel(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


MATRICES = Layout(((24, 40), (40,), (8, 4, 3, 3), (7,)))
WIDE = Layout(((64, 16), (16, 64), (5,)))
IMAGES = Layout(((8, 6, 3, 3), (12, 20)), channels_last=frozenset({0}))
HALF = Layout(((32, 24), (24,)), dtype=torch.bfloat16)
DOUBLE = Layout(((20, 30), (3, 5)), dtype=torch.float64)
COMPLEX = Layout(((16, 20), (9,)), dtype=torch.complex64)
EMPTY = Layout(((0, 4), (0,)))
# Large enough for the transports' ways of moving large tensors.
LARGE = Layout(((400, 250), (250,)))
MIXED = (MATRICES, HALF, DOUBLE, COMPLEX, LARGE, IMAGES, EMPTY, WIDE)


def make_bucket(layout: Layout, index: int = 0, is_last: bool = True, named: bool = True) -> GradBucket:
    """A bucket of zeros whose parameters are zeros as well."""
    buffer = torch.zeros(layout.numel, dtype=layout.dtype)
    parameters, gradients, offset = [], [], 0
    for nth, shape in enumerate(layout.shapes):
        parameter = torch.zeros(shape, dtype=layout.dtype)
        if nth in layout.channels_last:
            parameter = parameter.to(memory_format=torch.channels_last)
        parameters.append(torch.nn.Parameter(parameter))
        gradients.append(buffer.as_strided(shape, parameter.stride(), offset))
        offset += parameter.numel()
    names = [f"layer{index}.{nth}" for nth in range(len(parameters))] if named else None
    return GradBucket(
        index=index, buffer=buffer, gradients=gradients, parameters=parameters, is_last=is_last, names=names
    )


def make_buckets(layouts: Sequence[Layout]) -> list[GradBucket]:
    return [make_bucket(one, nth, nth == len(layouts) - 1) for nth, one in enumerate(layouts)]


def gradient_of(bucket: GradBucket, rank: int, step: int) -> torch.Tensor:
    """The flat gradient that `rank` has for this bucket in `step`: a share that all steps have, and noise."""
    like = bucket.origin()
    wide = torch.complex128 if like.is_complex() else torch.float64

    def draw(*key: int) -> torch.Tensor:
        seed = sum(part * factor for part, factor in zip(key, (1, 101, 10_007), strict=True))
        return torch.randn(like.numel(), generator=torch.Generator().manual_seed(seed), dtype=wide)

    return (draw(bucket.index(), rank, 0) + 0.3 * draw(bucket.index(), rank, step + 1)).to(like.dtype)


def mean_of(bucket: GradBucket, world: int, step: int) -> torch.Tensor:
    """The true average, in the widest precision."""
    total = sum(gradient_of(bucket, rank, step).to(torch.complex128) for rank in range(world))
    assert isinstance(total, torch.Tensor)
    return total / world


def fill(bucket: GradBucket, rank: int, step: int) -> None:
    bucket.reset()
    bucket.buffer().copy_(gradient_of(bucket, rank, step))


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """‖result - expected‖ / ‖expected‖, 0 for empty ones."""
    if expected.numel() == 0:
        return 0.0
    wide = result.to(torch.complex128)
    return float((wide - expected).norm() / expected.norm())
