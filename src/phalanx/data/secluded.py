"""Iterating with random numbers of one's own.

Owns how a DataLoader that is not dealt out here (a stream, or a rank's own data) draws: from numbers that follow from a
seed, and not from the script's. So a resumed run that reads on to where it was draws what was drawn before, and the script's
numbers go on as if nothing had been read. Must not know of ranks or epochs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Secluded(Generic[T]):
    """An iterator over `items` that starts, and goes on, with Python's, numpy's and torch's numbers from `seed`.

    `parts` are the objects that may hold a generator for it, as samplers do as `generator`: another one stands there
    meanwhile. Numbers drawn on other devices are not kept apart.
    """

    def __init__(self, items: Iterable[T], seed: int, parts: Sequence[Any] = ()) -> None:
        self._items = items
        self._iterator: Iterator[T] | None = None
        self._parts = [part for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
        self._generator = torch.Generator().manual_seed(seed)
        self._state = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        # Exchanged for each item and not for the epoch: between two of them the script draws from its own numbers.
        before, generators = _states(), [part.generator for part in self._parts]
        _set_states(self._state)
        try:
            for part in self._parts:
                part.generator = self._generator
            if self._iterator is None:
                self._iterator = iter(self._items)
            return next(self._iterator)
        except StopIteration:
            # A DataLoader whose processes have ended is not asked again.
            self._iterator = iter(())
            raise
        finally:
            self._state = _states()
            for part, generator in zip(self._parts, generators, strict=True):
                part.generator = generator
            _set_states(before)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
