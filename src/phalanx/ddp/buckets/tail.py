"""What a bucket carries beside its gradients: numbers that survive being summed over ranks.

The sum over ranks is all that an all-reduce offers, so each fact is written as zeros and ones, one element per bit, in
the bucket's own dtype. After the sum an element holds how many ranks said one:

    signature   bits of (wrapper, plan, bucket, step): every sum must be 0 or world, else ranks are out of step
    weighted    how many ranks gave a weight of their own
    weight      bits of the weight in fixed point, so that the exact sum of weights can be put together
    nested      this rank knows of a backward inside this backward, so that gradient may still come late
    given up    this rank's backward raised: what it sends only keeps the ranks in step
    not finite  this rank's gradients hold NaN or infinity; looked for only where somebody asks
    settings    bits of a digest of what ranks have to agree on beside the plan (in the first bucket; zeros elsewhere)
    late        in the last bucket only, one per bucket: gradient that arrived after its bucket had left
    usage       one per parameter: how many ranks used it

On a healthy step every rank writes the same template, and one comparison with world × template says
that all is well. Pure: knows no process group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...errors import ConfigError

_SIGNATURE_BITS = 16
SETTINGS_BITS = 16
_STEP_PERIOD = 8
# Token counts of the largest batches, and shares of a millionth of a millionth, keep eight digits.
_WEIGHT_BITS = 128
_WEIGHT_FRACTION_BITS = 72
_LEAST_WEIGHT = 1e-12

_WEIGHTED_AT = _SIGNATURE_BITS
_WEIGHT_AT = _WEIGHTED_AT + 1
_NESTED_AT = _WEIGHT_AT + _WEIGHT_BITS
_GIVEN_UP_AT = _NESTED_AT + 1
_NONFINITE_AT = _GIVEN_UP_AT + 1
_SETTINGS_AT = _NONFINITE_AT + 1
_LATE_AT = _SETTINGS_AT + SETTINGS_BITS

_Kind = tuple[torch.device, torch.dtype]

# The largest count of ranks that each dtype adds up without rounding.
_EXACT_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.complex32: 2**11}


def exact_ranks(dtype: torch.dtype) -> int:
    """Up to how many ranks a tail of this dtype may have."""
    return _EXACT_RANKS.get(dtype, 2**24)


def check_weight(weight: float) -> None:
    """Refuse a weight that no mean can be made of."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"a weight is a number of samples or tokens, got {weight!r}. Give an int or a float.")
    if not 0 <= weight < 2 ** (_WEIGHT_BITS - _WEIGHT_FRACTION_BITS):
        raise ConfigError(f"a weight must be finite and not negative, got {weight!r}. Give 0 for a rank without data.")
    if 0 < weight < _LEAST_WEIGHT:
        raise ConfigError(
            f"a weight must be 0 or at least {_LEAST_WEIGHT}, got {weight!r}. Only the ratio of weights counts: "
            "multiply all of them with the same number."
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """A tail after reduction that was not the healthy one."""

    in_step: bool
    total_weight: float
    num_given_up: int
    num_nested: int
    late_buckets: tuple[int, ...]
    usage: tuple[int, ...]


class Settings(Protocol):
    """What a tail carries for others. `digest` stays the same during a pass; 0 where there is nothing to agree on."""

    digest: int

    def differ(self, step: int) -> Exception | None:
        """The error for ranks whose digests differ, None if nothing comes of it. Every rank calls it."""


class Watch(Protocol):
    """Who asks whether a bucket's gradients are finite."""

    def look(self) -> torch.Tensor | int:
        """1 if what this rank is about to send is not finite, else 0."""

    def found(self, step: int) -> None:
        """Some rank sent what is not finite. Every rank calls it; it may raise."""

    def of_late_part(self, part: Any) -> Watch:
        """The same for `part`, the bucket of what came late for this one."""


@dataclass(slots=True)
class _Template:
    """The healthy tail of a step, as each rank writes it and as it comes back; and which digest is in it."""

    written: torch.Tensor
    expected: torch.Tensor
    digest: int = 0


class Tail:
    """The layout of one bucket's tail and the templates to write and to compare with."""

    def __init__(self, signature: str, num_params: int, num_late: int, world: int, scale: float = 1.0) -> None:
        """`signature` names plan and bucket; `scale` is what the transport multiplies the sum with."""
        self.world = world
        self._signature = signature
        self._scale = scale
        self._num_params = num_params
        self._usage_at = _LATE_AT + num_late
        self.numel = self._usage_at + num_params
        self.settings: Settings | None = None
        self.watch: Watch | None = None
        self._powers: torch.Tensor | None = None
        # By device and whether weights are given: the elements that must be as this rank expects them.
        self._vital: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self._templates: dict[_Kind, list[_Template]] = {}  # by kind of tensor, one per step

    def of_late_parts(self) -> Tail:
        """The tail of the bucket that carries what came late for this one."""
        return Tail(f"{self._signature}/late", self._num_params, self._usage_at - _LATE_AT, self.world, self._scale)

    def _bits(self, step: int) -> list[int]:
        words = f"{self._signature}/{step % _STEP_PERIOD}".encode()
        digest = int.from_bytes(hashlib.sha256(words).digest()[: _SIGNATURE_BITS // 8], "big")
        return [digest >> bit & 1 for bit in range(_SIGNATURE_BITS)]

    def _compose(self, step: int) -> torch.Tensor:
        values = torch.zeros(self.numel, dtype=torch.float64, device="cpu")
        values[:_SIGNATURE_BITS] = torch.tensor(self._bits(step), device="cpu")
        values[self._usage_at :] = 1.0
        return values

    def _template(self, like: torch.Tensor, step: int) -> _Template:
        kind = (like.device, like.dtype)
        templates = self._templates.get(kind)
        if templates is None:
            healthy = torch.stack([self._compose(step) for step in range(_STEP_PERIOD)])
            back = staged(healthy * self.world * self._scale, like)
            templates = self._templates[kind] = list(map(_Template, staged(healthy, like), back))
        template, digest = templates[step % _STEP_PERIOD], self.digest
        if digest != template.digest:
            # Changed in place: settings may change in every step (a schedule of learning rates).
            template.digest = digest
            bits = torch.tensor(_settings_bits(digest), dtype=torch.float64, device="cpu")
            template.written[_SETTINGS_AT:_LATE_AT] = staged(bits, like)
            template.expected[_SETTINGS_AT:_LATE_AT] = staged(bits * self.world * self._scale, like)
        return template

    def prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Have everything of a tail of this kind there that steps on a device need, which are not to make it."""
        self._template(torch.empty(0, dtype=dtype, device=device), 0)
        self._factors_on(device)

    @property
    def digest(self) -> int:
        """What this rank's settings are now."""
        return 0 if self.settings is None else self.settings.digest

    def expected(self, like: torch.Tensor, step: int) -> torch.Tensor:
        """What comes back if every rank writes the healthy tail of this step."""
        return self._template(like, step).expected

    def write(self, out: torch.Tensor, step: int) -> None:
        """The healthy tail: every parameter used, default weight, nothing late."""
        out.copy_(self._template(out, step).written)
        if self.watch is not None:
            seen = self.watch.look()
            if isinstance(seen, torch.Tensor) or seen:  # the template has a nought there, and writing one costs microseconds
                out[_NONFINITE_AT] = seen

    def write_usage(self, out: torch.Tensor, used: Sequence[int]) -> None:
        out[self._usage_at :] = torch.tensor(list(used), dtype=out.dtype, device=out.device)

    def write_weight(self, out: torch.Tensor, weight: float) -> None:
        fixed = round(weight * 2**_WEIGHT_FRACTION_BITS)
        bits = [1, *(fixed >> bit & 1 for bit in range(_WEIGHT_BITS))]
        out[_WEIGHTED_AT:_NESTED_AT] = staged(torch.tensor(bits, dtype=torch.float64, device="cpu"), out)

    def factor(self, summed: torch.Tensor) -> torch.Tensor:
        """What the mean is to be multiplied with for the weights that the ranks gave: computed where the tail is."""
        powers = self._factors_on(summed.device)
        said = (summed.real if summed.is_complex() else summed)[_WEIGHTED_AT:_NESTED_AT].to(powers.dtype) / self._scale
        # Of those who gave a weight, the weight; of the others 1. In this order: counted as 1 first and taken off again, a
        # small weight would be lost in the rounding.
        total = (self.world - said[0]) + (said[1:] * powers).sum()
        return torch.where(total > 0, self.world / total, torch.zeros_like(total))

    def _factors_on(self, device: torch.device) -> torch.Tensor:
        """What each element about weights stands for."""
        if self._powers is None or self._powers.device != device:
            powers = [2.0 ** (bit - _WEIGHT_FRACTION_BITS) for bit in range(_WEIGHT_BITS)]
            wide = torch.float32 if device.type == "mps" else torch.float64  # which has no double precision
            self._powers = staged(torch.tensor(powers, dtype=torch.float64), torch.empty(0, dtype=wide, device=device))
        return self._powers

    def soundness(self, summed: torch.Tensor, step: int, is_weighted: bool) -> torch.Tensor:
        """1 if the ranks belong together, NaN if not, on the device of the tail: times the mean, it voids a wrong one.

        Looks at what `LateChecks` raises for. Parameters that some rank did not use are none of it.
        """
        key = (summed.device, is_weighted)
        if key not in self._vital:
            vital = torch.ones(self.numel, device="cpu")
            vital[self._usage_at :] = 0.0
            vital[_NESTED_AT] = vital[_NONFINITE_AT] = 0.0
            if is_weighted:
                vital[_WEIGHTED_AT:_NESTED_AT] = 0.0
            self._vital[key] = staged(vital, torch.empty(0, dtype=torch.float32, device=summed.device)) > 0
        is_right = (summed == self.expected(summed, step)).logical_or(~self._vital[key]).all().to(torch.float32)
        return is_right / is_right  # nought by nought is not a number

    def write_nested(self, out: torch.Tensor) -> None:
        out[_NESTED_AT] = 1

    def write_given_up(self, out: torch.Tensor) -> None:
        out[_GIVEN_UP_AT] = 1

    def write_late(self, out: torch.Tensor, buckets: Iterable[int]) -> None:
        for bucket in buckets:
            out[_LATE_AT + bucket] = 1

    def is_healthy(self, summed: torch.Tensor, step: int) -> bool:
        """Whether every rank wrote the healthy tail of this very step. One comparison."""
        expected = self.expected(summed, step)
        if summed.is_complex():  # of half precision, which torch compares as reals only
            summed, expected = torch.view_as_real(summed), torch.view_as_real(expected)
        return torch.equal(summed, expected)

    def read(self, summed: torch.Tensor, step: int, digest: int | None = None) -> Reading:
        """What the ranks said, in words. `digest`: of this rank's settings at that step, if they are not those of now."""
        real = summed.real if summed.is_complex() else summed
        counts = [round(value / self._scale) for value in real.tolist()]
        fixed = sum(count << bit for bit, count in enumerate(counts[_WEIGHT_AT:_NESTED_AT]))
        default = self.world - counts[_WEIGHTED_AT]
        in_step = counts[:_SIGNATURE_BITS] == [bit * self.world for bit in self._bits(step)]
        # Ranks that are not at the same step need not have the same settings; nor one that has given up, and may have been
        # given others since. Nobody uses what comes of it.
        if in_step and self.settings is not None and not counts[_GIVEN_UP_AT]:
            mine = [bit * self.world for bit in _settings_bits(self.digest if digest is None else digest)]
            if counts[_SETTINGS_AT:_LATE_AT] != mine and (error := self.settings.differ(step)) is not None:
                raise error
        if in_step and counts[_NONFINITE_AT] and self.watch is not None:
            self.watch.found(step)
        return Reading(
            in_step=in_step,
            total_weight=default + fixed / 2**_WEIGHT_FRACTION_BITS,
            num_given_up=counts[_GIVEN_UP_AT],
            num_nested=counts[_NESTED_AT],
            late_buckets=tuple(b for b, count in enumerate(counts[_LATE_AT : self._usage_at]) if count),
            usage=tuple(counts[self._usage_at :]),
        )


def staged(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values` as a tensor like that one. To a device by pinned memory, so that the host does not wait for the copy."""
    values = values.to(like.dtype)
    return values if like.device.type == "cpu" else values.pin_memory().to(like.device, non_blocking=True)


def _settings_bits(digest: int) -> list[int]:
    return [digest >> bit & 1 for bit in range(SETTINGS_BITS)]
