"""The order in which an epoch goes through the data: drawn from the user's own sampler, the same on every rank.

A sampler draws from torch's random numbers, from a generator of its own, or from anywhere. The first two are seeded here
with (seed, epoch), so that every rank draws the same and a resumed run draws it again, and are left afterwards as they
were found. For the third, rank 0's draw counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import MismatchError, StateError
from .values import Exchange

_SEEDS = 2**63


def epoch_seed(seed: int, epoch: int, rank: int = 0) -> int:
    """One seed per epoch (and rank), far from its neighbours'."""
    text = f"{seed}/{epoch}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % _SEEDS


def initial_seed(*generators: Any) -> int:
    """Where randomness starts: the first generator there is, or what torch.manual_seed was given."""
    given = next((one for one in generators if isinstance(one, torch.Generator)), None)
    return torch.initial_seed() if given is None else given.initial_seed()


def set_epoch(epoch: int, *parts: Any) -> None:
    """Tell the number of the epoch to whatever wants to know it: samplers and datasets with a `set_epoch` of their own."""
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


class EpochOrder:
    """Draws one order per epoch from `sampler`, which may be a batch sampler as well."""

    def __init__(self, sampler: Any, exchange: Exchange) -> None:
        self._sampler, self._exchange = sampler, exchange
        self.digest = ""
        """Of the last order drawn: how a resumed run knows that it draws what was drawn before."""
        self.total = 0
        """How long the last order drawn is."""

    def __len__(self) -> int:
        return len(self._sampler)

    def draw(self, seed: int, epoch: int, expected: str = "", position: int = 0) -> Sequence[Any]:
        """The order of `epoch`. Every rank calls it. Raises StateError if it is not the one of digest `expected`.

        Raises MismatchError, on every rank, if some rank is to go on from another epoch or `position` than the others.
        """
        set_epoch(epoch, self._sampler, getattr(self._sampler, "sampler", None))
        with _seeded(self._sampler, epoch_seed(seed, epoch)):
            order = list(self._sampler)
        said = self._exchange.all_objects((_digest(order), epoch, position))
        digests = [digest for digest, _, _ in said]
        for rank, (_, *place) in enumerate(said):
            if place != [*said[0][1:]]:
                raise MismatchError(
                    f"rank {self._exchange.rank}: the loader of rank {rank} is at epoch {place[0]}, position {place[1]}, "
                    f"that of rank 0 at epoch {said[0][1]}, position {said[0][2]}. Call set_epoch() and load_state_dict() "
                    "on every rank alike."
                )
        if len(set(digests)) > 1:
            order = self._exchange.from_first(order)
        self.digest, self.total = digests[0], len(order)
        if expected and expected != self.digest:
            raise StateError(
                f"rank {self._exchange.rank}: the sampler drew another order for epoch {epoch} than before the state was "
                "saved, so what was used of it is not known. Its data has changed, or it draws from random numbers of its "
                "own: use torch's, or a generator that it holds as `generator`."
            )
        return order


@contextmanager
def _seeded(sampler: Any, seed: int) -> Iterator[None]:
    """Torch's random numbers and the generators of a sampler, and of the one inside it, start from `seed` meanwhile."""
    both: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
    # Of torch's kind only: a sampler with one of numpy's is not made for another.
    parts = [part for part in both if isinstance(getattr(part, "generator", None), torch.Generator)]
    before = [part.generator for part in parts]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            for part in parts:
                part.generator = torch.Generator().manual_seed(seed)
            yield
        finally:
            for part, generator in zip(parts, before, strict=True):
                part.generator = generator


def _digest(order: Sequence[Any]) -> str:
    found = hashlib.blake2b(digest_size=12)
    if order and all(type(one) is int for one in order):
        found.update(torch.tensor(order, dtype=torch.int64, device="cpu").numpy().tobytes())
    else:
        found.update(repr(order).encode())
    return found.hexdigest()
