"""From a program that fails to a short one that fails the same way.

Greedy: every smaller neighbour is tried, the first that still fails is kept, until none does or time is up. Smaller means
fewer events, shorter routes, fewer parts and ranks, smaller tensors, options at their defaults.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.fuzz.events import Apart, Backward, Closure, Dtype, Group, Pass, Poison, Step
from tests.fuzz.ledger import Ledger
from tests.fuzz.program import Model, Part, Program, Route, routes_of
from tests.fuzz.runner import Failure

# Wrong values show first in one place or another, depending on what else the program does.
WRONG_VALUES = ("gradient", "parameter", "replicas")


def shrink(failure: Failure, run: Callable[[Program], Failure | None], limit_s: float = 90.0) -> Failure:
    """The smallest failure found within the time. `run` plays a program."""
    deadline = time.monotonic() + limit_s
    tried = {failure.program}
    while True:
        for smaller in _neighbours(failure.program):
            if smaller in tried or not is_fair(smaller):
                continue
            if time.monotonic() > deadline:
                return failure
            tried.add(smaller)
            found = run(smaller)
            if found is not None and _is_alike(found, failure):
                failure = found
                break
        else:
            return failure


def is_fair(program: Program) -> bool:
    """Whether the program keeps to the rules by which programs are drawn; leaving out an event may break them."""
    if not all(_keeps_books(program, model) for model in range(len(program.parts_of))):
        return False
    if program.delayed is not None:
        triggered = [{number for number, _ in event.routes[0]} for event in program.events if isinstance(event, Pass)]
        if not all(program.delayed[1] in used for used in triggered):
            return False
    if program.nonfinite is None and any(isinstance(event, Poison) for event in program.events):
        return False
    promised = program.static or program.skip_unused
    passes = [event for event in program.events if isinstance(event, Pass)]
    return not promised or len({route for event in passes for route in event.routes}) <= 1


def _keeps_books(program: Program, model: int) -> bool:
    """Whether the gradients of a model are used in ways that are promised."""
    ledger, mine = Ledger(program, model), program.of(model)
    held = {number for number in program.held if number in program.parts_of[model]}
    num_since = 0  # backwards that were reduced and not confirmed
    for event in program.events:
        held -= {event.part} if isinstance(event, Group) else set()
        before = ledger.num_reduced
        ledger.see(event)
        if not ledger.concerns(event):
            continue
        if isinstance(event, Dtype) and mine.is_overlapped and not event.zeroed:
            return False
        if isinstance(event, Pass) and event.sync and held and mine.is_overlapped:
            return False
        if isinstance(event, Step):
            if ledger.is_local or (mine.is_overlapped and not before):
                return False
            num_since = num_since if dict(mine.zero).get("stage") == 2 else 0
        elif isinstance(event, Closure) or not ledger.num_reduced:
            num_since = 0
        elif isinstance(event, Pass) and event.sync:
            num_since += 1
            if mine.mode == "overlapped" and num_since > 1:
                return False
    return True


def _is_alike(found: Failure, failure: Failure) -> bool:
    if failure.at is None:
        return found.what == failure.what and _kind(found) == _kind(failure)
    if failure.what in WRONG_VALUES:
        return found.what in WRONG_VALUES
    return found.what == failure.what


def _kind(failure: Failure) -> str:
    """The exception and the beginning of its message: a smaller program may be refused for good reasons of its own."""
    return failure.words[:60]


def _neighbours(program: Program) -> Iterator[Program]:
    """Smaller programs, the boldest first."""
    yield from _without_events(program)
    for name, value in _PLAIN:
        if getattr(program, name) != value:
            yield program.but(**{name: value})
    if program.cap_mb is not None:
        yield program.but(cap_mb=0.0001)
    if program.has_sharded_state or program.mode != "plain":
        yield program.but(mode="plain", zero=(), optimizer_first=False)
    for number in range(len(program.zero)):
        yield program.but(zero=program.zero[:number] + program.zero[number + 1 :])
    yield from _fewer_models(program)
    if program.held:
        yield program.but(held=(), events=tuple(e for e in program.events if not isinstance(e, Group)))
    if program.ranks > 2:
        yield program.but(ranks=2)
    yield from _without_uses(program)
    yield from _without_parts(program)
    yield from _simpler_events(program)
    yield from _simpler_parts(program)


_PLAIN = (
    ("hook", None),
    ("drift", None),
    ("nonfinite", None),
    ("mixed", None),
    ("delayed", None),
    ("static", False),
    ("skip_unused", False),
    ("views", False),
    ("find_unused", False),
    ("batched", False),
    ("common", False),
    ("cap_mb", None),
    ("optimizer_first", False),
    ("optimizer", "sgd"),
    ("backend", "gloo"),
)


def _fewer_models(program: Program) -> Iterator[Program]:
    """All parts in one model, then each model trained plainly, or without options of its own."""
    if not program.models:
        return
    events = []
    for event in program.events:
        if isinstance(event, Apart):
            event = Backward(event.data, event.routes, event.sync, event.weights)
        plain = {"models": None, "together": "chain"} if isinstance(event, Pass) else {"models": None}
        events.append(dataclasses.replace(event, **plain) if hasattr(event, "models") else event)
    for mode in dict.fromkeys(program.models):
        yield program.but(events=tuple(events), models=(), mode=mode.mode, zero=mode.zero, common=False)
    if program.common:
        yield program.but(models=tuple(Model(model.parts) for model in program.models))
        yield program.but(models=tuple(Model(model.parts, model.mode) for model in program.models))
        return
    for number, model in enumerate(program.models):
        for simpler in (Model(model.parts), Model(model.parts, model.mode)):
            if simpler != model:
                yield program.but(models=(*program.models[:number], simpler, *program.models[number + 1 :]))


def _without_events(program: Program) -> Iterator[Program]:
    events = program.events
    size = len(events) // 2
    while size:
        for start in range(0, len(events), size):
            kept = events[:start] + events[start + size :]
            if kept:
                yield program.but(events=kept)
        size //= 2


def _with_routes(program: Program, change: Callable[[Route], Route]) -> Program:
    changed = []
    for event in program.events:
        routes = getattr(event, "routes", None)
        changed.append(event if routes is None else dataclasses.replace(event, routes=tuple(map(change, routes))))
    return program.but(events=tuple(changed))


def _without_uses(program: Program) -> Iterator[Program]:
    """Everywhere at once first, then route by route; a route keeps one part."""
    for taken in sorted(dict.fromkeys(routes_of(program.events)), key=len)[:3]:
        same = _with_routes(program, lambda _, taken=taken: taken)
        if same != program and sum(map(len, routes_of(same.events))) <= sum(map(len, routes_of(program.events))):
            yield same
    for part in range(len(program.parts)):
        shorter = _with_routes(program, lambda route, part=part: tuple(u for u in route if u[0] != part) or route)
        if shorter != program:
            yield shorter
    for how in ("reentrant", "recomputed"):
        plain = _with_routes(program, lambda route, how=how: tuple((n, "" if h == how else h) for n, h in route))
        if plain != program:
            yield plain
    for at, event in enumerate(program.events):
        for which, route in enumerate(getattr(event, "routes", ())):
            for place in range(len(route)):
                if len(route) > 1:
                    yield _with_route(program, at, which, route[:place] + route[place + 1 :])


def _with_route(program: Program, at: int, which: int, route: Route) -> Program:
    event = program.events[at]
    routes = (*event.routes[:which], route, *event.routes[which + 1:])
    return _with_event(program, at, dataclasses.replace(event, routes=routes))


def _with_event(program: Program, at: int, event: Any) -> Program:
    return program.but(events=(*program.events[:at], event, *program.events[at + 1:]))


def _parts_of(event: Any) -> dict[str, int]:
    """The parts that an event names, by field."""
    return {name: getattr(event, name) for name in ("part", "source", "target") if hasattr(event, name)}


def _without_parts(program: Program) -> Iterator[Program]:
    """Parts that nothing runs or names any more."""
    named = {number for route in routes_of(program.events) for number, _ in route}
    named |= {number for event in program.events for number in _parts_of(event).values()}
    named |= {*(program.delayed or ()), *program.held}
    for gone in reversed(range(len(program.parts))):
        if gone in named or len(program.parts) == 1 or any(getattr(event, "dropped", ()) for event in program.events):
            continue
        fewer = program.but(parts=program.parts[:gone] + program.parts[gone + 1 :])
        fewer = _with_routes(fewer, lambda route, gone=gone: tuple((n - (n > gone), how) for n, how in route))
        moved = []
        for event in fewer.events:
            numbers = {name: number - (number > gone) for name, number in _parts_of(event).items()}
            moved.append(dataclasses.replace(event, **numbers) if numbers else event)
        delayed = program.delayed and tuple(number - (number > gone) for number in program.delayed)
        held = tuple(number - (number > gone) for number in program.held)
        models = tuple(
            dataclasses.replace(model, parts=model.parts - (gone in parts))
            for model, parts in zip(program.models, program.parts_of, strict=False)
        )
        if all(model.parts for model in models):
            yield fewer.but(events=tuple(moved), delayed=delayed, held=held, models=models)


def _simpler_events(program: Program) -> Iterator[Program]:
    for at, event in enumerate(program.events):
        routes = getattr(event, "routes", ())
        if len(routes) > 1:
            for route in dict.fromkeys(routes):
                yield _with_event(program, at, dataclasses.replace(event, routes=(route,)))
        for field in dataclasses.fields(event):
            default = field.default
            if default is not dataclasses.MISSING and getattr(event, field.name) != default:
                yield _with_event(program, at, dataclasses.replace(event, **{field.name: default}))


def _simpler_parts(program: Program) -> Iterator[Program]:
    for number, part in enumerate(program.parts):
        for simpler in (Part("Wide"), Part("Wide", part.width, part.dtype), Part(part.kind), Part(part.kind, 2048)):
            is_simpler = simpler.width < part.width or simpler.dtype != part.dtype or simpler.kind != part.kind
            if simpler != part and is_simpler and simpler.width <= part.width:
                yield program.but(parts=(*program.parts[:number], simpler, *program.parts[number + 1:]))
