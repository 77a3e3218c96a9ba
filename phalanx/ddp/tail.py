"""What a bucket carries beside its gradients: numbers that survive being summed over ranks.

The sum over ranks is all that an all-reduce offers, so each fact is written as zeros and ones, one
element a bit, in the bucket's own dtype. After the sum an element holds how many ranks said one:

    signature   bits of (plan, bucket, step): every sum must be 0 or world, else ranks are out of step
    weighted    how many ranks gave a weight of their own
    weight      bits of the weight in fixed point, so that the exact sum of weights can be put together
    late        in the last bucket only, one a bucket: gradients that arrived after their bucket had left;
                and one more: a nested backward was seen for the first time
    usage       one a parameter: how many ranks used it

On a healthy step every rank writes the same template, and one comparison with world × template says
that all is well. Pure: knows no process group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from ..errors import ConfigError

_SIGNATURE_BITS = 16
_STEP_PERIOD = 8
_WEIGHT_BITS = 64
_WEIGHT_FRACTION_BITS = 20

# The largest count of ranks that each dtype adds up without rounding.
_EXACT_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11}


def exact_ranks(dtype: torch.dtype) -> int:
    """Up to how many ranks a tail of this dtype may have."""
    return _EXACT_RANKS.get(dtype, 2**24)


def check_weight(weight: float) -> None:
    """Refuse a weight that no mean can be made of."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"a weight is a number of samples or tokens, got {weight!r}. Give an int or a float.")
    if not 0 <= weight < 2 ** (_WEIGHT_BITS - _WEIGHT_FRACTION_BITS):
        raise ConfigError(f"a weight must be finite and not negative, got {weight!r}. Give 0 for a rank without data.")


@dataclass(frozen=True, slots=True)
class Reading:
    """A tail after reduction that was not the healthy one."""

    in_step: bool
    total_weight: float
    late_buckets: tuple[int, ...]
    nested: bool
    usage: tuple[int, ...]


class Tail:
    """The layout of one bucket's tail and the templates to write and to compare with."""

    def __init__(self, signature: str, num_params: int, num_late: int, world: int, scale: float = 1.0) -> None:
        """`signature` names plan and bucket; `scale` is what the transport multiplies the sum with."""
        self.world = world
        self._scale = scale
        self._late_at = _SIGNATURE_BITS + 1 + _WEIGHT_BITS
        self._usage_at = self._late_at + num_late
        self.numel = self._usage_at + num_params
        self._healthy = [self._compose(f"{signature}/{step}") for step in range(_STEP_PERIOD)]
        self._written: dict[torch.dtype, list[torch.Tensor]] = {}
        self._expected: dict[torch.dtype, list[torch.Tensor]] = {}

    def _compose(self, signature: str) -> torch.Tensor:
        digest = int.from_bytes(hashlib.sha256(signature.encode()).digest()[: _SIGNATURE_BITS // 8], "big")
        values = torch.zeros(self.numel, dtype=torch.float64)
        values[:_SIGNATURE_BITS] = torch.tensor([digest >> bit & 1 for bit in range(_SIGNATURE_BITS)])
        values[self._usage_at :] = 1.0
        return values

    def _templates(self, like: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if like.dtype not in self._written:
            summed = [values * self.world * self._scale for values in self._healthy]
            self._written[like.dtype] = [values.to(like.device, like.dtype) for values in self._healthy]
            self._expected[like.dtype] = [values.to(like.device, like.dtype) for values in summed]
        return self._written[like.dtype], self._expected[like.dtype]

    def write(self, out: torch.Tensor, step: int) -> None:
        """The healthy tail: every parameter used, default weight, nothing late."""
        out.copy_(self._templates(out)[0][step % _STEP_PERIOD])

    def write_usage(self, out: torch.Tensor, used: bytearray | list[int]) -> None:
        out[self._usage_at :] = torch.tensor(list(used), dtype=out.dtype, device=out.device)

    def write_weight(self, out: torch.Tensor, weight: float) -> None:
        fixed = round(weight * 2**_WEIGHT_FRACTION_BITS)
        bits = [1, *(fixed >> bit & 1 for bit in range(_WEIGHT_BITS))]
        out[_SIGNATURE_BITS : self._late_at] = torch.tensor(bits, dtype=out.dtype, device=out.device)

    def write_late(self, out: torch.Tensor, buckets: set[int], nested: bool) -> None:
        for bucket in buckets:
            out[self._late_at + bucket] = 1
        if nested:
            out[self._usage_at - 1] = 1

    def is_healthy(self, summed: torch.Tensor, step: int) -> bool:
        """Whether every rank wrote the healthy tail of this very step. One comparison."""
        return torch.equal(summed, self._templates(summed)[1][step % _STEP_PERIOD])

    def read(self, summed: torch.Tensor, step: int) -> Reading:
        """What the ranks said, in words."""
        real = summed.real if summed.is_complex() else summed
        counts = [round(value / self._scale) for value in real.tolist()]
        signature = (self._healthy[step % _STEP_PERIOD][:_SIGNATURE_BITS] * self.world).tolist()
        fixed = sum(count << bit for bit, count in enumerate(counts[_SIGNATURE_BITS + 1 : self._late_at]))
        default = self.world - counts[_SIGNATURE_BITS]
        return Reading(
            in_step=counts[:_SIGNATURE_BITS] == signature,
            total_weight=default + fixed / 2**_WEIGHT_FRACTION_BITS,
            late_buckets=tuple(b for b, count in enumerate(counts[self._late_at : self._usage_at - 1]) if count),
            nested=self._usage_at > self._late_at and counts[self._usage_at - 1] > 0,
            usage=tuple(counts[self._usage_at :]),
        )
