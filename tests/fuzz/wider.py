"""Seeds from `FIRST` on draw from more words: several models, groups, dtypes and closures that change amid training.

A range of seeds of their own, so that the programs of all others stay what they are: what notices mutations is known by
its seed (`tests/mutants/caught.json`).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fuzz import events as ev
from tests.fuzz.additions import with_additions
from tests.fuzz.draw import Draw
from tests.fuzz.ledger import Ledger
from tests.fuzz.program import LINEAR_OPTIMIZERS, Model, Part, Program
from tests.fuzz.traits import KINDS, KINDS_OF_DTYPE, THEMES

FIRST = 100_000

# Only for programs with several models.
OF_SEVERAL = {"apart": 4, "turns": 4, "alone": 4, "sum": 3, "cut": 3}
# Not for those: what one output or one optimizer is asked for.
OF_ONE = {"partial", "hidden", "inner", "join", "closure", "retype"}
MORE_KINDS = {"group": 5, "dtype": 5, "closure": 5, "freeze": 4, "accumulate": 4}
MORE_THEMES = (
    *("group overlapped", "group overlapped_later", "group zero momentum", "group accumulate overlapped_later"),
    *("dtype overlapped", "dtype overlapped_later", "dtype group overlapped_later", "dtype views"),
    *("accumulate overlapped_later", "accumulate overlapped", "accumulate no_sync overlapped_later"),
    *("freeze group overlapped_later", "freeze accumulate overlapped_later", "freeze dtype overlapped", "freeze overlapped"),
    *("closure overlapped", "closure overlapped_later", "closure zero", "closure zero adam", "lbfgs closure zero"),
    *("several apart", "several turns", "several alone cut", "several sum unused", "several fail", "several fail turns"),
    *("several turns overlapped", "several apart overlapped", "several alone overlapped", "several sum overlapped large"),
    *("several fail overlapped_later", "several alone overlapped_later", "several no_sync alone", "several weights turns"),
    *("several nested again", "several nested overlapped", "several unused zero", "several hook apart"),
    *("several accumulate alone overlapped_later", "several group turns overlapped", "several dtype alone overlapped_later"),
)
STRICTEST = ("overlapped", "overlapped_later", "zero", "plain")


class Wider(Draw):
    KINDS = KINDS | MORE_KINDS | OF_SEVERAL
    THEMES = (*THEMES[::3], *MORE_THEMES)
    THEMED = 0.6

    # -- what is trained -----------------------------------------------------------------------

    def draw_mode(self) -> None:
        super().draw_mode()
        self.modes: tuple[str, ...] = ()
        may = self.mode in STRICTEST and "mixed" not in self.options and not self.delays
        if may and self.often(0.25, "several"):
            num_models = self.chance.choice((2, 2, 3))
            self.modes = (self.mode,) * num_models
            if self.often(0.4):
                self.modes = tuple(self.chance.choice(STRICTEST) for _ in range(num_models))
            # What one of them cannot do, the program does not.
            self.mode = next(mode for mode in STRICTEST if mode in self.modes)

    def draw_parts(self) -> tuple[Part, ...]:
        parts = list(super().draw_parts())
        parts += [Part("Biased", self.draw_width("Biased", "float32", None)) for _ in range(len(self.modes) - len(parts))]
        is_sharded = set(self.modes) - {"plain"}
        if is_sharded or "lbfgs" in self.theme:
            taken = {"SparseWords": "Words", "Unannounced": "Words", "Conv": "Wide"}
            parts = [dataclasses.replace(part, kind=taken.get(part.kind, part.kind)) for part in parts]
        if "lbfgs" in self.theme:
            parts = [dataclasses.replace(part, dtype="float32") for part in parts]
        cuts = sorted(self.chance.sample(range(1, len(parts)), max(len(self.modes) - 1, 0)))
        ends = [*cuts, len(parts)] if self.modes else []
        self.models = [Model(end - start, mode) for start, end, mode in zip([0, *ends], ends, self.modes, strict=False)]
        return tuple(parts)

    def draw_options(self) -> None:
        super().draw_options()
        options = self.options
        if self.models:
            options["static"] = options["skip_unused"] = False
        if options["optimizer"] == "lbfgs":
            # Bit for bit or not at all: each step divides by differences of gradients.
            self.ranks, self.zero = min(self.ranks, 2), {}
            options |= {"static": False, "skip_unused": False, "hook": None}
            self.kinds &= {"closure", "rate", "look", "unused", "order", "experts"}
            if self.mode != "zero" or self.models or "mixed" in options:
                options["optimizer"] = "sgd"
        self.draw_auto()
        self.models = [dataclasses.replace(model, zero=self.zero_of(model.mode)) for model in self.models]
        self.held = self.draw_held()
        # Of a chance of its own, so that the rest of the program stays what it was.
        alike = set(self.modes) in ({"plain"}, {"zero"})
        self.common = alike and random.Random(f"common {self.seed}").random() < 0.35

    def draw_auto(self) -> None:
        """Whether the optimizer finds out by itself that gradients are sparse. Also of a chance of its own."""
        is_sparse = any(part.kind in ("SparseWords", "Unannounced") for part in self.parts)
        if is_sparse and self.zero.get("partition") == "parameter" and random.Random(f"auto {self.seed}").random() < 0.6:
            self.zero["partition"] = "auto"

    def draw_watching(self) -> None:
        super().draw_watching()
        # What is skipped is skipped wrapper by wrapper.
        self.poisons = self.poisons and not (self.models and self.options["nonfinite"] == "skip")

    def zero_of(self, mode: str) -> tuple[tuple[str, Any], ...]:
        if mode == "plain":
            return ()
        kept = {name: value for name, value in self.zero.items() if name != "parameters_as_bucket_view" or mode == "zero"}
        return tuple(sorted(kept.items()))

    def draw_held(self) -> tuple[int, ...]:
        """Parts that the optimizers are made without: never all of a model."""
        if "group" not in self.kinds or not self._fits("group"):
            return ()
        starts, at = {0}, 0
        for model in self.models:
            starts.add(at)
            at += model.parts
        return tuple(number for number in range(len(self.parts)) if number not in starts and self.often(0.3))

    def optimizer_for_exactness(self) -> None:
        super().optimizer_for_exactness()
        if "dtype" in self.kinds:
            # What is kept or placed is no longer what it was; Adam refuses a gradient of another dtype than its state.
            self.kinds -= {"keep", "place", "join", "retype"}
        carries = "accumulate" in self.kinds and self.mode.startswith("overlapped")
        if ("dtype" in self.kinds or carries) and self.options["optimizer"] not in LINEAR_OPTIMIZERS:
            self.options["optimizer"] = self.chance.choice(LINEAR_OPTIMIZERS)

    def _fits(self, kind: str) -> bool:
        options = self.options
        promised = options.get("static") or options.get("skip_unused")
        plainly = self.mode in STRICTEST and "delayed" not in options
        match kind:
            case "apart" | "turns" | "alone" | "sum" | "cut":
                return bool(self.models)
            case "group":
                return plainly and "join" not in self.kinds
            case "closure":
                return plainly and not self.models and not promised and "join" not in self.kinds
            case "dtype":
                is_float = all(part.dtype == "float32" for part in self.parts)
                is_shared = "shared_parameters" in self.zero
                # Alone, the sharded optimizer refuses it in words.
                promised = promised or "zero" in (self.mode, *self.modes)
                return plainly and is_float and not promised and not is_shared and "mixed" not in options
            case "accumulate" if self.mode.startswith("overlapped"):
                # In the second stage backward has freed what the next one would be added to.
                return self.mode == "overlapped_later" or self.zero.get("stage") != 2
        return super()._fits(kind) and not (self.models and kind in OF_ONE)

    # -- the steps -----------------------------------------------------------------------------

    def program(self) -> Program:
        drawn = super().program().but(models=tuple(self.models), held=self.held, common=self.common)
        return drawn.but(mode="plain", zero=()) if self.models else drawn

    def begin(self) -> list[Any]:
        """Overlapped, every parameter that a backward reduces has its optimizer before it does; else groups come later."""
        self.waiting = list(self.held)
        now = self.waiting if self.mode.startswith("overlapped") else []
        found = [self.draw_group(part) for part in now]
        self.waiting = [part for part in self.waiting if part not in now]
        return [*super().begin(), *found]

    def draw_group(self, part: int) -> Any:
        return ev.Group(part, self.chance.choice((0.01, 0.03, 0.1)))

    def draw_around(self, step: int) -> list[Any]:
        found = super().draw_around(step)
        if "group" in self.kinds and self.often(0.4):
            found.append(self.draw_group(self.waiting.pop() if self.waiting and self.often(0.8) else -1))
        if "dtype" in self.kinds and self.often(0.4):
            narrow = {part.kind for part in self.parts} <= set(KINDS_OF_DTYPE["bfloat16"])
            narrow = narrow and self.options.get("hook") in (None, "allreduce_hook")
            # The plain optimizer would keep a state of few digits for good; ours follows the parameters.
            narrow = narrow and self.options["optimizer"] == "sgd"
            dtype = self.chance.choice(("float64", "float64", "float32", *(["bfloat16"] if narrow else [])))
            # A gradient that is divided among the ranks cannot be converted, which is refused in words.
            found.append(ev.Dtype(dtype, zeroed=self.mode.startswith("overlapped") or self.often(0.5)))
        return found

    def draw_step(self, step: int, events: Sequence[Any]) -> list[Any]:
        needs = self.options["optimizer"] == "lbfgs"
        # Its gradients are not taken over before the step: in low precision some optimizers make much of their rounding,
        # and of an element that cancels out (before BatchNorm all do) those that divide make any step, from three ranks on.
        rounds = "mixed" in self.options or str(self.options.get("hook")).endswith("_compress_hook")
        rounds = rounds or (self.ranks > 2 and self.options["optimizer"] not in LINEAR_OPTIMIZERS)
        if needs or ("closure" in self.kinds and self.often(0.5) and not rounds):
            rate = self.chance.choice((1.0, 0.5, 2.0))
            routes = self.draw_routes(step, nested="nested" in self.kinds)
            # Once backward has made the step, a change is too late for it, which is refused in words.
            late = self.often(0.5) and self.mode != "overlapped"
            return [ev.Closure(self.fresh(), routes, rate=rate, late=late)]
        found = super().draw_step(step, events)
        if not isinstance(found[-1], ev.Step):
            return found
        last = found.pop()
        if "accumulate" in self.kinds and self.mode == "overlapped_later" and self.often(0.4):
            return found
        due = self.may_step([*events, *found])
        if len(due) == max(len(self.models), 1):
            return [*found, last]
        if self.common:
            return found
        return [*found, dataclasses.replace(last, models=tuple(due))] if due else found

    def may_step(self, events: Sequence[Any]) -> list[int]:
        """The models whose gradients are the same on all ranks; and overlapped, new."""
        program = self.program_of(events).but(models=tuple(self.models))
        latest = {event.part: event.frozen for event in events if isinstance(event, ev.Freeze)}
        frozen = {part for part, is_frozen in latest.items() if is_frozen}
        found = []
        for number, mode in enumerate(self.modes or (self.mode,)):
            ledger = Ledger(program, number)
            for event in events:
                ledger.see(event)
            # A backward makes no step of a model that is frozen whole; to ask for one is refused in words.
            is_new = ledger.is_due and not frozen.issuperset(program.parts_of[number])
            if not ledger.is_local and (is_new or not mode.startswith("overlapped")):
                found.append(number)
        return found

    def draw_pass(self, step: int, sync: bool) -> Any:
        event = super().draw_pass(step, sync)
        if not self.models:
            return event
        models: list[int] = list(range(len(self.models)))
        if "turns" in self.kinds and self.often(0.7):
            self.chance.shuffle(models)
        if "alone" in self.kinds and self.often(0.6):
            models = models[: self.chance.randint(1, len(models) - 1)]
        chosen = tuple(models) if models != list(range(len(self.models))) else None
        is_usual = isinstance(event, ev.Backward) and event.peek is None
        if is_usual and "apart" in self.kinds and self.often(0.7):
            kept = {"data": event.data, "routes": event.routes, "sync": sync, "weights": event.weights}
            return ev.Apart(**kept, models=chosen, reverse=self.often(0.5))
        together = [kind for kind in ("sum", "cut") if kind in self.kinds and (kind != "cut" or is_usual)]
        how = self.chance.choice(together) if together and self.often(0.6) else "chain"
        return dataclasses.replace(event, models=chosen, together=how)


def draw(seed: int) -> Program:
    """The program of this seed, always the same."""
    return Draw(seed).program() if seed < FIRST else with_additions(Wider(seed).program())


def seeds_from(first: int) -> Iterator[int]:
    """Without end, by turns of both ranges unless `first` is in the second: every word comes soon."""
    for seed in itertools.count(first):
        yield seed
        if first < FIRST:
            yield FIRST + seed
