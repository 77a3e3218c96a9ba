"""Numbers made of tensors, so that ranks can compare them: equal tensors, equal numbers. Those of the first inputs.

Taken of a sample of every tensor's elements, by their bits and places, where the tensors are. On a device the number is
on its way to the host until somebody asks a forward later, so that nobody waits. Must not know what the numbers are
compared for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..structure import tensors_in

FIRST = (0, 1, 2)
"""The forwards whose numbers are always taken."""

_MOST_TENSORS = 8
_MOST_ELEMENTS = 4096  # per tensor, spread over all of it
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# An odd number with bits all over: multiplied by it, neighbouring places do not cancel out.
_SPREAD = 0x5851F42D4C957F2D


class Fingerprint:
    """One or several numbers made of tensors."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._value = value
        if value.device.type != "cpu":
            # The device's own is kept by nobody: the copy is ordered behind its making, and so is the reuse of its memory.
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._event = torch.Event(value.device)
            self._event.record(torch.accelerator.current_stream(value.device))

    @property
    def numbers(self) -> list[int] | None:
        """None while they are on their way."""
        if self._event is not None and not self._event.query():
            return None
        found: list[int] = self._value.tolist()
        return found


class FirstInputs:
    """Numbers of a wrapper's first forwards, and of others that somebody wants. Only forwards with gradients count."""

    def __init__(self) -> None:
        self.num_forwards = 0
        self._wanted = set(FIRST)
        self._prints: dict[int, Fingerprint | None] = {}
        self.followers: list[Callable[[int], None]] = []
        """Called with the number of each forward that is wanted, in the thread and under the frames of its caller."""

    def see(self, inputs: Any) -> None:
        """A forward begins. All that it costs in most steps is a look into an empty set."""
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1
        if number in self._wanted:
            self._wanted.discard(number)
            self._prints[number] = fingerprint(inputs)
            for follower in self.followers:
                follower(number)

    def want(self, numbers: Iterable[int]) -> None:
        """Take the numbers of these forwards too, as far as they are still to come."""
        self._wanted.update(number for number in numbers if number >= self.num_forwards)

    def numbers(self, forwards: Sequence[int]) -> list[int] | None:
        """Of these forwards; None unless all are known."""
        prints = [self._prints.get(forward) for forward in forwards]
        found = [None if each is None else each.numbers for each in prints]
        known = [numbers[0] for numbers in found if numbers is not None]
        return known if len(known) == len(found) else None


@torch.no_grad()
def fingerprint(inputs: Any) -> Fingerprint | None:
    """None if there is no plain tensor among the inputs."""
    # Subclasses may do anything when they are looked at; parameters are inputs as well where a user passes them.
    plain = [t for t in tensors_in(inputs) if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided]
    plain = [tensor for tensor in plain if tensor.numel() and not tensor.is_quantized and not tensor.is_meta]
    parts = [_mixed(tensor) for tensor in plain[:_MOST_TENSORS] if tensor.device == plain[0].device]
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total * _SPREAD + part
    return Fingerprint(total.reshape(1))


@torch.no_grad()
def numbers_of(tensors: Sequence[torch.Tensor]) -> Fingerprint | None:
    """A number per tensor; None if they are not all on one device, or not all plain memory."""
    if any(each.device != tensors[0].device or each.layout is not torch.strided for each in tensors):
        return None
    return Fingerprint(torch.stack([_mixed(each.detach()) for each in tensors]))


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.reshape(-1)[:: max(1, real.numel() // _MOST_ELEMENTS)].contiguous()
    words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, 2 * words.numel(), 2, device=words.device)  # odd, so that every bit of a word counts
    mixed = words * places * _SPREAD  # beyond 64 bits it wraps around
    return (mixed ^ mixed >> 29).sum()
