"""What the first forwards of a wrapper were given, as numbers that ranks can compare (`fingerprint`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .fingerprint import Fingerprint, fingerprint

FIRST = (0, 1, 2)
"""The forwards whose numbers are always taken."""


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
            # Tensors inside a transform of torch.func refuse to be read, which is no reason to fail a forward.
            with contextlib.suppress(RuntimeError):
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
