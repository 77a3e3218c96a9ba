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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from ..plan import BucketCaps, ParamSpec
from ..plan.buckets import MIB
from .operators import Obstacles, is_heavy, repeated_layers, without_gradient


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters, by name, whose gradients are complete once backward has passed operator `position`.

    `layer` names the module around the operator, where the model repeats modules of its kind. `hides_nothing` if all
    operators before it are light: too little is left of backward then to hide a collective behind it.
    """

    position: int
    params: tuple[str, ...]
    layer: str = ""
    hides_nothing: bool = False


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
    first_heavy = next((i for i, node in enumerate(operators) if is_heavy(node)), len(operators))
    return [
        Group(
            position,
            tuple(sorted(by_position[position], key=rank.__getitem__)),
            layers[position],
            position < first_heavy,
        )
        for position in sorted(by_position, reverse=True)
    ]


# A bucket may pass its cap by half rather than leave with little, or be followed by little.
_STRETCH = 1.5

Kind = tuple[torch.dtype, str]


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

    def has_no_room(self, num_bytes: int, cap_bytes: int, hides_nothing: bool) -> bool:
        """Whether the bucket has to leave before something of this size joins it."""
        limit = _STRETCH * cap_bytes if hides_nothing else cap_bytes
        return bool(self.params) and 2 * self.num_bytes >= cap_bytes and self.num_bytes + num_bytes > limit

    def close(self, cap_bytes: int = 0, layer: str = "") -> tuple[str, ...]:
        """Close the bucket; before `layer`, of which it holds a part, if more than half of the cap is left then."""
        whole = not layer or layer != self.layer or 2 * self._seam_bytes <= cap_bytes
        kept, held = (len(self.params), self.num_bytes) if whole else (self._seam, self._seam_bytes)
        params, self.params = tuple(self.params[:kept]), self.params[kept:]
        self.num_bytes -= held
        self._seam = self._seam_bytes = 0
        self.num_closed += 1
        return params


class _Filling:
    """Buckets while they are being filled, one open for each dtype and device."""

    def __init__(self, specs: Mapping[str, ParamSpec], caps: BucketCaps, num_before: int) -> None:
        self.specs = specs
        self.caps = caps
        self.num_before = num_before
        self.opened: dict[Kind, _Open] = {}
        self.closed: list[Closing] = []

    def _sizes(self, names: Iterable[str]) -> dict[Kind, int]:
        sizes: dict[Kind, int] = {}
        for spec in (self.specs[name] for name in names if not self.specs[name].sparse):
            kind = (spec.dtype, spec.device)
            self.opened.setdefault(kind, _Open(self.num_before))
            sizes[kind] = sizes.get(kind, 0) + spec.num_bytes
        return sizes

    def is_unit(self, piece: Sequence[Group]) -> bool:
        """Whether a piece travels undivided: it is not much larger than a bucket."""
        sizes = self._sizes(name for group in piece for name in group.params)
        return all(size <= _STRETCH * self.caps.at(self.opened[kind].num_closed) for kind, size in sizes.items())

    def make_room(self, group: Group) -> None:
        for kind, num_bytes in self._sizes(group.params).items():
            bucket = self.opened[kind]
            while bucket.has_no_room(num_bytes, cap := self.caps.at(bucket.num_closed), group.hides_nothing):
                params = bucket.close(cap, group.layer)
                held = sum(self.specs[name].num_bytes for name in params) / MIB
                what = "layer" if bucket.params else "operator"
                text = f"bucket full: it holds {held:.3f} of {cap / MIB:.3f} MiB and the next {what} does not fit"
                self.closed.append(Closing(params, text))

    def add(self, group: Group) -> None:
        self.make_room(group)
        for spec in (self.specs[name] for name in group.params):
            if spec.sparse:
                self.closed.append(Closing((spec.name,), "sparse gradients travel alone"))
            else:
                self.opened[spec.dtype, spec.device].add(spec, group.layer)

    def finish(self) -> list[Closing]:
        rest = "the last bucket of its kind closes"
        return self.closed + [Closing(bucket.close(), rest) for bucket in self.opened.values() if bucket.params]


def fill(
    pieces: Sequence[Sequence[Group]], specs: Mapping[str, ParamSpec], caps: BucketCaps, num_before: int = 0
) -> list[Closing]:
    """Buckets for pieces of groups, all in ready order; in the order in which they are full.

    A bucket closes before the piece or group that would take it past its cap. It passes the cap, by half at most
    unless one group alone is larger, where it is not half full yet, and where what comes hides nothing: to leave
    would cost a collective and a cut for little. Before part of a repeated layer it rather closes before the whole
    layer, if it is more than half full then: pieces that are equal layers are compiled only once.

    A group is never divided, nor a piece unless it is larger than that. `num_before` buckets exist already.
    """
    filling = _Filling(specs, caps, num_before)
    order: dict[str, int] = {}
    for piece in pieces:
        names = [name for group in piece for name in group.params]
        order.update({name: len(order) + i for i, name in enumerate(names)})
        whole = len(piece) > 1 and filling.is_unit(piece)
        for group in [Group(0, tuple(names))] if whole else piece:
            filling.add(group)
    return sorted(filling.finish(), key=lambda closing: order[closing.params[-1]])


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
