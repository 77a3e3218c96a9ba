"""What this process is doing now: one object that training updates, and a thread that tells whoever looks.

Like `trace`, anyone may import it and it imports only errors; unlike it, it is always on, so an update is a few
assignments. `phalanx run` names a file in which the pulse is written twice a second; the status line and `phalanx top`
read it (`launch.records.status`). A look at a file costs the ranks nothing, and works for who comes later.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phalanx.observe.trace import now_ns, resident_bytes

STATUS_FILE = "PHALANX_STATUS_FILE"
"""Environment variable: where a worker of `phalanx run` writes its pulse."""

BEAT_S = 0.5
_WINDOW_BEATS = 20  # rates are of the last ten seconds
_RECORD_BYTES = 512
_UPDATES_BY_CHANCE = 8  # fewer are no training yet

STARTING, COMPUTING, WAITING, ENDED = "starting", "computing", "waiting", "ended"


class Pulse:
    """Counts and states of the training thread. Written by it alone; the thread of `Beat` reads."""

    def __init__(self) -> None:
        self.state = STARTING
        self.since_ns = now_ns()
        self.passes = 0
        """Backwards that were reduced."""
        self.updates = 0
        """Optimizer steps; of use where nothing is reduced."""
        self.committed: int | None = None
        """Of an elastic run: the steps of all, whoever made them. One who comes has not been there from the first."""
        self.num_changes = 0
        """How often the ranks of an elastic run were others from one moment to the next."""
        self.waited_ns = 0
        """Time that the training thread stood still for communication."""
        self.samples = 0
        self.loss: float | None = None
        self.reductions: int | None = None
        """Collectives that add up, through a group of ours; None if there is none, and nobody counts."""

    def enters(self, state: str) -> None:
        """The training thread goes over to `state` now."""
        now = now_ns()
        if self.state == WAITING:
            self.waited_ns += now - self.since_ns
        self.state, self.since_ns = state, now

    def goes_on_from(self, step: int) -> None:
        """With other ranks, from a step that this process may not have come to by itself."""
        self.committed, self.num_changes = step, self.num_changes + 1

    @property
    def steps(self) -> int:
        """Committed ones of an elastic run; else passes where the script has any, else optimizer steps."""
        return self.passes or self.updates if self.committed is None else self.committed

    @property
    def trains_apart(self) -> bool:
        """Whether optimizers step, and nothing is added up that could be their gradients."""
        counted = self.reductions is not None and self.passes == 0
        return counted and self.updates >= _UPDATES_BY_CHANCE and 2 * (self.reductions or 0) < self.updates


pulse = Pulse()
"""Of this process."""


@contextmanager
def waiting() -> Iterator[None]:
    """Around a collective that the training thread stands still for."""
    pulse.enters(WAITING)
    try:
        yield
    finally:
        pulse.enters(COMPUTING)


class Beat:
    """Writes the pulse to a file until it is closed. The file belongs to this process alone."""

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # (time, steps, waited, samples) of recent beats.
        self._recent: deque[tuple[int, int, int, int]] = deque(maxlen=_WINDOW_BEATS)
        self._num_changes = 0
        self._has_joined = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write a last time, as ended, and stop. Closing twice is harmless."""
        if self._closing.is_set():
            return
        pulse.enters(ENDED)
        self._closing.set()
        self._thread.join()
        os.close(self._descriptor)

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(BEAT_S)
            text = json.dumps(self.record(), separators=(",", ":"))
            try:
                # One write of one size: a reader sees the old record or the new one.
                os.pwrite(self._descriptor, text.encode().ljust(_RECORD_BYTES), 0)
            except OSError:
                return  # a full disk; a status is not worth a word

    def record(self) -> dict[str, Any]:
        """What is written: the state now, and rates over the last seconds."""
        now = now_ns()
        waited = pulse.waited_ns + (now - pulse.since_ns if pulse.state == WAITING else 0)
        if pulse.num_changes != self._num_changes:
            # What a rank was given when it came, it has not made in the last seconds.
            self._num_changes = pulse.num_changes
            self._recent.clear()
        self._has_joined = self._has_joined or _is_among_others()
        self._recent.append((now, pulse.steps, waited, pulse.samples))
        then = self._recent[0]
        seconds = max(now - then[0], 1) / 1e9
        return {
            "rank": self._rank,
            "state": pulse.state,
            "for_s": round((now - pulse.since_ns) / 1e9, 3),
            "step": pulse.steps,
            # Never below 0: steps count updates until there are passes, which may be fewer.
            "steps_per_s": round(max(0, pulse.steps - then[1]) / seconds, 4),
            "waiting": round((waited - then[2]) / 1e9 / seconds, 4),
            "samples_per_s": round((pulse.samples - then[3]) / seconds, 2),
            "loss": pulse.loss,
            "resident": resident_bytes(),
            "wall_s": round(time.time(), 3),
            "apart": pulse.trains_apart,
            "joined": self._has_joined,
        }


def _is_among_others() -> bool:
    """Whether this process is in a process group or runs RPC, wherever it has met the others."""
    # Asked in a thread of its own, perhaps while the program is in the midst of importing them.
    asked = (("torch.distributed", "is_initialized"), ("torch.distributed.rpc", "_is_current_rpc_agent_set"))
    found = [getattr(sys.modules.get(module), name, None) for module, name in asked]
    return any(is_there is not None and is_there() for is_there in found)
