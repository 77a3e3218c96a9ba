"""Fault plans drawn at random: any collective, any way through it, any fault at any of its moments."""

from __future__ import annotations

import random

import torch

from tests.comm.contract import BITWISE, CHECKS, FLOATS, INTEGERS, LARGE, MEDIUM, OPS, REDUCING, Case
from tests.comm.faults import Fault, FaultPlan

COLLECTIVES = tuple(name for name in CHECKS if name != "ring")  # which does not go through shared memory
# How often each fault is drawn. Stopping costs its time limit, so it is drawn less often.
WEIGHTS = {
    Fault.RAISE: 6,
    Fault.ABORT: 4,
    Fault.LEAVE: 4,
    Fault.SLOW: 3,
    Fault.PAUSE: 2,
    Fault.STOP: 1,
}
LAYOUTS = {2: ("ab",), 3: ("aab", "aba", "abc"), 4: ("aabb", "abab", "abca"), 5: ("abaab", "abcab")}


def draw_case(chance: random.Random) -> Case:
    """A collective with arguments."""
    collective = chance.choice(COLLECTIVES)
    dtype: torch.dtype = chance.choice((*FLOATS, *INTEGERS))
    op = "SUM"
    if collective in REDUCING:
        op = chance.choice(OPS if dtype.is_floating_point else (*OPS, *BITWISE))
    return Case(
        collective,
        dtype,
        op,
        chance.choice((0, 1, 1_003, MEDIUM, LARGE)),
        chance.choice(("none", "all", "some")),
        chance.random() < 0.5,
        chance.random() < 0.1,
        chance.randrange(1_000),
    )


def draw_plan(chance: random.Random, fault: Fault, world: int) -> FaultPlan:
    """A fault in some collective, on one host or on several."""
    layout = chance.choice(LAYOUTS[world]) if chance.random() < 0.3 else None
    return FaultPlan(draw_case(chance), fault, chance.randrange(world), chance.randrange(10_000), layout)


def draw_batch(chance: random.Random, world: int, size: int) -> list[FaultPlan]:
    """Plans that kill nobody, to be run one after the other by the same processes."""
    faults = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=size)
    return [draw_plan(chance, fault, world) for fault in faults]
