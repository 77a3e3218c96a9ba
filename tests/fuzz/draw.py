"""From a seed to a program. Swarm testing: each seed allows only a few kinds of events, and draws those often.

The order of decisions: what kind of training (mode, ranks, backend), which events, which parts of which size, which
options, and then the steps. What a promise does not cover is left out here, in `_fits`, each with its reason.
"""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz import events as ev
from tests.fuzz.program import LINEAR_OPTIMIZERS, OPTIMIZERS, Part, Program, Route

KIB = 1024
# Where the code takes another way: gradients that move on arrival, slots of shared memory, the first bucket.
THRESHOLDS = (64 * KIB, 256 * KIB, 1024 * KIB)
ELEMENTS_PER_WIDTH = {"Conv": 18}
ITEM_BYTES = {"float64": 8, "complex64": 8, "bfloat16": 2, "float16": 2}
MODES = {"plain": 10, "zero": 3, "overlapped": 4, "overlapped_later": 4, "in_backward": 1}
WEIGHTS = (
    (1.0, 3.0),
    (0.0, 1.0),
    (1e-7, 1e-7),
    (1e-5, 3e-5),
    (3e5, 2e5),
    (1000003.0, 1.0, 65536.0),
    (0.5, 0.25, 2.0, 7.0),
    (5.0, 5.0),
)
# How often a kind of event is among those that a seed allows.
KINDS = {
    "no_sync": 3,
    "two_forwards": 2,
    "each": 2,
    "twice": 2,
    "partial": 2,
    "penalty": 2,
    "hidden": 3,
    "inner": 1,
    "fail": 3,
    "look": 2,
    "saliency": 3,
    "nested": 4,
    "again": 3,
    "recomputed": 1,
    "unused": 4,
    "experts": 3,
    "order": 1,
    "weights": 3,
    "keep": 2,
    "place": 2,
    "listen": 2,
    "clip": 2,
    "reload": 2,
    "rate": 1,
    "retype": 2,
    "freeze": 2,
    "join": 2,
    "zeros": 3,
    "accumulate": 2,
}
# Ways to a gradient.
FORMS = ("two_forwards", "each", "twice", "partial", "penalty", "hidden", "inner")
# Several backwards of one graph, or of graphs of the same parameters: not where the first of them changes those.
SEVERAL_BACKWARDS = {"each", "twice", "inner", "accumulate", "fail"}
# `.grad` belongs to the optimizer where it is divided among the ranks, and is gone where backward steps.
NEEDS_GRADIENTS = {"keep", "place", "listen"}


def draw(seed: int) -> Program:
    """The program of this seed, always the same."""
    return _Draw(seed).program()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.mode = self.pick(MODES)
        self.ranks = self.pick({1: 1, 2: 7, 3: 2, 4: 1})
        self.kinds: set[str] = set()
        wanted = self.chance.choice((1, 2, 2, 3, 3, 4, 5))
        while wanted > len(self.kinds):
            self.kinds.add(self.pick(KINDS))
        self.options: dict[str, Any] = {"optimizer": "sgd"}
        self.draw_mode()
        self.parts = self.draw_parts()
        self.draw_options()
        self.kinds = {kind for kind in self.kinds if self._fits(kind)}
        self.optimizer_for_exactness()
        self.data = 0
        self.num_steps = self.chance.choice((2, 3, 3, 4, 4, 5, 6))
        self.draw_uses()

    def pick(self, weights: dict[Any, Any]) -> Any:
        return self.chance.choices(list(weights), list(weights.values()))[0]

    def often(self, share: float) -> bool:
        return self.chance.random() < share

    # -- what is trained -----------------------------------------------------------------------

    def draw_mode(self) -> None:
        zero: dict[str, Any] = {}
        if self.mode in ("zero", "overlapped", "overlapped_later"):
            if self.often(0.25):
                zero["stage"] = 2
            if self.often(0.2):
                zero["partition"] = "parameter"
            elif self.often(0.2):
                zero["shared_parameters"] = True
            if self.mode == "zero" and self.often(0.3) and "shared_parameters" not in zero:
                zero["parameters_as_bucket_view"] = True
            self.options["optimizer_first"] = self.often(0.3)
        self.zero = zero
        if self.often(0.12) and self.mode != "in_backward":
            self.options["mixed"] = self.chance.choice(
                (("bfloat16", None), ("bfloat16", "float32"), ("float16", "float32"), (None, "bfloat16"))
            )
        if "join" not in self.kinds and "mixed" not in self.options and self.mode == "plain" and self.often(0.06):
            self.options["delayed"] = (1, 0)

    def draw_parts(self) -> tuple[Part, ...]:
        kinds = ["Wide", "Biased", "Words", "Tied", "Odd", "Frozen", "Unannounced"]
        if "mixed" not in self.options:
            kinds += ["Conv"]
            scatters = self.mode.startswith("overlapped") and self.zero.get("partition") != "parameter"
            if not scatters and "shared_parameters" not in self.zero:
                kinds += ["SparseWords"]
        palette = self.chance.sample(kinds, self.chance.choice((1, 2, 3)))
        dtypes = ["float32"] * 3
        if "mixed" not in self.options:
            dtypes += [self.chance.choice(("bfloat16", "float16", "float64", "complex64"))] * self.chance.choice((0, 0, 1))
        threshold = self.chance.choice((None, None, *THRESHOLDS[:2], *THRESHOLDS[:1] * 3, THRESHOLDS[2]))
        parts = [Part(self.chance.choice(("Wide", "Biased")), self.draw_width("Wide", "float32", threshold))]
        for _ in range(self.chance.choice((1, 2, 3, 3, 4, 5))):
            kind, dtype = self.chance.choice(palette), self.chance.choice(dtypes)
            if kind not in ("Wide", "Biased") and dtype not in ("float32", "float64"):
                dtype = "float32"
            parts.append(Part(kind, self.draw_width(kind, dtype, threshold), dtype))
        return tuple(parts)

    def draw_width(self, kind: str, dtype: str, threshold: int | None) -> int:
        if threshold is None or self.often(0.4):
            return self.chance.choice((8, 9, 16, 24, 40))
        row = ELEMENTS_PER_WIDTH.get(kind, 8) * ITEM_BYTES.get(dtype, 4)
        return max(8, threshold // row + self.chance.choice((-1, 0, 0, 1)))

    def num_bytes(self, part: Part) -> int:
        return part.width * ELEMENTS_PER_WIDTH.get(part.kind, 8) * ITEM_BYTES.get(part.dtype, 4)

    def draw_cap(self) -> float | None:
        sizes = [self.num_bytes(part) for part in self.parts]
        way = self.pick({"default": 3, "tiny": 3, "one": 3, "two": 3, "fixed": 3})
        if way == "default":
            return None
        if way == "tiny":
            return 0.0001
        if way == "fixed":
            return self.chance.choice((0.06, 0.0625, 0.3, 0.6, 1.0))
        size = sum(self.chance.sample(sizes, min(len(sizes), 1 if way == "one" else 2)))
        return max(size + self.chance.choice((-4, 0, 4, 64)), 16) / KIB / KIB

    def draw_options(self) -> None:
        options = self.options
        options["cap_mb"] = self.draw_cap()
        options["views"] = self.often(0.3) and not (self.zero.get("stage") == 2 and self.mode != "zero")
        options["find_unused"] = self.often(0.15)
        options["batched"] = self.often(0.1)
        options["static"] = self.often(0.1) and "delayed" not in options and self.mode != "in_backward"
        options["skip_unused"] = not options["static"] and "delayed" not in options and self.often(0.05)
        sparse = any(part.kind in ("SparseWords", "Unannounced") for part in self.parts)
        if self.often(0.18) and not sparse and "delayed" not in options and self.mode != "in_backward":
            names = ["allreduce_hook", "allreduce_hook"]
            if all(part.dtype in ("float32", "float64") for part in self.parts) and "mixed" not in options:
                names += ["fp16_compress_hook", "bf16_compress_hook"]
            options["hook"] = self.chance.choice(names)
        if self.mode == "zero" and sparse:
            self.zero = {name: value for name, value in self.zero.items() if name == "stage"} | {"partition": "parameter"}
        if not sparse:
            options["optimizer"] = self.chance.choice(list(OPTIMIZERS))

    def optimizer_for_exactness(self) -> None:
        """Where parameters are all that can be compared, an optimizer that makes little of an error in the last bit."""
        options = self.options
        rounds = self.ranks > 2 or "mixed" in options or "hook" in options
        rounds = rounds or self.kinds & {"weights", "inner", "join", "again", "clip", "each", "twice", "partial"}
        rounds = rounds or any(part.dtype in ("bfloat16", "float16") for part in self.parts)
        if self.mode.startswith("overlapped") and rounds and options["optimizer"] not in LINEAR_OPTIMIZERS:
            options["optimizer"] = self.chance.choice(LINEAR_OPTIMIZERS)
        # A rank that has run out of inputs does not step a plain optimizer, so that its state falls behind.
        if "join" in self.kinds and self.mode == "plain":
            options["optimizer"] = "sgd"

    def _fits(self, kind: str) -> bool:
        options, kinds = self.options, {part.kind for part in self.parts}
        is_sparse = "SparseWords" in kinds
        in_backward = self.mode in ("overlapped", "in_backward")
        if (options.get("static") or options.get("skip_unused")) and kind not in (
            *("no_sync", "look", "saliency", "weights", "keep", "place", "clip", "reload", "rate", "zeros", "accumulate"),
            *(("nested", "again", "recomputed") if options.get("static") else ()),
        ):
            return False  # both promise that every step is like the first
        if kind in SEVERAL_BACKWARDS and in_backward:
            return False
        # The weight may be updated before a nested backward recomputes with it, or another derivative needs it.
        if kind in ("again", "penalty") and in_backward:
            return False
        # As in torch, a forward overwrites the buffers that the graph of the forward before it has saved.
        if kind in ("two_forwards", "each") and "Conv" in kinds:
            return False
        if kind in NEEDS_GRADIENTS and (self.mode.startswith("overlapped") or self.mode == "in_backward"):
            return False
        if "mixed" in options and kind in ("place", "listen", "penalty", "retype"):
            return False
        if "delayed" in options and kind in ("listen", "place", "keep", "fail", "freeze", "retype", "hidden", "inner"):
            return False
        shared = "shared_parameters" in self.zero
        return {
            "keep": not options["views"],
            "place": not is_sparse,
            "clip": not is_sparse and not in_backward,
            "retype": all(part.dtype == "float32" for part in self.parts) and not shared,
            "reload": not shared or self.mode == "in_backward",
            "join": "Conv" not in kinds and self.mode != "in_backward",
            "accumulate": not self.mode.startswith("overlapped") and self.zero.get("stage") != 2,
            "zeros": self.mode != "in_backward",
            # Hooks that listen see what autograd accumulated, which a late part of a gradient is not all of.
            "listen": not self.kinds & {"nested", "again"},
        }.get(kind, True)

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
        if "again" in self.kinds:
            for _ in range(self.chance.choice((1, 2))):
                self.again.append((*self._use(), self.chance.random(), self.chance.choice(hows)))
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
        order = [p for p in self.order if p not in gone and (p not in self.experts or p == chosen)]
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
        events: list[Any] = []
        if "listen" in self.kinds and self.often(0.5):
            events.append(ev.Listen(self.chance.choice((1, 2, 3)), self.often(0.3)))
        for step in range(self.num_steps):
            events += self.draw_around(step)
            events += self.draw_step(step)
        options = {name: value for name, value in self.options.items() if value not in (None, False)}
        return Program(
            seed=self.seed,
            ranks=self.ranks,
            backend=self.chance.choice(("gloo", "phalanx")),
            parts=self.parts,
            events=tuple(events),
            mode=self.mode,
            zero=tuple(sorted(self.zero.items())),
            **options,
        )

    def draw_step(self, step: int) -> list[Any]:
        zero, kept = self.draw_zero(step), []
        if "join" in self.kinds and step and self.often(0.4):
            return [zero or ev.Zero(), self.draw_join(step)]
        found = [zero] if zero else []
        if "place" in self.kinds and self.often(0.5):
            # Where nobody uses a parameter, ranks would step it with what each of them placed there.
            unsure = self.kinds & {"unused", "experts", "freeze", "partial", "penalty"} or self.options["skip_unused"]
            found = [ev.Zero(), ev.Place(self.chance.choice(("alike" if unsure else "own", "flat")))]
        if "no_sync" in self.kinds and self.often(0.6):
            found += [self.draw_pass(step, sync=False) for _ in range(self.chance.choice((1, 1, 2)))]
            found += self.draw_around(step) if self.often(0.3) else []
        found.append(self.draw_pass(step, sync=True))
        kept += [ev.Keep()] if "keep" in self.kinds and self.often(0.7) else []
        clip = self.chance.choice((0.01, 1.0)) if "clip" in self.kinds and self.often(0.6) else None
        steps = self.mode.startswith("overlapped") or "accumulate" not in self.kinds or self.often(0.6)
        return [*found, *kept, *([ev.Step(clip)] if steps else [])]

    def draw_zero(self, step: int) -> Any:
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
        if form == "plain" and "saliency" in self.kinds and self.often(0.5):
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
                return ev.Inner(**common)
        return ev.Backward(**common, peek=peek)

    def draw_around(self, step: int) -> list[Any]:
        """What happens between two steps, or between two micro-batches of one."""
        found: list[Any] = []
        if "look" in self.kinds and self.often(0.5):
            mode = self.chance.choice(("grad", "no_grad", "eval", "eval"))
            rank = ev.EVERY_RANK if mode == "grad" or self.often(0.6) else self.chance.randrange(self.ranks)
            found.append(ev.Look(self.fresh(), self.draw_routes(step, nested=False), mode, rank))
        if "saliency" in self.kinds and self.often(0.4):
            rank = self.chance.choice((ev.EVERY_RANK, self.chance.randrange(self.ranks)))
            found.append(ev.Look(self.fresh(), self.draw_routes(step, nested=False), "saliency", rank))
        if "fail" in self.kinds and self.often(0.4):
            routes = self.draw_routes(step, nested=False, alike=True)
            at, how = self.chance.randrange(len(routes[0])), self.chance.choice(("none", "zeros", "zeros"))
            found.append(ev.Fail(self.fresh(), routes, at=at, how=how, sync=self.often(0.8)))
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

    def draw_join(self, step: int) -> Any:
        counts = tuple(self.chance.randint(0, 3) for _ in range(self.ranks))
        if not any(counts):
            counts = (1, *counts[1:])
        dropped = tuple(p for p in self.order if p and self.often(0.3))
        self.data += 3
        routes = self.draw_routes(step, nested=False)
        return ev.Join(self.fresh(), routes, counts=counts, initial=self.often(0.5), dropped=dropped)
