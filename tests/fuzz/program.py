"""A training program as a value: the model, how it is wrapped, and what happens to it, event by event.

Immutable and printable: `repr` gives Python that makes the same program again, which is how shrunk programs are
reported. Knows nothing of how a program is drawn, run or judged.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# One forward: which parts run in which order, and how each one is recomputed ("", "reentrant" or "recomputed").
Route = tuple[tuple[int, str], ...]


@dataclass(frozen=True, repr=False)
class Value:
    """Prints what differs from the defaults only, so that a shrunk program is a short one."""

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Part(Value):
    """One part of a model. `kind` is a class of `models`; `width` decides how many elements its parameters have."""

    kind: str
    width: int = 8
    dtype: str = "float32"


@dataclass(frozen=True, repr=False)
class Call(Value):
    """What one forward of the model does and returns. Of several models: which run, in which order, and `together` how."""

    route: Route
    returns: str = "tensor"
    boom: int | None = None
    inner: bool = False
    models: tuple[int, ...] | None = None
    # chain: each takes what the one before it gave · cut: so do they, but without its graph · sum: all take the input
    together: str = "chain"


@dataclass(frozen=True, repr=False)
class Model(Value):
    """One of several models, each in a wrapper of its own: how many of the program's parts it has, how it is trained."""

    parts: int
    mode: str = "plain"
    zero: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, repr=False)
class Program(Value):
    """Everything that a run depends on. `events` are values of the classes in `events`."""

    seed: int
    ranks: int
    backend: str
    parts: tuple[Part, ...]
    events: tuple[Any, ...]
    cap_mb: float | None = None
    views: bool = False
    static: bool = False
    find_unused: bool = False
    skip_unused: bool = False
    batched: bool = False
    mixed: tuple[str | None, str | None] | None = None  # the dtypes of parameters and of the reduction
    delayed: tuple[int, int] | None = None  # the part whose reduction is delayed, the part that triggers it
    hook: str | None = None
    nonfinite: str | None = None
    drift: int | None = None
    optimizer: str = "sgd"
    # plain · zero · overlapped (steps in backward) · overlapped_later (steps in step) · in_backward · compiled
    mode: str = "plain"
    zero: tuple[tuple[str, Any], ...] = ()
    optimizer_first: bool = False
    models: tuple[Model, ...] = ()  # empty: one model, of all parts
    held: tuple[int, ...] = ()  # parts that the optimizer is made without, and gets later as a group
    common: bool = False  # of several models, which are trained alike: one optimizer for all of them
    fused: bool = False  # torch's kernels that step a parameter by memory, whatever the strides of its gradient

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(model.mode for model in self.models) or (self.mode,)

    # Of several models: whether any of them.

    @property
    def steps_in_backward(self) -> bool:
        return any(mode in ("overlapped", "in_backward") for mode in self.modes)

    @property
    def is_overlapped(self) -> bool:
        return any(mode.startswith("overlapped") for mode in self.modes)

    @property
    def has_sharded_state(self) -> bool:
        return "zero" in self.modes or self.is_overlapped

    @property
    def parts_of(self) -> tuple[range, ...]:
        """By model, the numbers of its parts."""
        ends = list(itertools.accumulate(model.parts for model in self.models)) or [len(self.parts)]
        return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))

    @property
    def num_optimizers(self) -> int:
        return 1 if self.common else len(self.parts_of)

    @property
    def optimizer_options(self) -> tuple[str, dict[str, Any]]:
        """Of which class the optimizer is, and its arguments."""
        name, options = OPTIMIZERS[self.optimizer]
        if not self.fused:
            return name, options
        return name, {key: value for key, value in options.items() if key != "foreach"} | {"fused": True}

    @property
    def for_optimizer(self) -> Program:
        """Of the common one: what it is made by, with all parts."""
        return self.of(0).but(parts=self.parts, held=self.held)

    def of(self, model: int) -> Program:
        """The program of one of the models, as if there were no others."""
        if not self.models:
            return self
        mine, parts = self.models[model], self.parts_of[model]
        held = tuple(number - parts.start for number in self.held if number in parts)
        own = {"mode": mine.mode, "zero": mine.zero, "models": (), "held": held, "common": False}
        return self.but(parts=self.parts[parts.start : parts.stop], **own)

    def but(self, **changes: Any) -> Program:
        return dataclasses.replace(self, **changes)


OPTIMIZERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.05}),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "foreach": True}),
    "adagrad": ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5}),
    # Evaluates its closure three times; how often must not depend on a rank's own loss.
    "lbfgs": ("LBFGS", {"lr": 0.05, "max_iter": 3, "tolerance_change": 0.0, "tolerance_grad": 0.0}),
}
HAVE_FUSED = ("sgd", "momentum", "adam", "adamw", "adagrad")
# A small error of a gradient stays small in these; Adam would make a whole step of an error in the last bit.
LINEAR_OPTIMIZERS = ("sgd", "momentum")


def routes_of(events: Iterable[Any]) -> list[Route]:
    """Every route that any of the events takes on any rank."""
    return [route for event in events for route in getattr(event, "routes", ())]
