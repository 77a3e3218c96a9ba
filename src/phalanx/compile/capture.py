"""The pieces of a wrapper's compiled graphs, and the plan that they make together.

    compile   a graph is cut: where the pieces known so far end, and where caps say for parameters nobody knows yet
    run       the graph tells the wrapper's capture its pieces (it may have been compiled for another wrapper)
    settle    at the end of the first reduced backward the reducer asks for buckets: `Capture.__call__`

A piece that fits under the cap is never divided between buckets of a kind, so every bucket is full at the end of a
piece. Must not know how graphs are compiled.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..plan import BucketCaps, BucketPlan, ParamSpec, plan_of
from .split import Closing, Group, Span, fill

log = logging.getLogger("phalanx.compile")


class Reduces(Protocol):
    """A reducer, as far as the compiler knows it. It shows where its model is to be cut by `cut_key`."""

    params: list[torch.nn.Parameter]
    cut_key: str
    choose_buckets: Callable[[BucketPlan, Sequence[int]], list[list[int]]] | None

    @property
    def plan(self) -> BucketPlan:
        """The plan in force."""

    @property
    def settled(self) -> bool:
        """Whether the plan has been replaced for good by the one in the observed order."""


class Capture:
    """What one reducer's wrapper has been compiled to. The reducer holds it; it does not hold the reducer."""

    def __init__(self) -> None:
        # Each piece as groups in ready order, in the order of first execution.
        self._pieces: list[tuple[Group, ...]] = []
        self._owned: set[str] = set()
        self._seen: dict[str, int] = {}  # the observed order, once there is one
        self._runs: list[tuple[weakref.ref[Any], list[Span]]] = []

    @property
    def runs(self) -> list[tuple[Any, list[Span]]]:
        """The compiled graphs that still exist, each with its pieces for each set of parameters it has run with."""
        return [(graph, spans) for reference, spans in self._runs if (graph := reference()) is not None]

    @property
    def pieces(self) -> list[tuple[str, ...]]:
        """The parameters of each piece, in the order of first execution."""
        return [tuple(name for group in piece for name in group.params) for piece in self._pieces]

    def add(self, graph: Any, spans: list[Span]) -> None:
        """A compiled graph runs with these parameters for the first time; `spans` are its pieces, in forward order.

        A parameter that an earlier graph uses as well is complete only there, so it stays with that one.
        """
        self._runs.append((weakref.ref(graph), spans))
        for span in spans:
            piece = without(span.groups, self._owned)
            if piece:
                self._pieces.append(piece)
                self._owned.update(span.params)

    def closings(
        self, groups: Sequence[Group], reducer: Reduces, caps: BucketCaps, is_last: bool
    ) -> list[Closing]:
        """Where buckets close in a graph that completes `groups`; `is_last` if no graph seems to follow it."""
        plan = reducer.plan
        if follows_plan(reducer):
            text = "bucket {} of the plan closes"
            return [Closing(names, text.format(i)) for i, names in enumerate(names_by_bucket(plan))]
        present = {name for group in groups for name in group.params}
        known = [piece for piece in self.pieces if not present.isdisjoint(piece)]
        closings = [Closing(piece, "an earlier compilation was cut here") for piece in known]
        new = [[group] for group in without(groups, self._owned)]
        return closings + fill(new, _by_name(plan), caps, 0 if is_last else 1)

    def plan(self, plan: BucketPlan) -> BucketPlan:
        """The plan that the pieces make of the first one: as settled, before that as backward should complete them."""
        return plan_of(plan.specs, self._buckets(plan, self._seen), plan.caps)

    def __call__(self, plan: BucketPlan, ready: Sequence[int]) -> list[list[int]]:
        """Buckets of whole pieces, ordered as backward completed them; `ready` is the observed order."""
        self._seen = {plan.specs[param].name: when for when, param in enumerate(ready)}
        eager = [name for name in self._seen if name not in self._owned]
        if self._pieces and eager:
            text = "%d of %d parameters are used outside of the compiled graphs, first '%s'"
            log.warning(text, len(eager), len(plan.specs), eager[0])
        return self._buckets(plan, self._seen)

    def _buckets(self, plan: BucketPlan, seen: Mapping[str, int]) -> list[list[int]]:
        index = {spec.name: i for i, spec in enumerate(plan.specs)}
        never = len(seen)
        pieces = [without(piece, self._owned - index.keys()) for piece in reversed(self._pieces)]
        # What no graph holds runs eagerly, between the graphs; what nobody used comes last.
        eager = (plan.specs[i].name for i in plan.order if plan.specs[i].name not in self._owned)
        pieces += [(Group(0, (name,)),) for name in eager]
        pieces.sort(key=lambda piece: max((seen[n] for g in piece for n in g.params if n in seen), default=never))
        closings = fill(pieces, _by_name(plan), plan.caps)
        return [[index[name] for name in closing.params] for closing in closings]


def without(groups: Sequence[Group], names: Collection[str]) -> tuple[Group, ...]:
    """The groups without parameters of these names."""
    kept = [replace(group, params=tuple(name for name in group.params if name not in names)) for group in groups]
    return tuple(group for group in kept if group.params)


def names_by_bucket(plan: BucketPlan) -> list[tuple[str, ...]]:
    """The names of each bucket's parameters."""
    return [tuple(plan.specs[slot.param].name for slot in bucket.slots) for bucket in plan.buckets]


def follows_plan(reducer: Reduces) -> bool:
    """Whether graphs are cut by the plan in force, because that one was not made from their pieces."""
    return reducer.settled and reducer.cut_key == reducer.plan.hash


def plan_of_pieces(reducer: Reduces) -> BucketPlan:
    """The plan by which the reducer's model is cut. Once the reducer has settled, its own."""
    capture = reducer.choose_buckets
    if follows_plan(reducer) or not isinstance(capture, Capture):
        return reducer.plan
    return capture.plan(reducer.plan)


def names_of(reducer: Reduces) -> dict[int, str]:
    """The name of each of the reducer's parameters, by identity."""
    return {id(param): spec.name for param, spec in zip(reducer.params, reducer.plan.specs, strict=True)}


def capture_of(reducer: Reduces) -> Capture:
    """The reducer's capture, made at the first request."""
    if not isinstance(reducer.choose_buckets, Capture):
        reducer.choose_buckets = Capture()
    return reducer.choose_buckets


def _by_name(plan: BucketPlan) -> dict[str, ParamSpec]:
    return {spec.name: spec for spec in plan.specs}
