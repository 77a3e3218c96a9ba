"""What the `phalanx` command runs first: nothing, quickly.

`import phalanx` imports torch, which takes seconds. The command line needs neither for help, completion or a typing
mistake, so here it asks the package not to (`phalanx._imports_all`), and what a subcommand needs is imported when it runs.
An interrupt during those imports should end the command, not print where in torch it was; so it keeps its default meaning
until the command line can handle it. A module of its own, since a module of the package could not run before the package.
"""

from __future__ import annotations

import signal

is_running = False
"""Whether this process is the command, and not a program that imports the package."""


def main() -> None:
    """The entry point of the `phalanx` command. Never returns."""
    global is_running
    is_running = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
