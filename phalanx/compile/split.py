"""Where a captured forward graph is cut, decided from the graph alone.

Backward runs a forward graph from its end to its start. A parameter's gradient is complete once backward has
passed the first operator, in forward order, that uses the parameter; walking the operators in reverse, the
parameters therefore complete in the order in which they become ready. Worked example, caps of 8 bytes, each
weight 4 bytes:

    operator            x0 = embed(w)   x1 = x0 @ a   x2 = x1.relu()   x3 = x2 @ b   x4 = x3 @ c   x5 = x4 @ w
    completes           w               a                              b             c             (w: used earlier)
    ready order         4th             3rd                            2nd           1st
    bucket              1               1                              0             0
    pieces              [ 0 ─────────────────────────────────────── ]  [ 1 ────────────────────────────── ]

A piece begins at the operator that completes a bucket, so the bucket leaves while the earlier pieces' backward
runs. Gradients that one operator completes come at once and are never put into different buckets of a kind.
Pure: must not know of reducers, wrappers or compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..plan import BucketCaps, ParamSpec
from ..plan.buckets import MIB
from .operators import Obstacles, repeated_layers, without_gradient


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters, by name, whose gradients are complete once backward has passed operator `position`.

    `layer` names the module around the operator, where the model repeats modules of its kind.
    """

    position: int
    params: tuple[str, ...]
    layer: str = ""


@dataclass(frozen=True, slots=True)
class Closing:
    """Parameters that should be ready together when their last one is, and what closes their bucket."""

    params: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Cut:
    """The graph is cut before operator `position`."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Span:
    """One piece: the operators from `start` to before `stop`, and what it completes, in ready order."""

    start: int
    stop: int
    groups: tuple[Group, ...]
    reason: str  # why it is cut from what comes before it; "" for the first one

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.params)

    def renamed(self, new_name: Callable[[str], str | None]) -> Span:
        """The same piece for other parameters; those without a new name are left out."""
        groups = [
            replace(group, params=tuple(new for name in group.params if (new := new_name(name)) is not None))
            for group in self.groups
        ]
        return replace(self, groups=tuple(group for group in groups if group.params))


def completions(
    operators: Sequence[Node], owners: Mapping[Node, tuple[str, ...]], registered: Sequence[str]
) -> list[Group]:
    """What each operator completes, in ready order. `owners` names the parameters behind a node.

    A node of `owners` is an input or attribute that is a parameter, or a call of a module that has some.
    What completes at once is in the reverse of the order `registered`, as in a plan without observation.
    """
    first_use: dict[str, int] = {}
    disabled = without_gradient(operators)
    for position, node in enumerate(operators):
        for source in () if disabled[position] else (node, *node.all_input_nodes):
            for name in owners.get(source, ()):
                first_use.setdefault(name, position)
    rank = {name: -index for index, name in enumerate(registered)}
    by_position: dict[int, list[str]] = {}
    for name, position in first_use.items():
        by_position.setdefault(position, []).append(name)
    layers = repeated_layers(operators)
    return [
        Group(position, tuple(sorted(by_position[position], key=rank.__getitem__)), layers[position])
        for position in sorted(by_position, reverse=True)
    ]


class _Open:
    """The open bucket of one dtype and device, and where in it the current layer begins."""

    def __init__(self, num_closed: int) -> None:
        self.params: list[str] = []
        self.num_bytes = 0
        self.num_closed = num_closed
        self.layer = ""
        self._seam = self._seam_bytes = 0

    def add(self, spec: ParamSpec, layer: str) -> None:
        if layer != self.layer:
            self.layer, self._seam, self._seam_bytes = layer, len(self.params), self.num_bytes
        self.params.append(spec.name)
        self.num_bytes += spec.num_bytes

    def close(self, cap_bytes: int = 0, layer: str = "") -> tuple[str, ...]:
        """Close the bucket; before `layer`, of which it holds a part, if more than half of the cap is left then."""
        whole = not layer or layer != self.layer or 2 * self._seam_bytes <= cap_bytes
        kept, held = (len(self.params), self.num_bytes) if whole else (self._seam, self._seam_bytes)
        params, self.params = tuple(self.params[:kept]), self.params[kept:]
        self.num_bytes -= held
        self._seam = self._seam_bytes = 0
        self.num_closed += 1
        return params


def fill(
    pieces: Sequence[Sequence[Sequence[str]]],
    specs: Mapping[str, ParamSpec],
    caps: BucketCaps,
    num_before: int = 0,
    layers: Mapping[str, str] | None = None,
) -> list[Closing]:
    """Buckets for pieces of groups of parameters, all in ready order; in the order in which they are full.

    A bucket closes before the piece that would take it past its cap, inside a piece before such a group.
    A group is never divided: it travels alone if it is larger than the cap. `num_before` buckets exist already.
    Where `layers` are given by parameter, a bucket rather closes before a whole layer, if it is more than half
    full then: pieces that are equal layers are compiled only once.
    """
    layers = layers or {}
    opened: dict[tuple[torch.dtype, str], _Open] = {}
    closed: list[Closing] = []

    def make_room(groups: Sequence[Sequence[str]], layer: str = "") -> None:
        needed: dict[tuple[torch.dtype, str], int] = {}
        for spec in (specs[name] for group in groups for name in group if not specs[name].sparse):
            needed[spec.dtype, spec.device] = needed.get((spec.dtype, spec.device), 0) + spec.num_bytes
        for kind, num_bytes in needed.items():
            bucket = opened.setdefault(kind, _Open(num_before))
            cap = caps.at(bucket.num_closed)
            while bucket.params and bucket.num_bytes + num_bytes > cap:
                params = bucket.close(cap, layer)
                held = sum(specs[name].num_bytes for name in params) / MIB
                what = "layer" if bucket.params else "operator"
                text = f"bucket full: it holds {held:.3f} of {cap / MIB:.3f} MiB and the next {what} does not fit"
                closed.append(Closing(params, text))
                cap = caps.at(bucket.num_closed)

    order: dict[str, int] = {}
    for piece in pieces:
        make_room(piece)
        for group in piece:
            make_room([group], layers.get(group[0], ""))
            for name in group:
                order[name] = len(order)
                spec = specs[name]
                if spec.sparse:
                    closed.append(Closing((name,), "sparse gradients travel alone"))
                    continue
                opened[spec.dtype, spec.device].add(spec, layers.get(group[0], ""))
    rest = "the last bucket of its kind closes"
    closed += [Closing(bucket.close(), rest) for bucket in opened.values() if bucket.params]
    return sorted(closed, key=lambda closing: order[closing.params[-1]])


def place_cuts(
    operators: Sequence[Node], groups: Sequence[Group], closings: Sequence[Closing], obstacles: Obstacles
) -> list[Cut]:
    """A cut before the operator that completes each bucket, or as soon before it as the graph allows.

    There is none where nothing would be completed after it.
    """
    if not groups:
        return []
    position_of = {name: group.position for group in groups for name in group.params}
    earliest = groups[-1].position
    reasons: dict[int, list[str]] = {}
    for closing in closings:
        positions = [position_of[name] for name in closing.params if name in position_of]
        if not positions:
            continue
        wanted = position = min(positions)
        while position > earliest and obstacles.at(position):
            position -= 1
        if position <= earliest:
            continue
        reason = closing.reason
        if position != wanted:
            reason += f"; {wanted - position} operators earlier, because {obstacles.at(wanted)}"
        reasons.setdefault(position, []).append(reason)
    positions = _with_outputs(operators, sorted(reasons))
    return [Cut(position, "; ".join(reasons[position])) for position in positions]


def _with_outputs(operators: Sequence[Node], positions: list[int]) -> list[int]:
    """`positions` without those that would leave a piece that returns nothing: it joins its neighbour."""
    index = {node: i for i, node in enumerate(operators)}
    end = len(operators)

    def returns_something(start: int, stop: int) -> bool:
        return any(index.get(user, end) >= stop for node in operators[start:stop] for user in node.users)

    kept: list[int] = []
    start = 0
    for position in positions:
        if returns_something(start, position):
            kept.append(position)
            start = position
    while kept and not returns_something(kept[-1], end):
        kept.pop()
    return kept


def spans(num_operators: int, groups: Sequence[Group], cuts: Sequence[Cut]) -> list[Span]:
    """The pieces between the cuts, in forward order."""
    edges = [0, *(cut.position for cut in cuts), num_operators]
    reasons = ["", *(cut.reason for cut in cuts)]
    return [
        Span(start, stop, tuple(group for group in groups if start <= group.position < stop), reason)
        for start, stop, reason in zip(edges, edges[1:], reasons, strict=False)
    ]
