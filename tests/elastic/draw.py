"""Cases drawn at random: program × optimizer × fault × moment × backend, the same for a seed every time."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.elastic.cases import Case
from tests.elastic.program import Plan

OPTIMIZERS = ("plain", "plain", "zero", "overlap", "late", "stage2", "two", "inside")
MODELS = ("plain", "plain", "plain", "norm", "low", "hook:half", "hook:powersgd", "hook:int8")
# How often each is drawn. Stopping costs the time limit.
FAULTS = {"kill": 8, "raise": 3, "exit": 2, "end": 2, "segv": 2, "memory": 2, "int": 2, "term": 2, "stop": 1}
IN_STEP = ("batch", "forward", "backward", "reduced", "stepped")
INSIDE = (
    *("write", "read", "keep", "give", "meet", "rejoin", "part", "barrier", "renew", "group", "links"),
    *("settle", "vote", "take", "mark", "protect", "done", "replay"),
)
SAVING = ("save", "agree")
OUTSIDE = ("start", "joined", "wrapped", "ready", "over")


def draw(seed: int) -> Case:
    """The case of a seed."""
    chance = random.Random(seed)
    optimizer = chance.choice(OPTIMIZERS)
    model = chance.choice(MODELS)
    if optimizer not in ("plain", "zero") and model.startswith("hook"):
        model = "plain"  # a hook and an update in backward exclude each other
    if optimizer == "inside" and model == "low":
        model = "plain"
    num_faults = chance.choice((1, 1, 2))
    has_loader = chance.random() < 0.85
    saves = chance.random() < 0.1 and optimizer != "inside" and has_loader
    faults = tuple(_draw_fault(chance, number, saves) for number in range(num_faults))
    stops = any(fault[0] == "stop" for fault in faults)
    plan = Plan(
        optimizer=optimizer,
        model=model,
        backend=chance.choice((None, None, None, "gloo")),
        # The program without a loader commits every batch; the reference does not know buffers under no_sync.
        accumulate=chance.choice((1, 1, 1, 2)) if has_loader and optimizer != "inside" and model != "norm" else 1,
        has_loader=has_loader,
        has_extra=seed % 2 == 0,
        samples=chance.choice((90, 150, 151)),
        timeout_s=2.0 if stops else 20.0,
        compiles=chance.random() < 0.02 and model == "plain" and optimizer != "inside",
        saves=saves,
        faults=faults,
    )
    plan = _draw_habits(chance, plan)
    # One of those who hold the state must be left, whoever is hit.
    wanted = 3 if num_faults == 2 else chance.choice((2, 3))
    outside: list[tuple[str, float, int]] = []
    if num_faults == 1 and wanted == 3 and chance.random() < 0.5:
        what = chance.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "scale 2", "scale 4", "SIGSTOP all"))
        what = chance.choice((what, what, what, "SIGSTOP for a moment"))
        # After a generation gets on, or at any moment of the run: while it starts, forms, joins or ends.
        when = round(chance.uniform(0, 0.3), 3) if chance.random() < 0.5 else round(-chance.uniform(0.05, 1.5), 3)
        outside.append((what, when, chance.randrange(3)))
        if "all" in what:
            plan = replace(plan, timeout_s=2.0)
    if plan.compiles:
        # On busy cores compiling takes longer than the shortest limit, and whoever compiles says nothing meanwhile.
        plan = replace(plan, timeout_s=max(plan.timeout_s, 10.0))
    return Case(plan, 1, wanted, 4, tuple(outside), limit_s=180.0 if plan.compiles else 60.0, must_fire=False)


def _draw_habits(chance: random.Random, plan: Plan) -> Plan:
    """What programs do besides: processes that load, evaluations, closures, several models, changes of their own."""
    is_simple = plan.model == "plain" and plan.optimizer in ("plain", "zero", "two") and not plan.compiles
    closes = chance.random() < 0.2 and plan.optimizer in ("plain", "zero") and plan.accumulate == 1
    return replace(
        plan,
        workers=int(chance.random() < 0.15 and plan.has_loader),
        evaluates=chance.random() < 0.3 and plan.has_loader,
        phases=chance.choice((1, 1, 2)) if plan.has_loader else 1,
        closure=closes,
        # Only of a loss: a program that catches its own error and steps all the same is not what it was before.
        catches=chance.random() < 0.15 and not closes and all(fault[0] in ("kill", "end", "segv") for fault in plan.faults),
        around=chance.choice(("", "", "decay", "shrink")) if is_simple else "",
        wrappers=2 if chance.random() < 0.2 and is_simple and not plan.saves else 1,
    )


def _draw_fault(chance: random.Random, number: int, saves: bool) -> tuple[str, str, int, int]:
    what = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
    kind = chance.random()
    if kind < 0.5:
        moment = chance.choice(IN_STEP)
    elif kind < 0.92:
        moment = chance.choice(SAVING if saves and chance.random() < 0.7 else INSIDE) + chance.choice("<>")
    else:
        moment = chance.choice(OUTSIDE)
    if what == "stop" and moment == "start":
        what = "kill"  # one that never starts costs the time for starting
    return what, moment, chance.choice((0, 1, 2, -1)), chance.randrange(8)
