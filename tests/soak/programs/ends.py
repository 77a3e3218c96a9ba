"""The ways in which programs end, under each launcher and on each backend: what exit codes and words must come of it."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
from pathlib import Path
from typing import Any

from tests.soak.programs.case import LAUNCHERS, LIMIT_S, Case, Outcome

PROGRAM = Path(__file__).with_name("ends_program.py")
BACKENDS = ("gloo", "phalanx")
CLEAN = ("return", "exit", "leave", "destroy")
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
WAYS = (*CLEAN, "raise", *SIGNALS)
ABORTED = re.compile(r"terminate called|Fatal Python error|SIGABRT|SIGSEGV|Signal (6|11)\b|exitcode\s*: -(6|11)\b")
# What launchers say of themselves; whatever else is said at a clean end should not be.
_EXPECTED = re.compile(r"OMP_NUM_THREADS|^\*+$|torch\.distributed\.run|^phalanx: finished in [0-9.]+ s$")

# By way and launcher: the exit codes that are right. Python's own program ends by SIGINT itself where it was interrupted. A
# rank that is told by another's end before it hears the signal itself fails by that, with 1.
_INTERRUPTED = {"phalanx": {128 + signal.SIGINT}, "torchrun": {1}, "bare": {-signal.SIGINT, 1}, "spawn": {-signal.SIGINT, 1}}
_TERMINATED = {
    "phalanx": {128 + signal.SIGTERM},
    "torchrun": {1},
    "bare": {-signal.SIGTERM, 1},
    "spawn": {-signal.SIGTERM},
}


def plans(rounds: range) -> list[dict[str, Any]]:
    """Every kind once per round; worlds and optimizers take turns."""
    return [
        {"launcher": launcher, "backend": backend, "way": way, "world": 2 + number % 2, "zero": number % 3 == 1}
        for number in rounds
        for launcher, backend, way in itertools.product(LAUNCHERS, BACKENDS, WAYS)
    ]


def run(plan: dict[str, Any], folder: Path) -> tuple[Outcome, str]:
    """What became of the plan, and what is wrong with it; empty if nothing is."""
    text = json.dumps({**plan, "folder": str(folder)})
    case = Case(plan["launcher"], plan["world"], [str(PROGRAM), text], folder)
    told = None
    if plan["way"] in SIGNALS:
        while not all((folder / f"ready-{rank}").exists() for rank in range(plan["world"])):
            if time.monotonic() > case.started + LIMIT_S / 2:
                break  # it ends by itself, or is found to hang
            time.sleep(0.01)
        told = time.monotonic()
        case.tell(SIGNALS[plan["way"]])
    outcome = case.end()
    outcome.ending_s = None if told is None else case.started + outcome.seconds - told
    return outcome, "; ".join(_faults(plan, outcome))


def _faults(plan: dict[str, Any], outcome: Outcome) -> list[str]:
    way, found = plan["way"], []
    if None in outcome.codes:
        found.append("hangs")
    if not set(outcome.codes) <= _right_codes(way, plan["launcher"]):
        found.append(f"exit codes {outcome.codes}")
    if ABORTED.search(outcome.said):
        found.append("aborts")
    if outcome.left:
        found.append(f"left {outcome.left}")
    if way in CLEAN:
        said = [line for line in outcome.said.splitlines() if line.strip() and not _EXPECTED.search(line)]
        found += [f"said {' | '.join(said)[:1500]}"] if said else []
    if way == "raise" and "words of rank" not in outcome.said:
        found.append("the words were not said")
    return found


def _right_codes(way: str, launcher: str) -> set[int]:
    if way in CLEAN:
        return {0}
    if way == "raise":
        return {1}
    return (_INTERRUPTED if way == "interrupt" else _TERMINATED)[launcher]
