"""From a seed to a program: routes through the parts, and what happens step by step.

What the program is about has been decided before, in `traits.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz import events as ev
from tests.fuzz.program import Program, Route
from tests.fuzz.traits import Traits

WEIGHTS = (
    (1.0, 3.0),
    (0.0, 1.0),
    (1e-7, 1e-7),
    (1e-5, 3e-5),
    (3e5, 2e5),
    (2e6, 7e5),
    (1000003.0, 1.0, 65536.0),
    (0.5, 0.25, 2.0, 7.0),
    (5.0, 5.0),
)
# Ways to a gradient.
FORMS = ("two_forwards", "each", "twice", "partial", "penalty", "hidden", "inner")


# Kinds of programs whose backwards do not reach every parameter.
LEAVES_SOME_OUT = {"unused", "experts", "freeze", "partial", "penalty", "inner"}


class Draw(Traits):
    """One program, drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.data = 0
        self.num_steps = self.chance.choice((2, 3, 3, 4, 4, 5, 6))
        self.draw_uses()

    # -- which parts run, where, and how -------------------------------------------------------

    def draw_uses(self) -> None:
        others = list(range(1, len(self.parts)))
        self.chance.shuffle(others)
        self.anchor_first = "inner" not in self.kinds and ("partial" in self.kinds or self.often(0.5))
        self.order = [0, *others] if self.anchor_first else [*others, 0]
        self.experts = others[: max(2, len(others) // 2)] if "experts" in self.kinds else []
        some = range(self.ranks)
        # (part, since step, ranks)
        self.nested = [self._use() for _ in range(self.chance.choice((1, 2)))] if "nested" in self.kinds else []
        self.recomputed = {self.chance.choice(self.order) for _ in range(2)} if "recomputed" in self.kinds else set()
        # (part, since step, ranks, place, how)
        hows = ("", "reentrant", "reentrant") if "nested" in self.kinds else ("", "recomputed")
        self.again = []
        for _ in range(self.chance.choice((1, 2)) if "again" in self.kinds else 0):
            part, since, ranks = self._use()
            if "nested" in self.kinds and self.often(0.6):
                # The worst case: the plain use, last in forward, is first in backward, and sends the bucket off. That
                # nested backwards happen at all may have been known from the start, by another part.
                self.nested = [use for use in self.nested if use[0] != part]
                if self.often(0.5):
                    self.nested = [(use[0], 0, use[2]) for use in self.nested]
                self.again.append((part, since, ranks, 0.0, "reentrant"))
            else:
                self.again.append((part, since, ranks, self.chance.random(), self.chance.choice(hows)))
        self.is_nested = bool(self.nested) or any(use[4] == "reentrant" for use in self.again)
        # What a static graph or a dropped parameter leaves out, it leaves out from the first step to the last.
        self.always_unused = {part for part in others if self.options.get("skip_unused") and self.often(0.3)}
        self.some = some

    def _use(self) -> tuple[int, int, frozenset[int]]:
        since = 0 if self.options.get("static") or self.often(0.4) else self.chance.randrange(1, self.num_steps)
        ranks = frozenset(range(self.ranks))
        if not self.options.get("static") and self.often(0.3):
            ranks = frozenset(self.chance.sample(sorted(ranks), self.chance.randint(1, len(ranks))))
        return self.chance.choice(self.order), since, ranks

    def draw_routes(self, step: int, nested: bool = True, alike: bool = False) -> tuple[Route, ...]:
        uses = (*self.nested, *self.again)
        differ = {"experts", "unused", "order"} & self.kinds or any(len(use[2]) < self.ranks for use in uses)
        dropped = set(self.always_unused)
        if "unused" in self.kinds and self.often(0.5):
            dropped |= {part for part in self.order if part and self.often(0.4)}  # by all ranks
        if not differ or alike:
            return (self.draw_route(step, 0, dropped, nested, not alike),)
        return tuple(self.draw_route(step, rank, dropped, nested, True) for rank in range(self.ranks))

    def draw_route(self, step: int, rank: int, dropped: set[int], nested: bool, own: bool) -> Route:
        chosen = self.chance.choice(self.experts) if self.experts else 0
        gone = set(dropped)
        if own and "unused" in self.kinds and self.often(0.5):
            gone |= {part for part in self.order if part and self.often(0.3)}
        # The part whose gradient lets the delayed ones go is used by rank 0 at least.
        trigger = self.options["delayed"][1] if "delayed" in self.options and rank == 0 else 0
        gone.discard(trigger)
        order = [p for p in self.order if p not in gone and (p not in self.experts or p in (chosen, trigger))]
        if own and "order" in self.kinds and self.often(0.5):
            rest = [p for p in order if p]
            self.chance.shuffle(rest)
            order = [0, *rest] if self.anchor_first else [*rest, 0]
        recomputing = {use[0] for use in self.nested if step >= use[1] and rank in use[2]} if nested else set()
        route = [(p, "reentrant" if p in recomputing else "recomputed" if p in self.recomputed else "") for p in order]
        for part, since, ranks, place, how in self.again:
            if step >= since and rank in ranks and part not in gone:
                at = int(place * len(route)) if self.anchor_first is False else 1 + int(place * (len(route) - 1))
                route.insert(at, (part, how if nested or how != "reentrant" else ""))
        return tuple(route)

    # -- the steps -----------------------------------------------------------------------------

    def program(self) -> Program:
        events = self.begin()
        for step in range(self.num_steps):
            events += self.draw_poison(step)
            events += self.draw_around(step)
            events += self.draw_step(step, events)
        return self.program_of(events).but(backend=self.chance.choice(("gloo", "phalanx")))

    def begin(self) -> list[Any]:
        """What happens before the first step."""
        if "listen" in self.kinds and self.often(0.5):
            return [ev.Listen(self.chance.choice((1, 2, 3)), self.often(0.3, "scale"))]
        return []

    def program_of(self, events: Sequence[Any]) -> Program:
        options = {name: value for name, value in self.options.items() if value not in (None, False)}
        return Program(
            seed=self.seed,
            ranks=self.ranks,
            backend="gloo",
            parts=self.parts,
            events=tuple(events),
            mode=self.mode,
            zero=tuple(sorted(self.zero.items())),
            **options,
        )

    def draw_step(self, step: int, events: Sequence[Any]) -> list[Any]:
        zero, kept = self.draw_zero(events), []
        if "join" in self.kinds and step and self.often(0.4):
            return [zero or ev.Zero(), self.draw_join(step)]
        found = [zero] if zero else []
        if "place" in self.kinds and self.often(0.5):
            # Where nobody uses a parameter, ranks would step it with what each of them placed there.
            unsure = self.kinds & LEAVES_SOME_OUT or self.options["skip_unused"]
            found = [ev.Zero(), ev.Place(self.chance.choice(("alike" if unsure else "own", "flat")))]
        if "no_sync" in self.kinds and self.often(0.6):
            found += [self.draw_pass(step, sync=False) for _ in range(self.chance.choice((1, 1, 2)))]
            found += self.draw_around(step) if self.often(0.3) else []
        found.append(self.draw_pass(step, sync=True))
        kept += [ev.Keep()] if "keep" in self.kinds and self.often(0.7) else []
        clip = self.chance.choice((0.01, 1.0)) if "clip" in self.kinds and self.often(0.6) else None
        steps = self.mode.startswith("overlapped") or "accumulate" not in self.kinds or self.often(0.6)
        return [*found, *kept, *([ev.Step(clip)] if steps else [])]

    def draw_zero(self, events: Sequence[Any]) -> Any:
        # A failed backward has been zeroed already, in a way that another zeroing would hide.
        if events and isinstance(events[-1], ev.Fail) and self.often(0.7):
            return None
        if "accumulate" in self.kinds and self.often(0.5):
            return None
        via = self.chance.choice(("module", "wrapper", "optimizer"))
        return ev.Zero("zeros" if "zeros" in self.kinds and self.often(0.7) else "none", via)

    def fresh(self) -> int:
        self.data += 1
        return self.data

    def draw_pass(self, step: int, sync: bool) -> Any:
        forms = [kind for kind in FORMS if kind in self.kinds]
        form = self.chance.choice(forms) if forms and self.often(0.6) else "plain"
        peek = None
        # A static graph stays nested; and autograd.grad cannot go through a reentrant checkpoint.
        may_peek = not (self.options["static"] and self.is_nested)
        if form == "plain" and "saliency" in self.kinds and may_peek and self.often(0.5):
            peek = self.chance.choice((ev.EVERY_RANK, *range(self.ranks)))
        nested = form != "penalty" and peek is None
        common = {"data": self.fresh(), "routes": self.draw_routes(step, nested), "sync": sync}
        if sync and "weights" in self.kinds and form != "inner" and self.often(0.7):
            common["weights"] = self.chance.choice(WEIGHTS)
        match form:
            case "two_forwards" | "each":
                return ev.TwoForwards(**common, each=form == "each")
            case "twice":
                return ev.Twice(**common)
            case "partial":
                return ev.Partial(**common, rest=self.often(0.3) and self.mode not in ("overlapped", "in_backward"))
            case "penalty":
                return ev.Penalty(**common, alone=self.often(0.6))
            case "hidden":
                return ev.Hidden(**common, where=self.chance.choice(("object", "beside", "aux")))
            case "inner":
                return ev.Inner(**common, alone=self.often(0.5))
        return ev.Backward(**common, peek=peek)

    def draw_around(self, step: int) -> list[Any]:
        """What happens between two steps, or between two micro-batches of one."""
        found: list[Any] = []
        if "look" in self.kinds and self.often(0.5):
            mode = self.chance.choice(("grad", "no_grad", "eval", "eval"))
            # After a join, as in torch, a forward still asks all ranks whether they have inputs.
            alone = mode != "grad" and "join" not in self.kinds and self.often(0.4)
            rank = self.chance.randrange(self.ranks) if alone else ev.EVERY_RANK
            found.append(ev.Look(self.fresh(), self.draw_routes(step, nested=False), mode, rank))
        if "saliency" in self.kinds and self.often(0.4):
            rank = self.chance.choice((ev.EVERY_RANK, self.chance.randrange(self.ranks)))
            found.append(ev.Look(self.fresh(), self.draw_routes(step, nested=False), "saliency", rank))
        if "fail" in self.kinds and self.often(0.4):
            routes = self.draw_routes(step, nested=False, alike=True)
            at, how = self.chance.randrange(len(routes[0])), self.chance.choice(("none", "zeros", "zeros"))
            if "freeze" in self.kinds and self.mode.startswith("overlapped"):
                # Frozen afterwards, zeros that no backward has reduced would stay for good, and are refused at the step.
                how = "none"
            sync = self.often(0.8)
            # Drawn last, so that seeds of earlier days are the same programs but for this.
            found.append(ev.Fail(self.fresh(), routes, at=at, how=how, sync=sync, apart=sync and (at + self.data) % 2 == 0))
        if "reload" in self.kinds and self.often(0.4):
            found.append(ev.Reload("optimizer" if self.often(0.5) and self.mode != "in_backward" else "module"))
        if "rate" in self.kinds and self.often(0.5):
            found.append(ev.Rate(self.chance.choice((0.5, 2.0))))
        if "retype" in self.kinds and self.often(0.4):
            found.append(ev.Retype(self.chance.choice(("double", "double", "channels_last", "contiguous_format"))))
        thawed = [n for n, part in enumerate(self.parts) if n and part.kind != "Frozen"]
        if "freeze" in self.kinds and thawed and self.often(0.4):
            found.append(ev.Freeze(self.chance.choice(thawed), self.often(0.6)))
        return found

    def draw_poison(self, step: int) -> list[Any]:
        """A backward of which nothing is kept. What it needs is drawn apart (`Traits.apart`)."""
        apart = self.apart
        if not self.poisons or apart.random() > 0.5:
            return []
        route = tuple((part, "recomputed" if part in self.recomputed else "") for part in self.order)
        dense = [number for number, part in enumerate(self.parts) if part.kind in ("Wide", "Biased", "Words", "Tied")]
        part, value = apart.choice((-1, *dense)), apart.choice(("inf", "-inf", "nan"))
        return [ev.Poison(900 + step, (route,), victim=apart.randrange(self.ranks), part=part, value=value)]

    def draw_join(self, step: int) -> Any:
        counts = [self.chance.randint(0, 3) for _ in range(self.ranks)]
        if self.often(0.5):
            # One rank takes part in the first turn only, and holds its gradients while the others go on.
            counts[self.chance.randrange(self.ranks)] = 1
        counts[self.chance.randrange(self.ranks)] = self.chance.choice((1, 3, 3))
        trigger = self.options.get("delayed", (0, 0))[1]
        dropped = tuple(p for p in self.order if p not in (0, trigger) and self.often(0.4))
        self.data += 3
        routes = self.draw_routes(step, nested=False)
        return ev.Join(self.fresh(), routes, counts=tuple(counts), initial=self.often(0.5), dropped=dropped)
