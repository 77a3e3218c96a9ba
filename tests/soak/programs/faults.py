"""Whole programs and faults drawn at random: program × fault × moment × launcher × backend; and what must come of each."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.command import Command
from tests.soak.programs.case import LAUNCHERS, LIMIT_S, Case, Outcome
from tests.soak.programs.ends import ABORTED, BACKENDS
from tests.soak.programs.program import WORDS

PROGRAM = Path(__file__).with_name("program.py")
PROGRAMS = ("ddp", "hook", "zero", "overlap", "stage2", "shared", "mixed", "buffers", "powersgd", "join", "saves")
# How often each is drawn. Stopping costs the group's time limit.
FAULTS = {"none": 2, "raise": 4, "kill": 4, "term": 2, "exit": 2, "stop": 1}
FAULTS |= {"memory": 2, "segv": 2, "leave": 2, "end": 2, "hup": 1, "deaf": 1}
HARMLESS = ("none", "deaf")
MOMENTS = ("start", "joined", "forward", "between", "backward", "step", "end")
_SHORT_S = 10


def draw(seed: int) -> dict[str, Any]:
    """The case of a seed."""
    chance = random.Random(seed)
    world = chance.choice((2, 3))
    fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
    plan = {
        "seed": seed,
        "program": chance.choice(PROGRAMS),
        "backend": chance.choice(BACKENDS),
        "launcher": chance.choice(LAUNCHERS),
        "fault": fault,
        # A rank that is stopped when it has nothing more to do with the others is waited for by its launcher, for ever; and
        # one that ends well there has done nothing wrong.
        "moment": chance.choice(MOMENTS[:-1] if fault in ("stop", "leave", "end") else MOMENTS),
        "victim": chance.randrange(world),
        "world": world,
    }
    # Whoever never comes is waited for until the time limit.
    plan["timeout_s"] = _SHORT_S if fault == "stop" or plan["moment"] == "start" else 30
    return plan


def run(plan: dict[str, Any], folder: Path) -> tuple[Outcome, str]:
    """What became of the plan, and what is wrong with it; empty if nothing is."""
    note = folder / "fired"
    case = Case(plan["launcher"], plan["world"], [str(PROGRAM), json.dumps({**plan, "note": str(note)})], folder)
    waits = plan["fault"] == "stop" and plan["launcher"] == "bare"
    outcome = case.end((lambda process, started: _wait_beside_stopped(process, started, plan)) if waits else None)
    return outcome, "; ".join(_wrong(plan, outcome, note.exists()))


def _wait_beside_stopped(process: Command, started: float, plan: dict[str, Any]) -> int | None:
    """Nobody ends a process that was stopped, so it is not waited for once the others have given up."""
    deadline = started + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
            time.sleep(plan["timeout_s"] + 25)
            process.kill()
        time.sleep(0.1)
    if process.poll() is not None:
        return process.returncode
    process.kill()
    process.wait()
    return None


def _wrong(plan: dict[str, Any], outcome: Outcome, fired: bool) -> list[str]:
    found = [] if fired == (plan["fault"] != "none") else ["the fault never fired"]
    if None in outcome.codes:
        found.append("hangs")
    others = [code for rank, code in enumerate(outcome.codes) if plan["fault"] != "segv" or rank != plan["victim"]]
    if (plan["fault"] != "segv" and ABORTED.search(outcome.said)) or {-6, -11} & set(others):
        found.append("aborts")
    # The victim of a stop is stopped until somebody ends it: a scheduler's task, and the launchers'.
    allowed = int(plan["fault"] == "stop" and plan["launcher"] in ("bare", "spawn"))
    if len(outcome.left) > allowed:
        found.append(f"left {outcome.left}")
    if plan["fault"] in HARMLESS:
        well = set(outcome.codes) == {0} and "Error" not in outcome.said and "Traceback" not in outcome.said
        return found if well else [*found, "did not end well"]
    return [*found, *(_wrong_alone if plan["launcher"] == "bare" else _wrong_launched)(plan, outcome)]


def _wrong_launched(plan: dict[str, Any], outcome: Outcome) -> list[str]:
    """Launchers name the victim in their own words: by rank, local rank or number of the process."""
    found = [] if outcome.codes[0] != 0 else ["the launcher says that all is well"]
    if not re.search(rf"(rank|process)\D{{0,12}}{plan['victim']}\b", outcome.said, re.IGNORECASE):
        found.append("the victim is not named")
    if plan["fault"] == "raise" and WORDS not in outcome.said:
        found.append("its words are missing")
    return found


def _wrong_alone(plan: dict[str, Any], outcome: Outcome) -> list[str]:
    found, victim, fault, moment = [], plan["victim"], plan["fault"], plan["moment"]
    for rank, (code, text) in enumerate(zip(outcome.codes, outcome.texts, strict=True)):
        if rank == victim:
            right = {"raise": 1, "kill": -9, "term": -15, "exit": 7, "stop": -9}
            right |= {"memory": 1, "segv": -11, "leave": 0, "end": 0, "hup": -1}
            found += [] if code == right[fault] else [f"rank {rank}, the victim, has exit code {code}"]
        # At the very end the others may be done: nobody need notice a rank that fails after its last collective.
        elif moment != "end":
            found += [] if code == 1 else [f"rank {rank} has exit code {code}"]
            # Before they have met, nobody knows who is missing; torch's own rendezvous says so in its words.
            named = moment == "start" or f"rank {victim}" in text
            found += [] if named else [f"rank {rank} does not name the victim"]
            has_words = fault != "raise" or moment in ("start", "joined") or WORDS in text
            found += [] if has_words else [f"rank {rank} does not have the victim's words"]
    return found
