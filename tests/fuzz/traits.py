"""What a seed is about: the kind of training, a few kinds of events, the parts of the model and their sizes, options.

Swarm testing: each seed allows only a few kinds of events, and draws those often. What a promise does not cover is left
out here, in `_fits`, each with its reason.
"""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.program import LINEAR_OPTIMIZERS, OPTIMIZERS, Part, Program, routes_of

KIB = 1024
# Where the code takes another way: gradients that move on arrival, slots of shared memory, the first bucket.
THRESHOLDS = (64 * KIB, 256 * KIB, 1024 * KIB)
ELEMENTS_PER_WIDTH = {"Conv": 18}
ITEM_BYTES = {"float64": 8, "complex64": 8, "bfloat16": 2, "float16": 2}
# The others cannot compute in 16 bits, or with complex numbers.
KINDS_OF_DTYPE = {
    "bfloat16": ("Wide", "Biased", "Words", "Tied", "Odd"),
    "float16": ("Wide", "Biased", "Words", "Tied", "Odd"),
    "complex64": ("Wide", "Biased"),
}
# Compiling takes a second or two, where another program takes a tenth of one.
MODES = {"plain": 10, "zero": 3, "overlapped": 4, "overlapped_later": 4, "in_backward": 1, "compiled": 0.12}
COMPILED_KINDS = {"no_sync", "zeros", "accumulate", "rate", "weights", "clip", "two_forwards", "twice", "keep"}
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
    "keep": 3,
    "place": 2,
    "listen": 4,
    "clip": 2,
    "reload": 2,
    "rate": 1,
    "retype": 2,
    "freeze": 2,
    "join": 2,
    "zeros": 3,
    "accumulate": 2,
}
# Features that chance alone would rarely bring together, and that touch the same lines of code. Kinds of events, modes
# and options; a third of the seeds begin with one of these.
THEMES = (
    *("nested again large", "nested again large views", "nested again hook", "nested again overlapped_later"),
    *("fail zeros large", "fail zeros views", "fail no_sync overlapped_later", "fail mixed"),
    *("keep hook large", "keep large accumulate", "keep no_sync", "place large", "place zeros accumulate"),
    *("join unused zero", "join unused overlapped", "join hook", "join delayed", "weights delayed", "unused delayed"),
    *("retype views", "retype views zeros", "clip complex64 overlapped_later", "weights float16", "weights bfloat16"),
    *("adagrad unused overlapped_later", "adagrad unused overlapped", "zeros unused overlapped", "zeros unused"),
    *("mixed each", "mixed twice", "mixed large no_sync", "mixed weights", "mixed nested", "mixed zero"),
    *("saliency no_sync weights", "saliency overlapped", "saliency mixed", "hidden no_sync", "penalty unused"),
    *("freeze overlapped", "freeze views", "experts no_sync", "experts views accumulate", "unused hook large"),
    *("listen scale large", "listen views", "inner accumulate", "partial views", "order experts"),
)
# Several backwards of one graph, or of graphs of the same parameters: not where the first of them changes those.
SEVERAL_BACKWARDS = {"each", "twice", "inner", "accumulate", "fail"}
# `.grad` belongs to the optimizer where it is divided among the ranks, and is gone where backward steps.
NEEDS_GRADIENTS = {"keep", "place", "listen"}


def num_bytes(part: Part) -> int:
    """The bytes of the part's largest parameter."""
    return part.width * ELEMENTS_PER_WIDTH.get(part.kind, 8) * ITEM_BYTES.get(part.dtype, 4)


def words_of(program: Program) -> set[str]:
    """What a program has, in words by which programs can be chosen: events, parts, dtypes, options, modes, sizes."""
    found = {*program.modes, program.backend, program.optimizer, f"{program.ranks}_ranks"}
    found |= {"several"} if program.models else set()
    for event in program.events:
        found.add(type(event).__name__)
        found |= {"no_sync"} if not getattr(event, "sync", True) else set()
        found |= {"weights"} if getattr(event, "weights", None) else set()
        found |= {"clip"} if getattr(event, "clip", None) else set()
        found |= {"zeros"} if getattr(event, "how", "") == "zeros" else set()
        found |= {event.together} if getattr(event, "together", "chain") != "chain" else set()
    routes = routes_of(program.events)
    found |= {how for route in routes for _, how in route if how}
    found |= {"unused"} if any(len({n for n, _ in route}) < len(program.parts) for route in routes) else set()
    found |= {"again"} if any(len({n for n, _ in route}) < len(route) for route in routes) else set()
    found |= {word for part in program.parts for word in (part.kind, part.dtype)}
    found |= {"large"} if any(num_bytes(part) >= THRESHOLDS[0] for part in program.parts) else set()
    found |= {"many_rows"} if any(part.kind == "SparseWords" and part.width >= 2000 for part in program.parts) else set()
    options = ("views", "static", "find_unused", "skip_unused", "batched", "mixed", "delayed", "hook", "nonfinite", "drift")
    options += ("common",)
    found |= {name for name in options if getattr(program, name)}
    options_of_zero = (*program.zero, *(pair for model in program.models for pair in model.zero))
    found |= {f"{name}={value}" for name, value in options_of_zero}
    return found | ({"many_buckets"} if program.cap_mb is not None else set())


class Traits:
    """What is decided about a program before its first event."""

    KINDS = KINDS
    THEMES = THEMES
    THEMED = 0.35

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.theme: frozenset[str] = frozenset()
        if self.often(self.THEMED):
            self.theme = frozenset(self.chance.choice(self.THEMES).split())
        self.mode = next((mode for mode in MODES if mode in self.theme), None) or self.pick(MODES)
        self.ranks = self.pick({1: 1, 2: 7, 3: 2, 4: 1})
        self.kinds = {kind for kind in self.KINDS if kind in self.theme}
        wanted = self.chance.choice((1, 2, 3, 3, 4, 5, 6))
        while wanted > len(self.kinds):
            self.kinds.add(self.pick(self.KINDS))
        if "nested" in self.kinds and self.often(0.4):
            self.kinds.add("again")
        self.options: dict[str, Any] = {"optimizer": "sgd"}
        self.draw_mode()
        self.parts = self.draw_parts()
        self.draw_options()
        self.kinds = {kind for kind in self.kinds if self._fits(kind)}
        self.optimizer_for_exactness()
        # By a chance of its own, so that all else of a seed stays as it is without.
        self.apart = random.Random(~seed)
        self.draw_watching()

    def pick(self, weights: dict[Any, Any]) -> Any:
        return self.chance.choices(list(weights), list(weights.values()))[0]

    def often(self, share: float, word: str = "") -> bool:
        """By chance, or because the theme says so."""
        return self.chance.random() < share or word in self.theme

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
        if self.often(0.12, "mixed") and self.mode not in ("in_backward", "compiled"):
            self.options["mixed"] = self.chance.choice(
                (("bfloat16", None), ("bfloat16", "float32"), ("float16", "float32"), (None, "bfloat16"))
            )
        self.delays = self.often(0.04, "delayed") and "mixed" not in self.options
        if self.delays:
            self.mode, self.zero = "plain", {}

    def draw_parts(self) -> tuple[Part, ...]:
        kinds = ["Wide", "Biased", "Words", "Tied", "Odd", "Frozen", "Unannounced"]
        if self.options.get("mixed", ("",))[0] == "float16":
            kinds.remove("Unannounced")  # torch cannot add up sparse gradients of that dtype
        if self.mode == "compiled":
            kinds = kinds[:4]
        elif "mixed" not in self.options:
            kinds += ["Conv"]
            scatters = self.mode.startswith("overlapped") and self.zero.get("partition") != "parameter"
            if not scatters and "shared_parameters" not in self.zero:
                kinds += ["SparseWords"]
        palette = self.chance.sample(kinds, self.chance.choice((1, 2, 3)))
        dtypes = ["float32"] * 2
        if "mixed" not in self.options and self.mode != "compiled":
            other = next(iter(self.theme & set(ITEM_BYTES)), None) or self.chance.choice(list(ITEM_BYTES))
            dtypes += [other] * (3 if other in self.theme else self.chance.choice((0, 0, 1)))
            palette += ["Wide"] if other in self.theme else []
        threshold = self.chance.choice((*([] if "large" in self.theme else [None, None]), *THRESHOLDS, *THRESHOLDS[:1] * 3))
        parts = [Part(self.chance.choice(("Wide", "Biased")), self.draw_width("Wide", "float32", threshold))]
        for _ in range(self.chance.choice((1, 2, 3, 3, 4, 5))):
            kind, dtype = self.chance.choice(palette), self.chance.choice(dtypes)
            if kind not in KINDS_OF_DTYPE.get(dtype, (kind,)):
                dtype = "float32"
            parts.append(Part(kind, self.draw_width(kind, dtype, threshold), dtype))
        dense = [number for number, part in enumerate(parts) if part.kind in ("Wide", "Biased", "Words", "Tied")]
        if self.delays and len(dense) > 1:
            self.options["delayed"] = (dense[-1], self.chance.choice(dense[:-1]))
        return tuple(parts)

    def draw_width(self, kind: str, dtype: str, threshold: int | None) -> int:
        if threshold is None or self.often(0.4):
            return self.chance.choice((8, 9, 16, 24, 40))
        row = ELEMENTS_PER_WIDTH.get(kind, 8) * ITEM_BYTES.get(dtype, 4)
        return max(8, threshold // row + self.chance.choice((-1, 0, 0, 1)))

    def draw_cap(self) -> float | None:
        sizes = [num_bytes(part) for part in self.parts]
        way = self.pick({"default": 3, "tiny": 3, "one": 3, "two": 4, "fixed": 3})
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
        options["views"] = self.often(0.3, "views") and not (self.zero.get("stage") == 2 and self.mode != "zero")
        options["find_unused"] = self.often(0.15)
        options["batched"] = self.often(0.1)
        options["static"] = self.often(0.1) and "delayed" not in options and self.mode != "in_backward"
        options["skip_unused"] = not options["static"] and "delayed" not in options and self.often(0.05)
        sparse = any(part.kind in ("SparseWords", "Unannounced") for part in self.parts)
        if self.often(0.18, "hook") and not sparse and "delayed" not in options and self.mode != "in_backward":
            names = ["allreduce_hook", "allreduce_hook"]
            if all(part.dtype in ("float32", "float64") for part in self.parts) and "mixed" not in options:
                names += ["fp16_compress_hook", "bf16_compress_hook"]
            options["hook"] = self.chance.choice(names)
        if self.mode == "zero" and sparse:
            self.zero = {name: value for name, value in self.zero.items() if name == "stage"} | {"partition": "parameter"}
        if not sparse:
            named = next(iter(self.theme & set(OPTIMIZERS)), None)
            options["optimizer"] = named or self.chance.choice([name for name in OPTIMIZERS if name != "lbfgs"])

    def draw_watching(self) -> None:
        """Whether somebody looks for what is not finite, what then happens, and whether replicas are compared."""
        options = self.options
        # What an optimizer has used before the pass has ended cannot be skipped, which is refused.
        steps_early = self.mode.startswith("overlapped") or self.mode == "in_backward"
        if self.apart.random() < 0.2:
            options["nonfinite"] = self.apart.choice(("raise", "warn") if steps_early else ("raise", "warn", "skip", "skip"))
        if self.apart.random() < 0.15:
            options["drift"] = self.apart.choice((1, 2, 3))
        promised = options["static"] or options["skip_unused"] or "delayed" in options
        # Where backward steps, it has stepped with some of what is not finite, or stopped between two steps.
        in_backward = self.mode in ("overlapped", "in_backward", "compiled")
        self.poisons = "nonfinite" in options and not promised and not in_backward and self.apart.random() < 0.7

    def optimizer_for_exactness(self) -> None:
        """Where parameters are all that can be compared, an optimizer that makes little of an error in the last bit."""
        options = self.options
        rounds = self.ranks > 2 or "mixed" in options or "hook" in options
        rounds = rounds or self.kinds & {"weights", "inner", "join", "again", "clip", "each", "twice", "partial"}
        rounds = rounds or any(part.dtype in ("bfloat16", "float16") for part in self.parts)
        linear = (*LINEAR_OPTIMIZERS, "adagrad")  # which divides by the root of a sum that begins at 0.1
        only_parameters = self.mode.startswith("overlapped") or self.mode == "in_backward"
        if only_parameters and rounds and options["optimizer"] not in linear:
            options["optimizer"] = self.chance.choice(LINEAR_OPTIMIZERS)
        # The others divide by a root that vanishes in 16 bits.
        if any(part.dtype == "float16" for part in self.parts) and options["optimizer"] not in LINEAR_OPTIMIZERS:
            options["optimizer"] = self.chance.choice(LINEAR_OPTIMIZERS)
        # A rank that has run out of inputs does not step a plain optimizer, so that its state falls behind. And the turns of
        # a join are compared together, at its end.
        if "join" in self.kinds:
            sparse = any(part.kind in ("SparseWords", "Unannounced") for part in self.parts)
            options["optimizer"] = "sgd" if self.mode == "plain" or sparse else self.chance.choice(LINEAR_OPTIMIZERS)

    def _fits(self, kind: str) -> bool:
        options, kinds = self.options, {part.kind for part in self.parts}
        is_sparse = "SparseWords" in kinds
        in_backward = self.mode in ("overlapped", "in_backward")
        if (options.get("static") or options.get("skip_unused")) and kind not in (
            *("no_sync", "look", "saliency", "weights", "keep", "place", "clip", "reload", "rate", "zeros", "accumulate"),
            *(("nested", "again", "recomputed") if options.get("static") else ()),
        ):
            return False  # both promise that every step is like the first
        if self.mode == "compiled" and kind not in COMPILED_KINDS:
            return False
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
        # Their gradients live in a buffer of the wrapper, and are reduced where the chosen parameter has a gradient.
        if "delayed" in options and kind in ("listen", "place", "keep", "fail", "freeze", "retype", "partial", "penalty"):
            return False
        shared = "shared_parameters" in self.zero
        return {
            "keep": not options["views"],
            "place": not is_sparse,
            "clip": not is_sparse and not in_backward,
            "retype": all(part.dtype == "float32" for part in self.parts) and self.mode in ("plain", "zero") and not shared,
            "reload": not shared or self.mode == "in_backward",
            "join": "Conv" not in kinds and self.mode != "in_backward",
            "accumulate": not self.mode.startswith("overlapped") and self.zero.get("stage") != 2,
            "zeros": self.mode != "in_backward",
            # Hooks that listen see what autograd accumulated, which a late part of a gradient is not all of.
            "listen": not self.kinds & {"nested", "again"},
        }.get(kind, True)
