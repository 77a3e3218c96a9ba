"""Runs cases one after the other, in one process that has everything imported and forks whatever they start.

    python -m tests.soak.programs.driver faults < plans as JSON      one plan each (tests/soak/programs/faults.py)
    python -m tests.soak.programs.driver ends   < plans as JSON      (tests/soak/programs/ends.py)

Prints a line of JSON per plan: the plan, what became of it, and in "problem" what is wrong with that, if anything is.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Without this the launcher of torch would import it anew in each case: two seconds of a core.
import torch.distributed.run  # noqa: F401

import tests.cluster.preload  # noqa: F401
from tests.cluster.command import fork_own_starter
from tests.soak.programs import case, ends, faults

KINDS: dict[str, Any] = {"faults": faults.run, "ends": ends.run}


def conduct(kind: str, plans: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The outcome of each plan."""
    for plan in plans:
        with tempfile.TemporaryDirectory(prefix="case-", dir=Path(tempfile.gettempdir()).parent) as folder:
            outcome, problem = KINDS[kind](plan, Path(folder))
        yield {"plan": plan, **asdict(outcome), "problem": problem, "load": round(os.getloadavg()[0], 1)}


def main(kind: str) -> None:
    folder = case.temporary_folder()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup all cases would inherit that it is ignored
    job = fork_own_starter()
    if job is not None:
        # A process of some case: it leaves through the interpreter's own end, as a user's does.
        program, arguments = job
        program(arguments)
        return
    case.adopt_orphans()
    try:
        for outcome in conduct(kind, json.load(sys.stdin)):
            print(json.dumps(outcome), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
