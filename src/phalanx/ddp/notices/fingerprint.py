"""Numbers made of tensors, so that ranks can compare them: equal tensors, equal numbers.

Made of a sample of every tensor's elements, by their bits and places, where the tensors are. On a device the numbers are on
their way to the host until somebody asks a step later, so that nobody waits. Must not know what they are compared for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...comm.memory.copies import as_memory
from ..structure import tensors_in

_MOST_TENSORS = 8
_MOST_ELEMENTS = 4096  # per tensor, spread over all of it
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# An odd number with bits all over: multiplied by it, neighbouring places do not cancel out.
_SPREAD = 0x5851F42D4C957F2D


class Fingerprint:
    """One or several numbers made of tensors."""

    __slots__ = ("_coming", "_event", "_numbers")

    def __init__(self, value: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._numbers: list[int] | None = None
        if value.device.type == "cpu":
            self._numbers = value.tolist()
            return
        # The device's own is kept by nobody: the copy is ordered behind its making, and so is the reuse of its memory.
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True, device="cpu")
        self._coming = pinned.copy_(value, non_blocking=True)
        self._event = torch.Event(value.device)
        self._event.record(torch.accelerator.current_stream(value.device))

    @property
    def numbers(self) -> list[int] | None:
        """None while they are on their way."""
        if self._event is not None and self._event.query():
            self._event, self._numbers = None, self._coming.tolist()
        return self._numbers


@torch.no_grad()
def fingerprint(inputs: Any) -> Fingerprint | None:
    """None if there is no plain tensor among the inputs."""
    plain = [tensor for tensor in tensors_in(inputs) if _is_plain(tensor) and tensor.numel()]
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
    if any(each.device != tensors[0].device or not _is_plain(each) for each in tensors):
        return None
    return Fingerprint(torch.stack([_mixed(each.detach()) for each in tensors]))


def _is_plain(tensor: torch.Tensor) -> bool:
    # Subclasses may do anything when they are looked at.
    is_known = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_known and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    real = as_memory(tensor)
    flat = real.reshape(-1)[:: max(1, real.numel() // _MOST_ELEMENTS)].contiguous()
    words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    places = 2 * torch.arange(words.numel(), device=words.device) + 1  # odd, so that every bit of a word counts
    mixed = words * places * _SPREAD  # beyond 64 bits it wraps around
    return (mixed ^ mixed >> 29).sum()
