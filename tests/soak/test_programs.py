"""Whole programs and faults drawn at random: program × fault × moment × launcher × backend (`make soak`).

However a rank fails, every process of the program ends by itself, nothing is left behind, nobody aborts, and whoever looks
at the output finds the rank at fault, with its words if it had any. A case that goes wrong prints the plan; it is drawn
again with `PHALANX_SOAK_SEED=<seed> PHALANX_SOAK_PROGRAMS=1`.

| variable | default | |
| --- | --- | --- |
| PHALANX_SOAK_SEED | 0 | the first seed; one case is drawn from each |
| PHALANX_SOAK_PROGRAMS | 120 | stop after as many |
| PHALANX_SOAK_SECONDS | 1500 | or after so long |
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster import reserved_port
from tests.cluster.process import SEARCH_PATH
from tests.soak.program import WORDS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

PROGRAM = Path(__file__).with_name("program.py")
MARK = "PHALANX_SOAK_CASE"
LIMIT_S = 120
PROGRAMS = ("ddp", "hook", "zero", "overlap")
BACKENDS = ("gloo", "phalanx")
LAUNCHERS = ("bare", "spawn", "torchrun", "phalanx")
# How often each is drawn. Stopping costs the group's time limit.
FAULTS = {"none": 2, "raise": 4, "kill": 4, "term": 2, "exit": 2, "stop": 1}
MOMENTS = ("start", "joined", "forward", "between", "backward", "step", "end")
ABORTED = re.compile(r"terminate called|Fatal Python error|SIGABRT|SIGSEGV|Signal (6|11)\b|exitcode\s*: -(6|11)\b")


def draw(seed: int) -> dict[str, Any]:
    """The case of a seed."""
    chance = random.Random(seed)
    world = chance.choice((2, 3))
    fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
    return {
        "seed": seed,
        "program": chance.choice(PROGRAMS),
        "backend": chance.choice(BACKENDS),
        "launcher": chance.choice(LAUNCHERS),
        "fault": fault,
        # A rank that is stopped when it has nothing more to do with the others is waited for by its launcher, for ever.
        "moment": chance.choice(MOMENTS[:-1] if fault == "stop" else MOMENTS),
        "victim": chance.randrange(world),
        "world": world,
        "timeout_s": 10 if fault == "stop" else 30,
    }


def _commands(plan: dict[str, Any], text: str) -> list[list[str]]:
    """One command per process that the user, or a scheduler, would start."""
    program, world = [str(PROGRAM), text], str(plan["world"])
    if plan["launcher"] == "torchrun":
        return [[sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *program]]
    if plan["launcher"] == "phalanx":
        return [[sys.executable, "-m", "phalanx.cli.main", "run", "--nproc", world, "--grace", "2", *program]]
    if plan["launcher"] == "spawn":
        return [[sys.executable, *program]]
    return [[sys.executable, *program] for _ in range(plan["world"])]


def run(plan: dict[str, Any], folder: Path) -> tuple[list[int], list[str], float]:
    """Exit codes and output of the processes started, and how long the last one took. Nobody is left behind."""
    case = uuid.uuid4().hex
    text = json.dumps({**plan, "note": str(folder / "fired")})
    base = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    base |= {"PYTHONPATH": SEARCH_PATH, "OMP_NUM_THREADS": "1", MARK: case, "MASTER_ADDR": "127.0.0.1"}
    files = []
    started = time.monotonic()
    with reserved_port() as port:
        processes = []
        for rank, command in enumerate(_commands(plan, text)):
            environ = {**base, "MASTER_PORT": str(port)}
            if plan["launcher"] == "bare":
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": plan["world"], "LOCAL_WORLD_SIZE": plan["world"]}
                environ |= {name: str(value) for name, value in ranks.items()}
            files.append(open(folder / f"output-{rank}", "w+"))
            processes.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=files[-1], stderr=subprocess.STDOUT))
        try:
            codes = [_wait(process, plan, started) for process in processes]
        finally:
            left = _left(case)
            for process in left:
                process.kill()
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
        file.close()
    # The victim of a stop is stopped until somebody ends it: a scheduler's task, and the launchers'.
    allowed = int(plan["fault"] == "stop" and plan["launcher"] in ("bare", "spawn"))
    assert len(left) <= allowed, f"{plan} left {len(left)} processes behind\n" + "\n".join(texts)[-6000:]
    return codes, texts, time.monotonic() - started


def _wait(process: subprocess.Popen[Any], plan: dict[str, Any], started: float) -> int:
    if plan["fault"] == "stop" and plan["launcher"] == "bare":
        # Nobody ends a process that was stopped, so it is not waited for once the others have given up.
        deadline = started + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline:
            if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                time.sleep(plan["timeout_s"] + 25)
                process.kill()
            time.sleep(0.2)
        return process.wait()
    try:
        return process.wait(max(started + LIMIT_S - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{plan} hangs") from None


def _left(case: str) -> list[psutil.Process]:
    """The processes of a case that are still there, after a moment in which they may end."""
    deadline = time.monotonic() + 5
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == case and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def verify(plan: dict[str, Any], codes: list[int], texts: list[str], fired: bool) -> None:
    """Raise unless everybody ended as it must, and said what it must."""
    everything = "\n".join(texts)
    context = f"{plan}: {codes}\n{everything[-6000:]}"
    assert fired == (plan["fault"] != "none"), f"the fault never fired: {context}"
    assert not ABORTED.search(everything), context
    if plan["fault"] == "none":
        assert set(codes) == {0} and "Error" not in everything and "Traceback" not in everything, context
        return
    victim, bare = plan["victim"], plan["launcher"] == "bare"
    # At the very end the others may be done: nobody need notice a rank that fails after its last collective.
    harmless = plan["moment"] == "end"
    if not bare:
        assert codes[0] != 0, context
        # Launchers name it in their own words: by rank, local rank or number of the process.
        assert re.search(rf"(rank|process)\D{{0,12}}{victim}\b", everything, re.IGNORECASE), context
        assert plan["fault"] != "raise" or WORDS in everything, context
        return
    for rank, (code, text) in enumerate(zip(codes, texts, strict=True)):
        if rank == victim:
            assert code == {"raise": 1, "kill": -9, "term": -15, "exit": 7, "stop": -9}[plan["fault"]], context
        elif not harmless:
            assert code == 1, context
            # Before they have met, nobody knows who is missing; torch's own rendezvous says so in its words.
            assert plan["moment"] == "start" or f"rank {victim}" in text, context
            assert plan["fault"] != "raise" or plan["moment"] in ("start", "joined") or WORDS in text, context


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"PHALANX_SOAK_{name}", default))


def test_whole_programs_end_by_themselves_and_name_who_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, num_cases = _setting("SEED", 0), _setting("PROGRAMS", 120)
    deadline = time.monotonic() + _setting("SECONDS", 1500)
    seen: Counter[str] = Counter()
    slowest = (0.0, -1)
    for seed in range(first, first + num_cases):
        if time.monotonic() > deadline:
            break
        plan, folder = draw(seed), tmp_path / str(seed)
        folder.mkdir()
        codes, texts, seconds = run(plan, folder)
        verify(plan, codes, texts, (folder / "fired").exists())
        seen[f"{plan['fault']} under {plan['launcher']}"] += 1
        slowest = max(slowest, (seconds, seed))
        with capsys.disabled():
            print(f"\rsoak: {seen.total()} programs, seed {seed}", end="", flush=True)
    with capsys.disabled():
        table = ", ".join(f"{number} {what}" for what, number in sorted(seen.items()))
        print(f"\nslowest {slowest[0]:.0f} s (seed {slowest[1]}); {table}")
