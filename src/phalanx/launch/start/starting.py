"""How the workers of one run are started: warm where that is possible and worth it, plainly otherwise.

Owns the run's starter. A caller sees a function that starts workers and, in `words`, how it did.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.launch.start.child import Child
from phalanx.launch.start.order import Order
from phalanx.launch.start.plain import start_plainly
from phalanx.launch.start.starter import Starter, StarterGone, kept_for, signals_blocked, why_not


class Starting:
    """`begin` early, `wait` before the first `start`, `close` at the end, however things go."""

    def __init__(self, environ: Mapping[str, str], nproc: int, can_restart: bool) -> None:
        self._environ = environ
        # A single worker that is never started again gains nothing from a process that imports torch for it.
        self._worth_it = nproc > 1 or can_restart
        self._can_restart = can_restart
        self._nproc = nproc
        self._own: Starter | None = None
        self._starter: Starter | None = None
        self._num_started = 0
        self._why_plain = ""

    def begin(self) -> None:
        """Let a starter begin to import torch, while the caller waits for other hosts."""
        self._why_plain = why_not(self._environ)
        if self._why_plain:
            return
        self._starter = kept_for(self._environ)
        if self._starter is None and not self._worth_it:
            self._why_plain = "a single worker"
        elif self._starter is None:
            try:
                # Blocked until it is written down, or a signal would leave one that nobody closes.
                with signals_blocked():
                    self._starter = self._own = Starter.spawn(self._environ)
            except OSError as error:
                self._why_plain = f"the starter could not be started: {error.strerror}"

    def wait(self) -> None:
        """Return when the starter has imported torch, or has turned out to be of no use."""
        if self._starter is not None and not self._starter.is_ready():
            self._give_up(self._starter.fault)

    def start(self, order: Order) -> Child:
        """Start a worker. With signals blocked; see `Starter.start`."""
        if self._starter is not None:
            try:
                child = self._starter.start(order)
            except StarterGone as gone:
                self._give_up(str(gone))
            else:
                self._num_started += 1
                if self._num_started == self._nproc and not self._can_restart:
                    self._close_own()  # nobody will need it again; its memory is shared, but it is a process more
                return child
        return start_plainly(order)

    @property
    def words(self) -> str:
        """How workers were started, for the run's record."""
        return f"plain ({self._why_plain})" if self._why_plain else "warm"

    def close(self) -> None:
        """End the run's own starter. Closing twice is harmless."""
        self._close_own()

    def _give_up(self, why: str) -> None:
        self._why_plain = why
        self._starter = None
        self._close_own()

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None
