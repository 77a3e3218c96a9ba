"""What the `phalanx` command runs first: nothing, quickly.

Importing the package imports torch, which takes seconds. An interrupt in that time should end the command, not print
where in torch's imports it was; so it keeps its default meaning until the command line can handle it. A module
of its own, since a module of the package could not run before the package is imported.
"""

from __future__ import annotations

import signal


def main() -> None:
    """The entry point of the `phalanx` command. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
