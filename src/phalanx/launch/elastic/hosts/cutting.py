"""A worker's connections to ranks of a host that was lost are cut here, since nobody there closes them.

When a process dies, the kernel of its host closes its sockets, and whoever waits for it is told. When a host is lost, or the
network to it, nobody tells: a collective waits for the time limit, in C++. The launcher knows sooner, and writes to the
worker's page that the generation is over. What still waits a while after that is cut.
"""

from __future__ import annotations

import threading
import time

from phalanx.comm.failure import gloo_threads
from phalanx.comm.failure.interruption import Interruption

_LOOK_S = 0.1
# A rank that comes to the meeting ends the generation as well, perhaps while another still waits for the end of their last
# barrier: that has time to end by itself.
_GRACE_S = 0.7


class Cutter:
    """Watches the generation that this worker is in. A thread that ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: Interruption | None = None
        self._over_since: float | None = None
        threading.Thread(target=self._run, name="phalanx-cutter", daemon=True).start()

    def watch(self, interruption: Interruption) -> None:
        """A new generation has begun; the one before cannot be cut any more, nor this one by the end of that."""
        with self._lock:
            self._watched, self._over_since = interruption, None

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_LOOK_S)
            with self._lock:
                self._look(time.monotonic())

    def _look(self, now: float) -> None:
        if self._watched is None or self._watched.error() is None:
            return
        self._over_since = now if self._over_since is None else self._over_since
        if now - self._over_since > _GRACE_S:
            # With the lock held: by the time that there is another generation, its connections must be safe from this.
            gloo_threads.cut()
            self._watched = None
