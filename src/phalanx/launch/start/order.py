"""What is asked for when a process is to be started, in whichever way. Plain data, no behaviour.

Both ways of starting (`plain`, `starter`) take an `Order` and return a `Child`, and the process that comes out of it
must not be able to tell them apart; tests/launch/test_start.py compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

# A worker is started with these blocked, and lets them in as its first act: a signal that came in between would find
# Python's own handlers, or none.
HANDLED_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")

# `python -c` looks for modules in the working directory before anywhere else. That may be anybody's, /tmp say, and what lies
# there must not be taken for torch or json. Only where the launcher itself was found there (`python -m phalanx`, in a folder
# of sources) is there no other way. `bootstrap` puts the script's folder first, as Python does.
#
# While torch is imported, which takes seconds, SIGINT does what it does to any program: end it without a word. Python's own
# handler, which would print where the import was, comes back in `bootstrap.main`.
ENTRANCE = """\
import sys
here = [] if sys.flags.safe_path else [sys.path.pop(0)]
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
import importlib.util
if importlib.util.find_spec("phalanx") is None:
    sys.path[:0] = here
"""

WORKER_PROGRAM = f"""\
{ENTRANCE}signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}})
from phalanx.launch.bootstrap import main
main(sys.argv[1:])
"""
WORKER = "phalanx.launch.bootstrap:main"


@dataclass(frozen=True)
class Order:
    """One process to be started. Descriptors stay the caller's, who may close them when it has started."""

    arguments: tuple[str, ...]
    """For the program: `script.py …`, or `--module name …`."""
    environ: Mapping[str, str]
    """All of its environment."""
    stdout: int
    stderr: int
    stdin: int | None = 0
    """None: it has none, as a process whose standard input was closed."""
    kept: tuple[int, ...] = ()
    """Further descriptors that it has, under the same numbers. All others are closed to it."""
    cwd: str | None = None
    program: str = WORKER
    """`module:function`, called with `arguments`. Only a warm starter can run another than `WORKER`."""
    new_session: bool = True
    """Whether it leads a session and a process group of its own, so that all it starts can be told to end with it."""

    def command(self) -> list[str]:
        """As `sys.orig_argv` shows it, however it was started."""
        return [sys.executable, "-u", "-c", WORKER_PROGRAM, *self.arguments]
