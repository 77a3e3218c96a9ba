"""A launcher of torch's own whose Python children are forked too, in place of importing torch each for themselves.

    python -m tests.soak.programs.warmly -m torch.distributed.run --standalone --nproc-per-node=2 program.py …
    python -m tests.soak.programs.warmly program_that_calls_mp_spawn.py …

The launcher, its children, their sessions, signals and exit codes are real. A soak starts thousands of them.
"""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.launch.start.order import Order
from phalanx.launch.start.starter import kept_for, signals_blocked
from tests.cluster.command import Command, fork_own_starter, run_python


def execute_child(process: subprocess.Popen[Any], args: Any, *rest: Any) -> None:
    """What `Popen` makes its process by in such a launcher. Patched there, since torch has imported the class by name."""
    words = [args] if isinstance(args, str) else [os.fsdecode(word) for word in args]
    environ = dict(os.environ if rest[5] is None else rest[5])
    starter = kept_for({**environ, "PYTHONUNBUFFERED": "1"}) if words[0] == sys.executable else None
    if starter is None:
        _execute_child(process, args, *rest)
    else:
        Command._fork(process, starter, _program(words), environ, rest[4], rest[3], rest[9:15], bool(rest[20]))  # type: ignore[arg-type]


def _program(words: Sequence[str]) -> list[str]:
    """What follows the options of the interpreter: `-c …`, `-m …` or a script."""
    first = next(at for at, word in enumerate(words) if at and (word in ("-c", "-m") or not word.startswith("-")))
    return list(words[first:])


def spawn(path: Any, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
    """What `multiprocessing` calls to start a child of the method "spawn"; its pid."""
    words = [os.fsdecode(word) for word in arguments]
    starter = kept_for({**os.environ, "PYTHONUNBUFFERED": "1"})
    if starter is None or "resource_tracker" in " ".join(words):
        return _spawn(path, arguments, descriptors)
    kept = tuple(sorted(map(int, descriptors)))
    # In our own session it cannot be, which is the starter's: who plays a terminal has to tell each of them.
    program = f"{run_python.__module__}:run_python"
    order = Order(tuple(_program(words)), dict(os.environ), 1, 2, kept=kept, program=program, new_session=False)
    with signals_blocked():
        child = starter.start(order)
    os.close(child.sentinel)  # multiprocessing waits for it itself
    return child.pid


_spawn = multiprocessing.util.spawnv_passfds
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Run the launcher; in a process forked for it, what it is to run."""
    job = fork_own_starter()
    if job is not None:
        program, given = job
        program(given)
        return
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]
    run_python(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
