"""Stepping shards piece by piece, by whoever must know at every moment how far a step has come (`elastic.place`).

Only the interface is here: what is done around the pieces is none of an optimizer's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .shard import Shard


class Stepper(Protocol):
    """In place of `LocalOptimizer.step_some` and of the gather, for the element partition. On every rank, or on none."""

    @property
    def is_stepping(self) -> bool:
        """Whether the step under way is stepped by it; if not, as if it were not there."""

    def begin(self, shards: Sequence[Shard], arguments: Mapping[str, Any]) -> None:
        """All gradients are there, and nothing has been changed by the step yet. Every rank is here."""

    def step(self, shard: Shard, arguments: Mapping[str, Any]) -> None:
        """Step the slices of a shard that have a gradient, and bring edges back into the parameters."""

    def end(self) -> None:
        """All shards have been stepped: bring the other ranks' parameters here. Every rank is here."""
